"""Rotary position embedding of the last channels of every head (official ``apply_rotary_emb``)."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import rounded
from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16


def rope(heads: int, dim: int, rope_dim: int, inverse: int) -> PrimFunc:
    """(a, b) -> (bf16(a c - b s), bf16(a s + b c)) for adjacent pairs of the last `rope_dim` channels; s negated if
    inverse.

    Shapes: x, y bf16 bits ``[n, heads, dim]``, table f32 ``[n, rope_dim / 2, 2]`` (cos, sin of the row's position).
    Every product is rounded to f32 before the addition, as the official complex product does.
    """
    keep, pairs = dim - rope_dim, rope_dim // 2
    sign = -1.0 if inverse else 1.0

    @T.prim_func(s_tir=True)
    def main(x: T.handle, table: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        X = T.match_buffer(x, (n, heads, dim), "uint16")
        C = T.match_buffer(table, (n, pairs, 2), "float32")
        Y = T.match_buffer(y, (n, heads, dim), "uint16")
        for t, h in T.grid(n, heads):
            for d in range(keep):
                with T.sblock("keep"):
                    vt, vh, vd = T.axis.remap("SSS", [t, h, d])
                    Y[vt, vh, vd] = X[vt, vh, vd]
            for i in range(pairs):
                with T.sblock("rotate"):
                    vt, vh, vi = T.axis.remap("SSS", [t, h, i])
                    Y[vt, vh, keep + 2 * vi] = f32_to_bf16(
                        rounded(bf16_to_f32(X[vt, vh, keep + 2 * vi]) * C[vt, vi, 0])
                        - rounded(bf16_to_f32(X[vt, vh, keep + 2 * vi + 1]) * (T.float32(sign) * C[vt, vi, 1]))
                    )
                    Y[vt, vh, keep + 2 * vi + 1] = f32_to_bf16(
                        rounded(bf16_to_f32(X[vt, vh, keep + 2 * vi]) * (T.float32(sign) * C[vt, vi, 1]))
                        + rounded(bf16_to_f32(X[vt, vh, keep + 2 * vi + 1]) * C[vt, vi, 0])
                    )

    return main
