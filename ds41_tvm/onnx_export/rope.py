"""Rotary position embedding on the last ``rope_head_dim`` channels, adjacent pairs."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from ds41_tvm.onnx_export.builder import END, Body, Function
from ds41_tvm.onnx_export.formats import define, round_bf16
from ds41_tvm.reference.rope import _COS, _HALF_PI, _SIN


@define(
    "RopeTable",
    "positions freqs",
    "cos sin",
    "cos and sin of f32(position * frequency), f32 [n, pairs]: f64 additions and multiplications alone.",
)
def rope_table(b: Body, positions: str, freqs: str) -> list[str]:
    column = b.op("Unsqueeze", b.cast(positions, TensorProto.FLOAT), b.i64([1]))
    x = b.cast(b.op("Mul", column, freqs), TensorProto.DOUBLE)
    quadrant = b.op("Round", b.op("Mul", x, b.constant(2 / math.pi, np.float64)))
    for part in _HALF_PI:
        x = b.op("Sub", x, b.op("Mul", quadrant, b.constant(part, np.float64)))
    square = b.op("Mul", x, x)
    cos = b.cast(_polynomial(b, _COS, square), TensorProto.FLOAT)
    sin = b.cast(b.op("Mul", x, _polynomial(b, _SIN, square)), TensorProto.FLOAT)
    turn = b.op("Mod", b.cast(quadrant, TensorProto.INT64), b.i64(4))
    odd = b.op("Equal", b.op("Mod", turn, b.i64(2)), b.i64(1))
    # A quarter turn swaps the two; their signs change from turn 1 (cos) and 2 (sin) on, for two turns.
    cos_sign = b.op("Where", _one_of(b, turn, 1, 2), b.f32(-1), b.f32(1))
    sin_sign = b.op("Where", _one_of(b, turn, 2, 3), b.f32(-1), b.f32(1))
    return [
        b.op("Mul", b.op("Where", odd, sin, cos), cos_sign),
        b.op("Mul", b.op("Where", odd, cos, sin), sin_sign),
    ]


def _one_of(b: Body, x: str, *values: int) -> str:
    first, second = (b.op("Equal", x, b.i64(value)) for value in values)
    return b.op("Or", first, second)


def _polynomial(b: Body, coefficients: tuple[str, ...], x: str) -> str:
    out = b.constant(float.fromhex(coefficients[-1]), np.float64)
    for c in reversed(coefficients[:-1]):
        out = b.op("Add", b.op("Mul", out, x), b.constant(float.fromhex(c), np.float64))
    return out


def rotate(rope_dim: int, inverse: bool = False) -> Function:
    """(a, b) -> (bf16(a c - b s), bf16(a s + b c)) for adjacent pairs of the last `rope_dim` channels.

    x f32 [..., D]; cos, sin f32 [n, rope_dim / 2], broadcast over the axes in front of the channels. The inverse
    has s negated. Each product is rounded before the sum.
    """

    @define(
        "RotateBack" if inverse else "Rotate",
        "x cos sin",
        "y",
        f"Turn adjacent pairs of the last {rope_dim} channels{' back' if inverse else ''}; bf16.",
    )
    def made(b: Body, x: str, cos: str, sin: str) -> str:
        if inverse:
            sin = b.op("Neg", sin)
        cut, end = b.i64([-rope_dim]), b.i64([END])
        head = b.slice(x, b.i64([0]), cut, -1)
        tail = b.slice(x, cut, end, -1)
        first = b.slice(tail, b.i64([0]), end, -1, 2)
        second = b.slice(tail, b.i64([1]), end, -1, 2)
        real = b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin))
        imaginary = b.op("Add", b.op("Mul", first, sin), b.op("Mul", second, cos))
        pairs = [b.op("Unsqueeze", part, b.i64([-1])) for part in (real, imaginary)]
        turned = b.op("Reshape", b.op("Concat", *pairs, axis=-1), b.op("Shape", tail))
        return b.op("Concat", head, b.call(round_bf16, turned), axis=-1)

    return made
