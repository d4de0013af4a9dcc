"""e4m3 codes to bf16 by byte permutes (x86 ``avx512vbmi``): 64 codes in about seven instructions.

A code's magnitude has 7 bits, and VBMI looks up 64 bytes at once in a table of 128. One table gives the low bytes of
the bf16 values, one the high bytes; the sign is put back by an OR. The block's scale 2^(s - 127) is added to the
exponents in the table, once for 32 x 32 codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from ds41_tvm.numerics.formats import bf16_encode, e4m3_decode

LANES = 64  # codes at a time
# Scales for which every scaled magnitude but zero stays a normal bf16 number: 2^-9 and 2^8 are the extreme exponents.
LEAST_SCALE, GREATEST_SCALE = 10, 246


def _shuffle(vector: Any, indices: list[int]) -> Any:
    return tirx.Shuffle([vector], [tirx.IntImm("int32", i) for i in indices])


def _words(first: int, scale: Any) -> Any:
    """bf16 words of the magnitudes first..first + 63 times 2^(scale - 127), uint16x64. NaN, 0x7f, reads as 480."""
    magnitude = T.ramp(T.uint16(first), T.uint16(1), LANES)
    # Normal numbers: three bits of mantissa under an exponent that is 120 too small for bf16.
    word = T.shift_left(magnitude, T.broadcast(T.uint16(4), LANES)) + T.broadcast(T.uint16(120 << 7), LANES)
    if first == 0:
        for code, bits in enumerate(bf16_encode(e4m3_decode(np.arange(8, dtype=np.uint8)))):
            word = T.Select(
                magnitude == T.broadcast(T.uint16(code), LANES), T.broadcast(T.uint16(int(bits)), LANES), word
            )
    step = T.shift_left(T.Cast("uint16", scale) - T.uint16(127), T.uint16(7))
    zero = T.broadcast(T.uint16(0), LANES)
    return T.Select(magnitude == zero, zero, word + T.broadcast(step, LANES))


def table(scale: Any) -> tuple[Any, Any, Any, Any]:
    """Low bytes of magnitudes 0..63 and 64..127, then their high bytes: four uint8x64."""
    halves = [T.reinterpret("uint8x128", _words(first, scale)) for first in (0, 64)]
    low, high = ([_shuffle(h, list(range(part, 128, 2))) for h in halves] for part in (0, 1))
    return (*low, *high)


def in_range(scale: Any) -> Any:
    """Whether `table` is right for this scale."""
    return (scale >= T.uint8(LEAST_SCALE)) & (scale <= T.uint8(GREATEST_SCALE))


def _bytes_of(codes: Any, low0: Any, low1: Any, high0: Any, high1: Any) -> list[Any]:
    """Low and high bytes of the bf16 values of 64 codes."""

    def look_up(first: Any, second: Any) -> Any:
        return T.call_llvm_pure_intrin("uint8x64", "llvm.x86.avx512.vpermi2var.qi.512", first, codes, second)

    sign = T.bitwise_and(codes, T.broadcast(T.uint8(0x80), LANES))
    return [look_up(low0, low1), T.bitwise_or(look_up(high0, high1), sign)]


def _joined(low_and_high: list[Any], codes: Iterable[int]) -> Any:
    """The bf16 values of the codes with these numbers, two in a uint32."""
    indices = [tirx.IntImm("int32", i + LANES * part) for i in codes for part in (0, 1)]
    return T.reinterpret(f"uint32x{len(indices) // 4}", tirx.Shuffle(low_and_high, indices))


def decode(codes: Any, low0: Any, low1: Any, high0: Any, high1: Any) -> Any:
    """64 codes (uint8x64) -> their 64 bf16 values in the same order, as uint32x32."""
    return _joined(_bytes_of(codes, low0, low1, high0, high1), range(LANES))


def by_halves(i: Any) -> Any:
    """Which of the 32 pairs of codes is pair i of what `decode_half` gives for half 0 and then for half 1."""
    return i % 16 // 4 * 8 + i // 16 * 4 + i % 4


def decode_half(half: int, codes: Any, low0: Any, low1: Any, high0: Any, high1: Any) -> Any:
    """Half of what `decode` gives, its 16 pairs in the order of `by_halves`: uint32x16, joined by one instruction."""
    chosen = [2 * by_halves(half * 16 + i) + c for i in range(16) for c in (0, 1)]
    return _joined(_bytes_of(codes, low0, low1, high0, high1), chosen)
