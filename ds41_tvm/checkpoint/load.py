"""Opening a checkpoint: all is checked before any layer runs, only the asked layers' shards are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from ..config import AttentionConfig, LinearMode
from ..config_checks import layer_list
from ..config_names import read_config
from ..errors import CheckpointError, ConfigError
from ..strict_json import short
from .lazy import LazyWeights
from .plan import PlannedTensor, check_values, plan_layer
from .shards import ShardSet


class Checkpoint:
    """Weights of some layers of a checkpoint directory, with the configuration they belong to.

    ``weights`` maps the released names to arrays: uint16 = bf16 bits, uint8 = e4m3 codes (with ``....scale``,
    uint8 e8m0 codes, beside), float32. Stored tensors are read-only views of the memory-mapped shards;
    converted ones are made when first asked for. ``linear`` is the mode the weights are given in: ``fp8`` or
    ``bf16``; ``wo_a`` is bf16 in both, with its codes beside as ``wo_a.e4m3`` and ``wo_a.e8m0`` where mode and storage
    are fp8: the same values, in half the bytes. Used as a context manager it closes itself.
    """

    def __init__(
        self,
        directory: Path,
        config: AttentionConfig,
        layers: tuple[int, ...],
        linear: LinearMode,
        shards: ShardSet,
        planned: list[PlannedTensor],
    ) -> None:
        self.directory = directory
        self.config = config
        self.layers = layers
        self.linear = linear
        self._shards = shards
        self._planned = planned
        makers = {key: tensor.make for tensor in planned for key in tensor.keys}
        self._weights = LazyWeights(makers | {key: tensor.stored for tensor in planned for key in tensor.codes})

    @property
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """The weights by name."""
        return self._weights

    def summary(self) -> dict[str, Any]:
        """What was opened, JSON-ready: bytes as stored, tensors counted by storage type and by conversion."""
        stored: dict[str, dict[str, int]] = {}
        conversions: dict[str, int] = {}
        for tensor in self._planned:
            conversions[tensor.conversion] = conversions.get(tensor.conversion, 0) + 1
            for shard, name in tensor.sources:
                entry = shard.entries[name]
                of_type = stored.setdefault(entry.dtype, {"tensors": 0, "bytes": 0})
                of_type["tensors"] += 1
                of_type["bytes"] += entry.stop - entry.start
        return {
            "directory": str(self.directory),
            "config": self.config.digest(),
            "linear": self.linear,
            "layers": list(self.layers),
            "weights": len(self._weights),
            "bytes": sum(of_type["bytes"] for of_type in stored.values()),
            "stored": stored,
            "conversions": conversions,
            "shards": [shard.path.name for shard in self._shards.opened],
        }

    def release(self) -> None:
        """Drops the memory maps and the converted weights; the next access maps and converts again.

        Views already handed out stay valid and keep their shard's map alive.
        """
        self._weights.release()
        self._shards.release()

    def close(self) -> None:
        """``release`` for good: later accesses raise ``CheckpointClosed``."""
        self._weights.close()
        self._shards.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_checkpoint(
    directory: str | os.PathLike[str],
    layers: Iterable[int] | None = None,
    linear: str | None = None,
    verify_values: bool = True,
) -> Checkpoint:
    """Opens ``config.json`` and the shards of ``directory`` for ``layers`` (``None``: all).

    ``linear`` overrides the mode that ``quantization_config`` gives (``fp8`` where ``quant_method`` is
    ``fp8``, else ``bf16``). ``bf16`` dequantises e4m3 weights, see ``dequantize_block``; ``fp8`` quantises
    bf16 weights per 32x32 block with the scale 2^ceil(log2(amax / 448)), see ``quantize_block``. Without an
    override every linear must be stored in the type of the mode. ``layers`` need not contain their sources
    here; see ``config.closure``.

    Raises ``ConfigError``, or a ``CheckpointError`` of the kinds in ``ds41_tvm.errors``: missing, misshapen,
    mistyped tensors, damaged files, and (with ``verify_values``, which reads every value once) NaN scales,
    NaN or infinite weights, norm weights and sinks.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(f"{root}: not a directory; expected one with config.json and *.safetensors")
    config = AttentionConfig.from_file(root)
    values, file = read_config(root)
    declared = declared_linear(values, str(file))
    mode = config.check_linear(declared if linear is None else linear)
    chosen = tuple(range(config.n_layers)) if layers is None else layer_list(layers, config.n_layers)
    shards = ShardSet(root)
    required = declared if linear is None else None
    planned = [tensor for layer in chosen for tensor in plan_layer(shards, config, layer, mode, required)]
    shards.refuse_twins([name for tensor in planned for _, name in tensor.sources])
    if verify_values:
        for tensor in planned:
            check_values(tensor)
    return Checkpoint(root, config, chosen, mode, shards, planned)


def declared_linear(values: Mapping[str, Any], where: str) -> LinearMode:
    """Mode that ``quantization_config`` of ``config.json`` gives.

    Raises ``ConfigError`` on an fp8 format other than 32x32 blocks with ``ue8m0`` scales.
    """
    text = values.get("text_config")
    quantization = values.get("quantization_config")
    if quantization is None and isinstance(text, dict):
        quantization = text.get("quantization_config")
    if quantization is None:
        return "bf16"
    if not isinstance(quantization, dict):
        raise ConfigError(f"{where}: quantization_config {short(quantization)}; expected an object")
    if quantization.get("quant_method") != "fp8":
        return "bf16"
    for key, expected in (("weight_block_size", [32, 32]), ("scale_fmt", "ue8m0")):
        seen = quantization.get(key, expected)
        if seen != expected:
            raise ConfigError(f"{where}: quantization_config.{key}: {short(seen)}; expected {expected}")
    return "fp8"
