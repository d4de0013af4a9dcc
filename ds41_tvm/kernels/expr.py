"""Small TensorIR expressions that kernels share."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16

Expr = Any


def half(word: Expr, index: Expr) -> Expr:
    """bf16 value of inner index `index` out of its uint32 word (even: low half, odd: high half), as f32."""
    low = T.reinterpret("float32", T.shift_left(word, T.uint32(16)))
    high = T.reinterpret("float32", T.bitwise_and(word, T.uint32(0xFFFF0000)))
    return T.if_then_else(index % 2 == 0, low, high)


def e4m3_code_to_f32(code: Expr) -> Expr:
    """e4m3 code (uint16, not NaN) -> f32, exact: its bits are those of an fp16 that is 2^8 too small.

    Three integer operations and the processor's own fp16 conversion, which takes subnormals at full speed. Loading a
    checkpoint refuses NaN weights, which this form would read as 480.
    """
    sign = T.shift_left(T.bitwise_and(code, T.uint16(0x80)), T.uint16(8))
    magnitude = T.shift_left(T.bitwise_and(code, T.uint16(0x7F)), T.uint16(7))
    return T.Cast("float32", T.reinterpret("float16", T.bitwise_or(sign, magnitude))) * T.float32(256)


def rounded(x: Expr) -> Expr:
    """x, rounded to f32 here: keeps a product in `x` from being fused into a following addition."""
    return T.call_llvm_pure_intrin("float32", "llvm.arithmetic.fence", x)


def bf16_product(a: Expr, b: Expr) -> Expr:
    """bf16(a * b) as f32, for bf16-valued f32 operands (their product is exact in f32)."""
    return bf16_to_f32(f32_to_bf16(a * b))


def exp(x: Expr) -> Expr:
    """e^x for f32 x <= 88, error below 1 ulp; about 1e-38 below -87. Vectorises, where T.exp calls libm per lane.

    x = n ln2 + r with |r| <= ln2 / 2, then a polynomial in r (Cephes `expf`) and 2^n by exponent bits.
    """
    x = T.max(x, T.float32(-87.0))
    n = T.floor(x * T.float32(1.44269504088896341) + T.float32(0.5))
    r = x - n * T.float32(0.693359375)
    r = r - n * T.float32(-2.12194440e-4)
    p = T.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + T.float32(c)
    y = p * (r * r) + r + T.float32(1)
    return y * T.reinterpret("float32", T.shift_left(T.Cast("int32", n) + T.int32(127), T.int32(23)))
