"""The conversions of `formats` as TensorIR expressions, to be called inside TVMScript.

Each function takes expressions and returns an expression; none allocates or loops, so they vectorise like
plain arithmetic. They work on bits because TVM's own float8 and float4 casts are wrong on LLVM, because the
code generator assumes that no NaN occurs (a float comparison cannot find one), and because integer code means
the same under a GPU's fast-math. No step has a subnormal float operand: each would cost a microcode assist on
x86.

Names as in `formats`. Codes are uint8, bf16 bits uint16, values float32. A 4-bit code lies in the low bits of
a uint8.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

# TVM's stubs do not describe what these overloaded builders return.
Expr = Any


def _u32(value: int) -> Expr:
    return T.uint32(value)


def f32_bits(x: Expr) -> Expr:
    """float32 -> its bits as uint32."""
    return T.reinterpret("uint32", x)


def bits_f32(u: Expr) -> Expr:
    """uint32 bits -> float32."""
    return T.reinterpret("float32", u)


# ---- single values


def bf16_to_f32(bits: Expr) -> Expr:
    """bf16 bits (uint16) -> float32, exact."""
    return bits_f32(T.shift_left(T.Cast("uint32", bits), _u32(16)))


def f32_to_bf16(x: Expr) -> Expr:
    """float32 -> bf16 bits (uint16), round to nearest even; NaN keeps its sign and is made quiet."""
    u = f32_bits(x)
    odd = T.bitwise_and(T.shift_right(u, _u32(16)), _u32(1))
    rounded = T.shift_right(u + _u32(0x7FFF) + odd, _u32(16))
    quiet = T.bitwise_or(T.shift_right(u, _u32(16)), _u32(0x40))
    is_nan = T.bitwise_and(u, _u32(0x7FFFFFFF)) > _u32(0x7F800000)
    return T.Cast("uint16", T.Select(is_nan, quiet, rounded))


def round_bf16(x: Expr) -> Expr:
    """float32 -> the nearest bf16 value, as float32."""
    return bf16_to_f32(f32_to_bf16(x))


def e4m3_to_f32(code: Expr) -> Expr:
    """e4m3 code -> float32, exact; 0x7f and 0xff -> NaN."""
    w = T.Cast("uint32", code)
    sign = T.shift_left(T.bitwise_and(w, _u32(0x80)), _u32(24))
    a = T.bitwise_and(w, _u32(0x7F))
    normal = T.shift_left(a, _u32(20)) + _u32(120 << 23)
    small = f32_bits(T.Cast("float32", T.Cast("int32", a)) * T.float32(2.0**-9))
    magnitude = T.Select(a < _u32(8), small, normal)
    return bits_f32(T.bitwise_or(sign, T.Select(a == _u32(0x7F), _u32(0x7FC00000), magnitude)))


def f32_to_e4m3(x: Expr) -> Expr:
    """float32 -> e4m3 code: clamp to +-448, round to nearest even, sign kept; NaN -> 0x7f | sign."""
    u = f32_bits(x)
    a = T.bitwise_and(u, _u32(0x7FFFFFFF))
    sign = T.bitwise_and(T.shift_right(u, _u32(24)), _u32(0x80))
    clamped = T.min(a, _u32(0x43E00000))  # 448
    odd = T.bitwise_and(T.shift_right(clamped, _u32(20)), _u32(1))
    normal = T.shift_right(clamped + _u32(0x7FFFF) + odd, _u32(20)) - _u32(120 << 3)
    # Below 2^-6 the steps are 2^-9, the last bit of a float near 2^14: the addition rounds, ties to even.
    small = f32_bits(bits_f32(clamped) + T.float32(2.0**14)) - _u32(0x46800000)
    code = T.Select(clamped < _u32(0x3C800000), small, normal)
    return T.Cast("uint8", T.bitwise_or(sign, T.Select(a > _u32(0x7F800000), _u32(0x7F), code)))


def e2m1_to_f32(code: Expr) -> Expr:
    """e2m1 code 0..15 (upper four bits ignored) -> float32, exact."""
    w = T.Cast("uint32", code)
    sign = T.shift_left(T.bitwise_and(w, _u32(8)), _u32(28))
    a = T.bitwise_and(w, _u32(7))
    magnitude = T.Select(a < _u32(2), a * _u32(0x3F000000), T.shift_left(a, _u32(22)) + _u32(126 << 23))
    return bits_f32(T.bitwise_or(sign, magnitude))


def e2m1_to_twice(code: Expr) -> Expr:
    """e2m1 code 0..15 (upper four bits ignored) -> twice its value as int32: 0 1 2 3 4 6 8 12, or negative.

    The scaled dot product of two e2m1 blocks is then an integer: sum(2a * 2b) * 2^(ea + eb - 256).
    """
    w = T.Cast("int32", code)
    a = T.bitwise_and(w, T.int32(7))
    # Codes 2 and up hold (2 + m) * 2^(e - 1) with e = a >> 1, m = a & 1; codes 0 and 1 are their own doubles.
    shifted = T.shift_left(
        T.int32(2) + T.bitwise_and(a, T.int32(1)),
        T.max(T.shift_right(a, T.int32(1)) - T.int32(1), T.int32(0)),
    )
    magnitude = T.Select(a < T.int32(2), a, shifted)
    return T.Select(T.bitwise_and(w, T.int32(8)) != T.int32(0), T.int32(0) - magnitude, magnitude)


def f32_to_e2m1(x: Expr) -> Expr:
    """float32 -> e2m1 code 0..15: clamp to +-6, ties to the even code, sign kept; NaN -> 7 | sign."""
    u = f32_bits(x)
    sign = T.bitwise_and(T.shift_right(u, _u32(28)), _u32(8))
    a = T.min(T.bitwise_and(u, _u32(0x7FFFFFFF)), _u32(0x40C00000))  # 6
    odd = T.bitwise_and(T.shift_right(a, _u32(22)), _u32(1))
    normal = T.shift_right(a + _u32(0x1FFFFF) + odd, _u32(22)) - _u32(126 << 1)
    # Below 1 the steps are 0.5, the last bit of a float near 2^22.
    small = f32_bits(bits_f32(a) + T.float32(2.0**22)) - _u32(0x4A800000)
    return T.Cast("uint8", T.bitwise_or(sign, T.Select(a < _u32(0x3F800000), small, normal)))


def e8m0_to_f32(code: Expr) -> Expr:
    """e8m0 code -> float32 2^(code - 127), exact (code 0 is subnormal); 255 -> NaN."""
    w = T.Cast("uint32", code)
    regular = T.Select(w == _u32(255), _u32(0x7FC00000), T.shift_left(w, _u32(23)))
    return bits_f32(T.Select(w == _u32(0), _u32(0x00400000), regular))


def e8m0_inverse(code: Expr) -> Expr:
    """e8m0 code -> float32 2^(127 - code), exact for 1..253 (all that the scales below can be)."""
    return bits_f32(T.shift_left(_u32(254) - T.min(T.Cast("uint32", code), _u32(253)), _u32(23)))


def low_nibble(byte: Expr) -> Expr:
    """Code of element i of a run of 32, from byte i."""
    return T.bitwise_and(byte, T.uint8(15))


def high_nibble(byte: Expr) -> Expr:
    """Code of element i + 16 of a run of 32, from byte i."""
    return T.shift_right(byte, T.uint8(4))


def join_nibbles(low: Expr, high: Expr) -> Expr:
    """Byte i of a run of 32 from the codes of elements i and i + 16."""
    return T.bitwise_or(low, T.shift_left(high, T.uint8(4)))


# ---- block scales: from the bits of the largest magnitude, reduced as `max(bf16_abs_bits(x))` over the block


def bf16_abs_bits(bits: Expr) -> Expr:
    """Bits of |x| (uint16). They order like the magnitudes, infinity and NaN (0x7f80 and above) last."""
    return T.bitwise_and(bits, T.uint16(0x7FFF))


def e8m0_scale_window(amax_bits: Expr) -> Expr:
    """e8m0 code of 2^ceil(log2(max(amax, 1e-4) / 448)); 255 for infinity and NaN. See `formats`."""
    return e8m0_scale_from_amax_bits(amax_bits, floor=0x38D1, mantissa_limit=0x60, shift=8)


def e8m0_scale_index(amax_bits: Expr) -> Expr:
    """e8m0 code of 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); 255 for infinity and NaN."""
    return e8m0_scale_from_amax_bits(amax_bits, floor=0x01C0, mantissa_limit=0x40, shift=2)


def e8m0_scale_from_amax_bits(amax_bits: Expr, *, floor: int, mantissa_limit: int, shift: int) -> Expr:
    """e8m0 code of 2^ceil(log2(max(amax, floor) / (m * 2^shift))), mantissa_limit = bf16 mantissa of m."""
    bits = T.max(T.Cast("int32", amax_bits), T.int32(floor))
    above = T.Cast("int32", T.bitwise_and(bits, T.int32(0x7F)) > T.int32(mantissa_limit))
    code = T.shift_right(bits, T.int32(7)) - T.int32(shift) + above
    return T.Cast("uint8", T.Select(bits >= T.int32(0x7F80), T.int32(255), code))


def e4m3_scale_latent(amax_bits: Expr) -> Expr:
    """e4m3 code of max(amax, 6 * 2^-9) / 6, round to nearest even; 0x7f for infinity and NaN.

    Divided as integers, so that a tie is an exact remainder on every target and not a matter of how its
    floats divide. With amax = m * 2^(E - 134), 128 <= m < 256, the quotient is (m / unit) * 2^(field - 10)
    where unit = 12 (24 from m = 192) brings m / unit into e4m3's significand range [8, 16). Below the
    smallest normal exponent (field < 1) the unit doubles with every exponent lost, and the significand alone
    is the code.
    """
    bits = T.min(T.max(T.Cast("int32", amax_bits), T.int32(0x3C40)), T.int32(0x4528))  # 6 * 2^-9 .. 6 * 448
    m = T.bitwise_or(T.bitwise_and(bits, T.int32(0x7F)), T.int32(0x80))
    wide = T.Cast("int32", m >= T.int32(192))
    field = T.shift_right(bits, T.int32(7)) - T.int32(123) + wide
    lost = T.max(T.int32(1) - field, T.int32(0))
    unit = T.shift_left(T.int32(12), wide + lost)
    quotient = T.truncdiv(m, unit)
    rest = T.shift_left(m - quotient * unit, T.int32(1))
    # Up if the rest is above half the unit, or is half and the quotient odd.
    up = T.Cast("int32", rest + T.bitwise_and(quotient, T.int32(1)) > unit)
    code = T.shift_left(T.max(field, T.int32(1)) - T.int32(1), T.int32(3)) + quotient + up
    return T.Cast("uint8", T.Select(T.Cast("int32", amax_bits) >= T.int32(0x7F80), T.int32(0x7F), code))


# ---- one element of a block


def window_code(bits: Expr, scale_code: Expr) -> Expr:
    """bf16 bits and the block's e8m0 scale -> e4m3 code; 0 in a bad block. See `formats.quantize_window`."""
    code = f32_to_e4m3(bf16_to_f32(bits) * e8m0_inverse(scale_code))
    return T.Select(scale_code == T.uint8(255), T.uint8(0), code)


def index_code(bits: Expr, scale_code: Expr) -> Expr:
    """bf16 bits and the block's e8m0 scale -> e2m1 code; 0 in a bad block. See `formats.quantize_index`."""
    code = f32_to_e2m1(bf16_to_f32(bits) * e8m0_inverse(scale_code))
    return T.Select(scale_code == T.uint8(255), T.uint8(0), code)


def latent_code(bits: Expr, scale_code: Expr) -> Expr:
    """bf16 bits and the block's e4m3 scale -> e2m1 code of the quotient; 0 in a bad block.

    The quotient is never formed: |x| / scale rounds to the number of midpoints it lies above, and midpoint *
    scale is exact. Midpoints under an odd code are passed on equality too (ties to even).
    """
    scale = e4m3_to_f32(scale_code)
    magnitude = T.Cast("int32", T.shift_left(T.Cast("uint32", bf16_abs_bits(bits)), _u32(16)))
    count = T.int32(0)
    for midpoint, inclusive in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        limit = T.reinterpret("int32", T.float32(midpoint) * scale)
        count = count + T.Cast("int32", magnitude + T.int32(inclusive) > limit)
    sign = T.bitwise_and(T.shift_right(bits, T.uint16(12)), T.uint16(8))
    code = T.bitwise_or(T.Cast("uint8", count), T.Cast("uint8", sign))
    return T.Select(scale_code == T.uint8(0x7F), T.uint8(0), code)


def window_value(code: Expr, scale_code: Expr) -> Expr:
    """e4m3 code and e8m0 scale -> float32, exactly the bf16 cache value; NaN in a bad block."""
    return e4m3_to_f32(code) * e8m0_to_f32(scale_code)


def latent_value(code: Expr, scale_code: Expr) -> Expr:
    """e2m1 code and e4m3 scale -> float32, exactly the bf16 cache value; NaN in a bad block."""
    return e2m1_to_f32(code) * e4m3_to_f32(scale_code)


def index_value(code: Expr, scale_code: Expr) -> Expr:
    """e2m1 code and e8m0 scale -> float32, exactly the bf16 value; NaN in a bad block."""
    return e2m1_to_f32(code) * e8m0_to_f32(scale_code)
