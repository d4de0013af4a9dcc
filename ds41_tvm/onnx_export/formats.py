"""Number formats in standard operators: exact f32 arithmetic, no cast to an 8-bit or 4-bit type.

Rounding to a format with m mantissa bits is `Round` (half to even) of the magnitude over the spacing of its
binade. With e = floor(log2 |v|), not below the format's smallest exponent e0,

    code(|v|) = 2^m (e - e0) + Round(|v| 2^(m - e))

holds for normal and subnormal values alike, and a carry into the next binade gives that binade's first code.
Exponents come from comparisons with powers of two, so every step is exact and the same in every engine. Codes
are whole numbers in f32 until they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from ds41_tvm.numerics import formats
from ds41_tvm.onnx_export.builder import Body, Function

LARGEST = float(np.finfo(np.float32).max)
# The rank of what cannot be selected. Not -infinity: some engines start a maximum at the least number.
HIDDEN = -LARGEST
# The rank of a score of -infinity that is not hidden: between that and every bf16 number.
LOWEST = float(np.nextafter(np.float32(HIDDEN), np.float32(0)))


def define(name: str, inputs: str, outputs: str, doc: str) -> Callable[[Callable[..., str | Sequence[str]]], Function]:
    """Turn a function that writes a body into a `Function`; names are separated by spaces."""

    def made(build: Callable[..., str | Sequence[str]]) -> Function:
        return Function(name, tuple(inputs.split()), tuple(outputs.split()), doc, build)

    return made


@define("RoundBf16", "x", "y", "f32 -> nearest bf16 value, ties to even, kept as f32.")
def round_bf16(b: Body, x: str) -> str:
    return b.cast(b.cast(x, TensorProto.BFLOAT16), TensorProto.FLOAT)


@define("EncodeE4m3", "m", "code", "Magnitude m >= 0 -> e4m3 code 0..126 as f32: saturates at 448, ties to even.")
def encode_e4m3(b: Body, m: str) -> str:
    m = b.op("Clip", m, b.f32(0), b.f32(448))
    firsts = []
    # Binary search for e + 6 in 0..14: each step divides m by 2^step if m's exponent is that large.
    for step in (8, 4, 2, 1):
        large = b.op("GreaterOrEqual", m, b.f32(2.0 ** (step - 6)))
        m = b.op("Mul", m, b.op("Where", large, b.f32(2.0**-step), b.f32(1)))
        firsts.append(b.op("Where", large, b.f32(8 * step), b.f32(0)))
    code = b.op("Round", b.op("Mul", m, b.f32(512)))
    for first in firsts:
        code = b.op("Add", code, first)
    return code


@define("EncodeE2m1", "m", "code", "Magnitude m >= 0 -> e2m1 code 0..7 as f32: saturates at 6, ties to even.")
def encode_e2m1(b: Body, m: str) -> str:
    m = b.op("Clip", m, b.f32(0), b.f32(6))
    two, four = (b.op("GreaterOrEqual", m, b.f32(limit)) for limit in (2, 4))
    factor = b.op("Where", four, b.f32(0.5), b.op("Where", two, b.f32(1), b.f32(2)))
    first = b.op("Where", four, b.f32(4), b.op("Where", two, b.f32(2), b.f32(0)))
    return b.op("Add", first, b.op("Round", b.op("Mul", m, factor)))


@define("IsNegative", "x", "negative", "The sign bit, that of -0 too, as bool.")
def is_negative(b: Body, x: str) -> str:
    zero = b.f32(0)
    return b.op("Or", b.op("Less", x, zero), b.op("Less", b.op("Div", b.f32(1), x), zero))


@define(
    "BlockMaximum",
    "x",
    "amax bad",
    "Largest finite magnitude of each block (last axis) and whether it holds a NaN or infinity; axis kept.",
)
def block_maximum(b: Body, x: str) -> list[str]:
    magnitude = b.op("Abs", x)
    finite = b.op("LessOrEqual", magnitude, b.f32(LARGEST))
    amax = b.reduce("ReduceMax", b.op("Where", finite, magnitude, b.f32(0)), -1)
    bad = b.reduce("ReduceMax", b.op("Where", finite, b.f32(0), b.f32(1)), -1)
    return [amax, b.op("Greater", bad, b.f32(0))]


def scale_code(name: str, largest: float, first: int, last: int) -> Function:
    """e8m0 code of 2^ceil(log2(amax / largest)), at least `first`: one more per passed largest * 2^(j - 127)."""

    @define(name, "amax", "code", f"e8m0 code of 2^ceil(log2(amax / {largest:g})), from {first} up, as f32.")
    def made(b: Body, amax: str) -> str:
        limits = [largest * 2.0 ** (j - 127) for j in range(first, last)]
        passed = b.cast(b.op("Greater", amax, b.f32(limits)), TensorProto.FLOAT)
        return b.op("Add", b.f32(first), b.reduce("ReduceSum", passed, -1))

    return made


# The first code is that of the floor on amax, 1e-4 and 6 * 2^-126; the last that of bf16's largest value.
SCALE_WINDOW = scale_code("ScaleWindow", 448, 105, 247)
SCALE_INDEX = scale_code("ScaleIndex", 6, 1, 253)


def _decoder(name: str, doc: str, values: np.ndarray) -> Function:
    @define(name, "code", "value", doc)
    def made(b: Body, code: str) -> str:
        return b.op("Gather", b.f32(values), b.cast(code, TensorProto.INT32))

    return made


_ALL = np.arange(256, dtype=np.uint8)
DECODE_E4M3 = _decoder("DecodeE4m3", "e4m3 code -> value, exact; 127 and 255 give NaN.", formats.e4m3_decode(_ALL))
DECODE_E8M0 = _decoder("DecodeE8m0", "e8m0 code -> 2^(code - 127), exact; 255 gives NaN.", formats.e8m0_decode(_ALL))
DECODE_E2M1 = _decoder("DecodeE2m1", "e2m1 code 0..15 -> value, exact.", formats.e2m1_decode(_ALL[:16]))
DECODE_LOW = _decoder("DecodeLow", "Value of the low e2m1 code of a byte.", formats.e2m1_decode(_ALL & np.uint8(15)))
DECODE_HIGH = _decoder("DecodeHigh", "Value of the high e2m1 code of a byte.", formats.e2m1_decode(_ALL >> np.uint8(4)))
