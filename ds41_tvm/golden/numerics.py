"""Recorded conversions, quantisers, selections and rotation tables (``numerics.npz``) against our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import UsageError
from ds41_tvm.numerics import formats
from ds41_tvm.program import Kernel, kernel
from ds41_tvm.reference.quantize import pack_rows, round_trip, unpack_rows
from ds41_tvm.reference.rope import rope_frequencies, rope_table
from ds41_tvm.reference.topk import topk_torch_cpu
from ds41_tvm.target import Target

Array = NDArray[Any]
NAMES = (
    "bf16_in", "bf16_out", "e4m3_in", "e4m3_out", "e2m1_in", "e2m1_out", "quant_in", "fp4_e8m0_block32_out",
    "fp4_e4m3_block16_out", "fp8_e8m0_block32_out", "topk_vals", "topk_len", "topk_k", "topk_set", "rope_pos",
    "rope_flash_yarn", "rope_flash_window", "rope_tiny_yarn",
)  # fmt: skip
_QUANTISED: dict[formats.RowKind, str] = {
    "window": "fp8_e8m0_block32_out",
    "latent": "fp4_e4m3_block16_out",
    "index": "fp4_e8m0_block32_out",
}
_TABLES = (("rope_flash_yarn", "flash", 1), ("rope_flash_window", "flash", 0), ("rope_tiny_yarn", "tiny", 2))


@dataclass(frozen=True)
class Comparison:
    """One recorded array against ours, bit for bit; `first` says what the first difference is."""

    name: str
    count: int
    differ: int
    first: str = ""


def is_numerics(arrays: Mapping[str, Array]) -> bool:
    """Whether these are the arrays of ``numerics.npz``."""
    return "meta" not in arrays and "quant_in" in arrays


def compare_numerics(arrays: Mapping[str, Array], target: Target | None = None) -> list[Comparison]:
    """Compare with the NumPy formats and reference and, given a target, with kernels compiled for it.

    Raises UsageError naming a missing array.
    """
    missing = [name for name in NAMES if name not in arrays]
    if missing:
        raise UsageError(f"recorded numerics lack {', '.join(missing)}; expected all of {', '.join(NAMES)}")
    found = [*_conversions(arrays), *_selections(arrays, "", topk_torch_cpu)]
    for name, preset, ratio in _TABLES:
        frequencies = rope_frequencies(AttentionConfig.preset(preset), ratio)
        table = rope_table(frequencies, arrays["rope_pos"][: len(arrays[name])])
        found.append(_compare(name, table, arrays[name]))
    if target is not None:
        found += _compiled(arrays, target)
    return found


def _conversions(arrays: Mapping[str, Array]) -> Iterator[Comparison]:
    yield _compare("bf16", formats.bf16_encode(arrays["bf16_in"].view(np.float32)), arrays["bf16_out"])
    yield _compare("e4m3", formats.e4m3_encode(arrays["e4m3_in"]), arrays["e4m3_out"])
    yield _compare("e2m1", formats.e2m1_decode(formats.e2m1_encode(arrays["e2m1_in"])), arrays["e2m1_out"])
    for kind, recorded in _QUANTISED.items():
        yield _compare(f"{kind} rows", round_trip(kind, arrays["quant_in"]), arrays[recorded])


def _selections(arrays: Mapping[str, Array], where: str, topk: Callable[[Array, int], Array]) -> Iterator[Comparison]:
    """Every recorded row through `topk(scores [1, n], k)`, which gives ascending positions and then -1."""
    ends, picks = np.cumsum(arrays["topk_len"]), np.cumsum(arrays["topk_k"])
    rows = np.split(arrays["topk_vals"], ends[:-1]), np.split(arrays["topk_set"], picks[:-1])
    differ, first = 0, ""
    for number, (values, expected) in enumerate(zip(*rows, strict=True)):
        got = topk(values[None], int(arrays["topk_k"][number]))[0]
        if not np.array_equal(got, expected):
            differ += 1
            first = first or f"row {number}: got {got.tolist()}, expected {expected.tolist()}"
    yield Comparison(f"torch's top-k{where}", len(rows[0]), differ, first)


def _compiled(arrays: Mapping[str, Array], target: Target) -> Iterator[Comparison]:
    from ds41_tvm.compiler.build import compile_kernels
    from ds41_tvm.packing import aligned, aligned_copy

    x = aligned_copy(arrays["quant_in"])
    rows, dim = x.shape
    packers: dict[formats.RowKind, Kernel] = {
        kind: kernel("pack_rows", kind=kind, heads=1, dim=dim) for kind in _QUANTISED
    }
    activation = kernel("quantize_activation", dim=dim)
    functions = compile_kernels((*packers.values(), activation), target)
    order = aligned_copy(np.arange(rows, dtype=np.int64))
    for kind, packer in packers.items():
        packed = aligned((rows, 1, formats.row_bytes(kind, dim)), np.uint8)
        functions[packer.name](x.reshape(rows, 1, dim), order, packed)
        yield _compare(f"{kind} rows, compiled", packed[:, 0], pack_rows(kind, x))
        yield _compare(f"{kind} values, compiled", unpack_rows(kind, packed[:, 0], dim), arrays[_QUANTISED[kind]])
    quantised = aligned(x.shape, np.uint16)
    functions[activation.name](x, quantised)
    yield _compare("activations, compiled", quantised, arrays[_QUANTISED["window"]])


def _compare(name: str, got: Array, expected: Array) -> Comparison:
    if got.shape != expected.shape:
        return Comparison(name, expected.size, expected.size, f"shape {got.shape}, expected {expected.shape}")
    mine, theirs = (np.ascontiguousarray(a).view(f"u{a.itemsize}") for a in (got, expected))
    differ = np.argwhere(mine != theirs)
    if not len(differ):
        return Comparison(name, expected.size, 0)
    where = tuple(int(i) for i in differ[0])
    values = f"{got[where]!s} ({mine[where]:#x}), expected {expected[where]!s} ({theirs[where]:#x})"
    return Comparison(name, expected.size, len(differ), f"at {list(where)}: got {values}")
