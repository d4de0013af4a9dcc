"""`export_onnx`: some layers as one ONNX file."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import onnx
from onnx import helper

from ds41_tvm import __version__
from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.config_checks import layer_list
from ds41_tvm.errors import ConfigError, Ds41Error, UsageError
from ds41_tvm.onnx_export import docs
from ds41_tvm.onnx_export.builder import Library
from ds41_tvm.onnx_export.layer import LayerGraph
from ds41_tvm.onnx_export.weights import INLINE_LIMIT, Digest, LayerWeights, external, inline

LEAST_OPSET = 18  # Reduce* with axes as an input, Split by sizes
DEFAULT_OPSET = 18
AUTO_INLINE = 1 << 30
PREFIX = "ds41."
WeightsAs = Literal["auto", "inline", "external", "none"]


@dataclass(frozen=True)
class Exported:
    """What was written: bytes of weights, nodes of the main graph, names of inputs and outputs in order."""

    path: Path
    data: Path | None
    layers: tuple[int, ...]
    outside: tuple[int, ...]
    opset: int
    weight_bytes: int
    nodes: int
    functions: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    digest: str


def export_onnx(
    config: AttentionConfig,
    weights: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    layers: Iterable[int] | None = None,
    linear: str = "bf16",
    opset: int = DEFAULT_OPSET,
    weights_as: WeightsAs = "auto",
    keys: Literal["own", "published"] = "own",
) -> Exported:
    """Write `layers` (None: all) as one ONNX model that serves prefill, chunks and decode.

    Inputs ``x.{l}`` f32 [batch, tokens, dim], ``start_pos`` int64 scalar and the layers' caches ``past_*``;
    outputs ``y.{l}`` f32 (bf16 values), the caches ``present_*``, ``selection.{l}`` and ``candidates.{l}``; names
    and axes in `onnx_export.docs`. A layer whose source is not among `layers` takes what that leaves in the step
    as further inputs, named as the source's outputs are. `weights` as for `build`. `weights_as`: ``inline``,
    ``external`` (beside the file, ``{name}.data``), ``none`` (graph inputs under the official names; `weights`
    may be None), ``auto``: external above 1 GiB. `keys` as for `Runner`; ``published`` needs every source.

    The file appears under its name when complete. Raises ConfigError, UsageError, the errors of missing or
    misshapen weights, and Ds41Error if the file cannot be written.
    """
    chosen = tuple(range(config.n_layers)) if layers is None else layer_list(layers, config.n_layers)
    mode = config.check_linear(linear)
    newest = onnx.defs.onnx_opset_version()
    if not LEAST_OPSET <= opset <= newest:
        raise UsageError(f"opset {opset}: expected {LEAST_OPSET}..{newest}")
    if weights_as not in ("auto", "inline", "external", "none"):
        raise UsageError(f"weights {weights_as!r}: expected auto, inline, external or none")
    if keys not in ("own", "published"):
        raise ConfigError(f"keys {keys!r}: there is no such rule; expected own or published")
    if keys == "published":
        closure(config, chosen)
    outside = tuple(sorted(_sources(config, chosen) - set(chosen)))

    library = Library(opset)
    graph = LayerGraph(config, chosen, mode, keys, library)
    given = LayerWeights(config, chosen, mode, weights)
    names = list(graph.weights)
    digest = Digest()
    target = Path(path)
    try:
        writer = _Writer(target)
    except OSError as error:
        raise Ds41Error(f"{target}: cannot be written ({error.strerror or error})") from None
    try:
        where = _where(weights_as, given, names)
        size = 0
        model = _model(graph, library)
        if where == "none":
            model.graph.input.extend(helper.make_tensor_value_info(n, given.dtype(n), given.shapes[n]) for n in names)
        elif where == "inline":
            size = inline(given, names, digest, model)
        else:
            location = target.name + ".data"
            size = external(given, names, digest, model, writer.new(location), location)
        text = "none" if where == "none" else digest.text()
        helper.set_model_props(model, _metadata(config, chosen, mode, keys, text))
        model_file = writer.new(target.name)
        with model_file.open("wb") as out:
            out.write(model.SerializeToString())
        writer.commit()
    except OSError as error:
        raise Ds41Error(f"{target}: cannot be written ({error.strerror or error})") from None
    finally:
        writer.discard()
    return Exported(
        path=target,
        data=target.with_name(target.name + ".data") if where == "external" else None,
        layers=chosen,
        outside=outside,
        opset=opset,
        weight_bytes=size,
        nodes=len(graph.body.nodes),
        functions=len(library.protos),
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(graph.outputs),
        digest=text,
    )


def _sources(config: AttentionConfig, layers: Iterable[int]) -> set[int]:
    roles = [config.role(layer) for layer in layers]
    found = {s for role in roles for s in (role.kv_source, role.index_source, role.candidate_source)}
    return {source for source in found if source is not None}


def _where(asked: WeightsAs, given: LayerWeights, names: list[str]) -> str:
    bytes_ = sum(
        math.prod(given.shapes[name]) * (1 if given.dtype(name) == onnx.TensorProto.UINT8 else 2) for name in names
    )
    if asked == "inline" and bytes_ > INLINE_LIMIT:
        raise UsageError(f"weights of {bytes_} bytes do not fit into one ONNX file (2 GiB); write them external")
    if asked == "auto":
        return "inline" if bytes_ <= AUTO_INLINE else "external"
    return asked


def _model(graph: LayerGraph, library: Library) -> onnx.ModelProto:
    """The model without its weights."""
    imports = library.imports()
    version = max(8, helper.find_min_ir_version_for(imports, ignore_unknown=True))  # 8: the first with functions
    model = onnx.ModelProto(ir_version=version)
    model.opset_import.extend(imports)
    model.functions.extend(library.protos)
    model.graph.name = "attention"
    model.graph.node.extend(graph.body.nodes)
    for values, ours in ((model.graph.input, graph.inputs), (model.graph.output, graph.outputs)):
        for value in ours.values():
            value.doc_string = docs.describe(value.name)
            values.append(value)
    model.producer_name, model.producer_version = "ds41-tvm", __version__
    model.doc_string = docs.MODEL
    return model


def _metadata(config: AttentionConfig, layers: tuple[int, ...], linear: str, keys: str, weights: str) -> dict[str, str]:
    roles = [msgspec.to_builtins(config.role(layer)) for layer in layers]
    values = {
        "config": json.dumps(config.to_dict(), sort_keys=True, separators=(",", ":")),
        "config_digest": config.digest(),
        "layers": ",".join(map(str, layers)),
        "roles": json.dumps(roles, separators=(",", ":")),
        "ties": "lowest-index",
        "keys": keys,
        "linear": linear,
        "weights_digest": weights,
        "version": __version__,
    }
    return {PREFIX + name: value for name, value in values.items()}


class _Writer:
    """Files that appear together when complete, the model last."""

    def __init__(self, target: Path) -> None:
        if target.exists() and not target.is_file():  # replacing a device by a file would do harm
            raise OSError(errno.EEXIST, "exists and is no file")
        self._folder = target.parent
        self._files: list[tuple[Path, Path]] = []

    def new(self, name: str) -> Path:
        partial = self._folder / f".{name}.{os.getpid()}.partial"
        self._files.append((partial, self._folder / name))
        return partial

    def commit(self) -> None:
        for partial, final in self._files:
            os.replace(partial, final)
        self._files.clear()

    def discard(self) -> None:
        for partial, _ in self._files:
            with suppress(OSError):  # its folder may not exist
                partial.unlink()
