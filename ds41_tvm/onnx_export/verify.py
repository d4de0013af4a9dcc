"""`verify_onnx`: one exported file through the checker and several engines, beside the compiled layers."""

from __future__ import annotations

import json
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ds41_tvm.checkpoint import random_input
from ds41_tvm.config import AttentionConfig
from ds41_tvm.config_checks import layer_list
from ds41_tvm.errors import Ds41Error, UsageError
from ds41_tvm.numerics.formats import bf16_decode
from ds41_tvm.onnx_export.engines import model_inputs, onnxruntime_engine, reference_engine, tvm_engine
from ds41_tvm.onnx_export.export import PREFIX
from ds41_tvm.onnx_export.judge import Row, judge_step
from ds41_tvm.onnx_export.outside import Outside
from ds41_tvm.onnx_export.play import Array, Session
from ds41_tvm.onnx_export.weights import read_weights
from ds41_tvm.runtime.threads import check_threads

ENGINES = ("onnxruntime", "onnx", "tvm")
SMALL = 64 << 20  # bytes of weights up to which the evaluator and TVM's importer are tried
TVM_STEPS = 2  # each is compiled anew
# Relative error of y against the compiled layers. Both sum in f32, in different orders: a bf16 rounding that falls
# the other way is carried on, and may tip a quantiser, in whose format one step is an eighth (e4m3) or more of a
# value. Measured: nothing at tiny sizes, up to 4e-3 beyond, in a single token with fp8 linears too. There the input
# of wo_b is quantised as well: one step of its largest value would be 1.4e-2 at 192 channels.
TOLERANCE = 2e-3
TOLERANCE_WIDE = 1e-2
TOLERANCE_FP8 = 2e-2
WIDE = 128  # dim from which the second one holds

U16 = NDArray[np.uint16]


@dataclass
class Verified:
    """Outcome of `verify_onnx`: what the checker said (empty: nothing) and a row per step and engine."""

    path: Path
    metadata: dict[str, str]
    checker: str
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is out."""
        return not self.checker and all(row.ok for row in self.rows)


def verify_onnx(
    path: str | Path,
    steps: Sequence[int] | None = None,
    weights: Mapping[str, Any] | None = None,
    engines: Iterable[str] = ENGINES,
    batch: int = 1,
    seed: str = "verify",
    tolerance: float | None = None,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verified:
    """Check an exported file and run it beside the compiled layers on the same tokens.

    onnx's checker with full checks and strict shape inference; then `steps` tokens per call (default: a prompt
    beyond the window and the selection, a chunk, decode steps) through the compiled layers and each of `engines`.
    Each engine keeps its own caches. A row is good if no selection differs, except few that differ by a rounding
    tie, and over the rows whose selection agrees ||y - y'|| / ||y'|| <= `tolerance` for every layer (None: 2e-3;
    1e-2 where dim is at least 128; 2e-2 with fp8 linears).

    `weights` are needed where the file has none, or lacks sources of its layers. The engines ``onnx`` and ``tvm``
    run small files only (64 MiB of weights), the latter the first two steps. Raises UsageError if the file is not
    one of ours.
    """
    path = Path(path)
    names = tuple(engines)
    for name in names:
        if name not in ENGINES:
            raise UsageError(f"engine {name!r}: expected some of {', '.join(ENGINES)}")
    model = _load(path)
    meta = {p.key.removeprefix(PREFIX): p.value for p in model.metadata_props if p.key.startswith(PREFIX)}
    if "config" not in meta:
        raise UsageError(f"{path}: no ds41 metadata; expected a file written by export_onnx")
    config, layers = _described(path, meta)
    check_threads(threads)
    sizes = list(steps) if steps is not None else default_steps(config, layers)
    _check_work(config, sizes, batch)
    try:
        stored = read_weights(model, path.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: its weights cannot be read ({error}); expected them as export_onnx wrote them"
        ) from None
    given: Mapping[str, Any] = ChainMap(stored, weights or {})  # type: ignore[arg-type]
    if tolerance is None:
        tolerance = default_tolerance(config, meta["linear"])
    foreign = [value.name for value in model.graph.input if _is_foreign(value.name)]
    outside = {int(name.split(".")[1]) for name in foreign}
    if not stored and weights is None:
        raise UsageError(f"{path}: holds no weights; expected them beside it (a checkpoint)")
    if outside and weights is None:
        raise UsageError(f"{path}: lacks layers {sorted(outside)}, whose weights are needed (a checkpoint)")
    result = Verified(path, meta, check(path))
    if result.checker:
        return result

    everything = tuple(sorted(set(layers) | outside))
    xs = [{n: random_input(seed, n, s, batch, count, config.dim) for n in everything} for s, count in enumerate(sizes)]
    expected = _compiled(config, given, everything, meta, sizes, xs, batch, threads)
    others = _foreign_inputs(config, given, outside, foreign, meta, sizes, xs, batch)
    fixed = {name: given[name] for name, _, _ in model_inputs(model) if name in given}
    small = sum(a.nbytes for a in stored.values()) <= SMALL and bool(stored)
    for number, name in enumerate(names):
        if progress is not None:
            progress("engines", number, len(names))
        if name != "onnxruntime" and not small:
            result.rows.append(Row(0, 0, name, note="not run: for files with up to 64 MiB of weights inside"))
            continue
        make = {"onnxruntime": lambda: onnxruntime_engine(path, threads), "onnx": lambda: reference_engine(path)}
        try:
            engine = make.get(name, lambda: tvm_engine(path))()
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - as below
            result.rows.append(Row(0, 0, name, ok=False, note=f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        session = Session(model_inputs(model), batch)
        count = TVM_STEPS if name == "tvm" else len(sizes)
        for s in range(min(count, len(sizes))):
            row = Row(s, sizes[s], name)
            result.rows.append(row)
            begin = time.perf_counter()
            feeds = {layer: bf16_decode(xs[s][layer]) for layer in layers}
            try:
                got = session.step(engine, feeds, {**others[s], **fixed})
            except Exception as error:  # noqa: BLE001 - any engine's own kind; its message is the finding
                row.ok, row.note = False, f"{type(error).__name__}: {error}".splitlines()[0]
                break
            row.seconds = time.perf_counter() - begin
            judge_step(config, layers, got, expected[s], row, tolerance)
    return result


def check(path: Path) -> str:
    """What onnx's checker (full) and strict shape inference object to, empty if nothing."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        return str(error)
    return ""


def default_tolerance(config: AttentionConfig, linear: str) -> float:
    """Largest relative error of a layer's output that roundings explain."""
    if linear == "fp8":
        return TOLERANCE_FP8
    return TOLERANCE_WIDE if config.dim >= WIDE else TOLERANCE


def default_steps(config: AttentionConfig, layers: Iterable[int]) -> list[int]:
    """A prompt beyond window and selection where that is at most 200 tokens, a chunk of 5, three decode steps."""
    ratio = max([config.compress_ratios[layer] for layer in layers] + [1])
    prompt = min(200, config.window_size + ratio * config.index_topk + 3, config.max_seq_len - 8)
    return [max(prompt, 1), 5, 1, 1, 1]


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:  # noqa: BLE001 - protobuf's own kinds
        raise UsageError(f"{path}: not an ONNX model ({type(error).__name__})") from None


def _described(path: Path, meta: Mapping[str, str]) -> tuple[AttentionConfig, tuple[int, ...]]:
    """The configuration and the layers that the metadata names."""
    try:
        config = AttentionConfig.from_dict(json.loads(meta["config"]))
        layers = layer_list([int(layer) for layer in meta["layers"].split(",")], config.n_layers)
        config.check_linear(meta["linear"])
        if meta["keys"] not in ("own", "published"):
            raise ValueError(f"keys {meta['keys']!r}: expected own or published")
    except (KeyError, TypeError, ValueError, Ds41Error) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}: its ds41 metadata make no sense ({what}); export it again") from None
    return config, layers


def _check_work(config: AttentionConfig, sizes: Sequence[int], batch: int) -> None:
    if not sizes or min(sizes) < 1 or sum(sizes) > config.max_seq_len:
        raise UsageError(
            f"steps of {list(sizes)[:8]} tokens: expected at least one, each of at least 1, and at most "
            f"{config.max_seq_len} (max_seq_len) in all"
        )
    if batch < 1:
        raise UsageError(f"batch {batch}: expected at least 1")


def _is_foreign(name: str) -> bool:
    return name.startswith(("present_", "selection.", "candidates."))


def _compiled(
    config: AttentionConfig,
    weights: Mapping[str, Any],
    layers: tuple[int, ...],
    meta: Mapping[str, str],
    sizes: Sequence[int],
    xs: Sequence[Mapping[int, U16]],
    batch: int,
    threads: int | None,
) -> list[dict[int, tuple[U16, dict[str, Any]]]]:
    """Per step and layer: outputs [batch * tokens, dim] and trace of the compiled layers."""
    from ds41_tvm.api import build

    options: dict[str, Any] = {"linear": meta["linear"], "keys": meta["keys"], "threads": threads}
    runner = build(config, weights, layers, **options)
    sequences = [runner.new_sequence() for _ in range(batch)]
    found = []
    for size, x in zip(sizes, xs, strict=True):
        step = runner.step([(sequence, size) for sequence in sequences])
        out: dict[int, Any] = {}
        for layer in runner.layers:
            rows = x[layer].reshape(batch * size, config.dim)
            out[layer] = runner.forward(layer, rows, step, trace=True)
            out[layer] = (out[layer][0].copy(), out[layer][1])
        runner.commit(step)
        found.append(out)
    return found


def _foreign_inputs(
    config: AttentionConfig,
    weights: Mapping[str, Any],
    outside: set[int],
    names: list[str],
    meta: Mapping[str, str],
    sizes: Sequence[int],
    xs: Sequence[Mapping[int, U16]],
    batch: int,
) -> list[dict[str, Array]]:
    if not outside:
        return [{} for _ in sizes]
    sources = Outside(config, weights, outside, names, meta["linear"], batch)
    starts = np.cumsum([0, *sizes])
    return [sources.step(x, int(start)) for x, start in zip(xs, starts, strict=False)]
