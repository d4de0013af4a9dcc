"""How each stored tensor of a layer becomes the array that is handed on, and whether it may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..config import AttentionConfig, LinearMode
from ..errors import MissingTensor, NonFiniteWeight, UnexpectedTensor, WrongDtype, WrongShape
from ..strict_json import short
from .blocks import dequantize_block, finite_bf16, nan_free_e4m3, quantize_bf16
from .safetensors import Shard
from .shards import INDEX_FILE, ShardSet
from .tensors import (
    BF16,
    E4M3,
    E8M0,
    F32,
    TensorSpec,
    code_names,
    describe,
    expected_tensors,
    scale_name,
    scale_shape,
    unexpected_names,
)

Conversion = Literal["none", "dequantize", "quantize"]
MAX_SCALE_CODE = 246  # 448 * 2^(246 - 127) is below bf16's largest value, twice that is not


@dataclass(frozen=True)
class PlannedTensor:
    """One needed tensor: where it lies (weight first, then its scale) and what is made of it.

    ``keys`` are the names it is handed on under: the weight, and its scale where the weight is e4m3. ``codes``: names
    for the stored codes and scales of a weight that is dequantised, where they are handed on too.
    """

    name: str
    keys: tuple[str, ...]
    sources: tuple[tuple[Shard, str], ...]
    conversion: Conversion
    codes: tuple[str, ...] = ()

    def stored(self) -> dict[str, NDArray[Any]]:
        """The stored arrays under the names `codes`."""
        return dict(zip(self.codes, (shard.view(name) for shard, name in self.sources), strict=True))

    def make(self) -> dict[str, NDArray[Any]]:
        """The arrays by key. Raises ``ShardChanged``, ``NonFiniteWeight``."""
        stored = [shard.view(name) for shard, name in self.sources]
        if self.conversion == "none":
            return dict(zip(self.keys, stored, strict=True))
        try:
            if self.conversion == "dequantize":
                return {self.name: dequantize_block(stored[0], stored[1])}
            return dict(zip(self.keys, quantize_bf16(stored[0]), strict=True))
        except NonFiniteWeight as exc:
            raise NonFiniteWeight(f"{self.sources[0][0].path}: tensor {self.name}: {exc}") from None


def plan_layer(
    shards: ShardSet, config: AttentionConfig, layer: int, mode: LinearMode, required: LinearMode | None
) -> list[PlannedTensor]:
    """Locates and checks what ``layer`` needs, for weights handed on in ``mode``.

    ``required`` is the mode in which the linears must be stored already, ``None`` if they may be converted.
    Raises ``MissingTensor``, ``WrongDtype``, ``WrongShape``, ``UnexpectedTensor``.
    """
    who = describe(config.role(layer))
    for name in unexpected_names(config, layer):
        if shards.listed_in(name) is not None:
            raise UnexpectedTensor(
                f"{shards.directory / str(shards.listed_in(name))}: tensor {name} is stored, but {who} does "
                "not use it; expected none; config.json and the checkpoint give the layer different roles"
            )
    return [_plan(shards, spec, who, mode, required) for spec in expected_tensors(config, layer)]


def _plan(shards: ShardSet, spec: TensorSpec, who: str, mode: LinearMode, required: LinearMode | None) -> PlannedTensor:
    shard = _locate(shards, spec.name, who)
    entry = shard.entries[spec.name]
    where = f"{shard.path}: tensor {spec.name}"
    if entry.dtype not in spec.dtypes:
        raise WrongDtype(f"{where}: stored as {short(entry.dtype)}; {who} expects {' or '.join(spec.dtypes)}")
    if entry.shape != spec.shape:
        raise WrongShape(
            f"{where}: shape {list(entry.shape)}; {who} expects {list(spec.shape)} by config.json; one of "
            "the two belongs to another model"
        )
    source = (shard, spec.name)
    if not spec.is_linear:
        return PlannedTensor(spec.name, (spec.name,), (source,), "none")
    is_wo_a = spec.name.endswith(".wo_a.weight")  # handed on as bf16 always: its input is not quantised
    wrong = {"bf16": E4M3, "fp8": None if is_wo_a else BF16}
    if required is not None and entry.dtype == wrong[required]:
        raise WrongDtype(
            f"{where}: stored as {entry.dtype}, but config.json makes the linears {required}; expected "
            f"{E4M3 if required == 'fp8' else BF16}; pass linear='bf16' or linear='fp8' to convert"
        )
    scale = scale_name(spec.name)
    wants_codes = mode == "fp8" and not is_wo_a
    keys = (spec.name, scale) if wants_codes else (spec.name,)
    if entry.dtype == E4M3:
        sources = (source, _scale(shards, spec, who))
        codes = code_names(spec.name) if is_wo_a and mode == "fp8" else ()
        return PlannedTensor(spec.name, keys, sources, "none" if wants_codes else "dequantize", codes)
    if shards.listed_in(scale) is not None:
        raise WrongDtype(f"{where}: stored as {BF16}, but it has a scale ({scale}); expected {E4M3}, or no scale")
    return PlannedTensor(spec.name, keys, (source,), "quantize" if wants_codes else "none")


def _locate(shards: ShardSet, name: str, who: str) -> Shard:
    shard = shards.locate(name)
    if shard is not None:
        return shard
    file = shards.listed_in(name)
    if file is not None:
        raise MissingTensor(
            f"{shards.directory / file}: tensor {name} is missing, though {INDEX_FILE} places it there; "
            f"{who} needs it; download the shard again"
        )
    reason = ""
    if name.endswith("compressor.wgate.weight"):
        reason = " (a compressor with a ratio above 1 pools its group with a softmax gate, wgate)"
    similar = [other for other in shards.names if other.endswith("." + name)][:1]
    hint = f"; {similar[0]!r} looks like it: released names have no prefix" if similar else ""
    raise MissingTensor(f"{shards.directory}: tensor {name} is missing; {who} needs it{reason}{hint}")


def _scale(shards: ShardSet, spec: TensorSpec, who: str) -> tuple[Shard, str]:
    name, shape = scale_name(spec.name), scale_shape(spec.shape)
    shard = _locate(shards, name, f"{spec.name} is stored as {E4M3}, {who}")
    entry = shard.entries[name]
    where = f"{shard.path}: tensor {name}"
    if entry.dtype != E8M0:
        raise WrongDtype(f"{where}: stored as {short(entry.dtype)}; expected {E8M0} beside an {E4M3} weight")
    if entry.shape != shape:
        raise WrongShape(
            f"{where}: shape {list(entry.shape)}; expected {list(shape)}, one scale per 32x32 block of "
            f"{list(spec.shape)}"
        )
    return shard, name


def check_values(tensor: PlannedTensor) -> None:
    """Raises ``NonFiniteWeight`` if a stored value is NaN or infinite, or a scale NaN or too large."""
    for shard, name in tensor.sources:
        values = shard.view(name)
        dtype = shard.entries[name].dtype
        if dtype == E8M0:
            bad, what = values > MAX_SCALE_CODE, f"an e8m0 scale code above {MAX_SCALE_CODE} (255 is NaN)"
            is_bad = bool(bad.any())
        elif dtype == E4M3:
            is_bad, what = not nan_free_e4m3(values), "an e4m3 code that is NaN (0x7f or 0xff)"
        elif dtype == F32:
            is_bad, what = not bool(np.isfinite(values).all()), "a NaN or an infinity"
        else:
            is_bad, what = not finite_bf16(values), "a NaN or an infinity"
        if is_bad:
            raise NonFiniteWeight(
                f"{shard.path}: tensor {name}: holds {what}, first at {_first_bad(values, dtype)}; expected "
                "finite values; the file is damaged or was written by a broken conversion"
            )


def _first_bad(values: NDArray[Any], dtype: str) -> list[int]:
    """Index of the first bad value, for the message."""
    masks = {
        E8M0: lambda v: v > MAX_SCALE_CODE,
        E4M3: lambda v: (v & 0x7F) == 0x7F,
        F32: lambda v: ~np.isfinite(v),
        BF16: lambda v: (v & 0x7FFF) >= 0x7F80,
    }
    flat = int(np.argmax(masks[dtype](values)))
    return [int(i) for i in np.unravel_index(flat, values.shape)]
