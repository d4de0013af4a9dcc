"""RoPE on a GPU: a thread for a few channels of a head, loads and stores of up to 16 bytes."""

from __future__ import annotations

import math

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16
from ds41_tvm.schedule.cuda.common import vector

THREADS = 256


@T.macro
def _rotate(value, table, vt, pair, part, sign):
    """The pair in value[2 * part], value[2 * part + 1], both products rounded before they are added."""
    part[0] = bf16_to_f32(value[2 * pair[1]]) * table[vt, pair[0], 0]
    part[1] = bf16_to_f32(value[2 * pair[1] + 1]) * (T.float32(sign) * table[vt, pair[0], 1])
    part[2] = bf16_to_f32(value[2 * pair[1]]) * (T.float32(sign) * table[vt, pair[0], 1])
    part[3] = bf16_to_f32(value[2 * pair[1] + 1]) * table[vt, pair[0], 0]
    value[2 * pair[1]] = f32_to_bf16(part[0] - part[1])
    value[2 * pair[1] + 1] = f32_to_bf16(part[2] + part[3])


def rope(heads: int, dim: int, rope_dim: int, inverse: int) -> PrimFunc:
    """As `kernels.rope.rope`; `dim` must be even."""
    keep, pairs = dim - rope_dim, rope_dim // 2
    sign = -1.0 if inverse else 1.0
    wide = vector(math.gcd(keep, rope_dim), 8)
    chunks = dim // wide

    @T.prim_func(s_tir=True)
    def main(x: T.handle, table: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        X = T.match_buffer(x, (n, heads, dim), "uint16")
        C = T.match_buffer(table, (n, pairs, 2), "float32")
        Y = T.match_buffer(y, (n, heads, dim), "uint16")
        for b in T.thread_binding(
            (n * T.int64(heads * chunks) + T.int64(THREADS - 1)) // T.int64(THREADS), "blockIdx.x"
        ):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("rotate"):
                    vb = T.axis.spatial((n * T.int64(heads * chunks) + T.int64(THREADS - 1)) // T.int64(THREADS), b)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(X[0:n, 0:heads, 0:dim], C[0:n, 0:pairs, 0:2])
                    T.writes(Y[0:n, 0:heads, 0:dim])
                    value = T.sblock_alloc_buffer((wide,), "uint16", scope="local")
                    part = T.sblock_alloc_buffer((4,), "float32", scope="local")
                    item: T.let = vb * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < n * T.int64(heads * chunks):
                        vt: T.let = item // T.int64(heads * chunks)
                        vh: T.let = item // T.int64(chunks) % T.int64(heads)
                        first: T.let = item % T.int64(chunks) * T.int64(wide)
                        for i in T.vectorized(wide):
                            value[i] = X[vt, vh, first + i]
                        if first >= T.int64(keep):
                            for j in T.unroll(wide // 2):
                                _rotate(value, C, vt, ((first - T.int64(keep)) // 2 + j, j), part, sign)
                        for i in T.vectorized(wide):
                            Y[vt, vh, first + i] = value[i]

    return main
