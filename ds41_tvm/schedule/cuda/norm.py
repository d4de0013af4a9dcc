"""RMSNorm on a GPU: a block of threads for each row, which stays in registers between the two passes over it."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16
from ds41_tvm.schedule.cuda.common import WARP, vector

MOST_THREADS = 256


def rms_norm(dim: int, eps: float) -> PrimFunc:
    """As `kernels.norm.rms_norm`. The squares are exact in f32; each thread sums its own in f64, and halves of the
    block's sums are added until one is left: an order that depends on `dim` alone.

    f64 keeps 2^-52 of the total at each addition, so the mean rounded to f32 is the one of the CPU's order, unless it
    lies within about 2^-45 of the middle between two f32 values.
    """
    wide = vector(dim, 8)
    chunks = dim // wide
    threads = WARP
    while threads < min(chunks, MOST_THREADS):
        threads *= 2
    turns = -(-chunks // threads)
    halvings = threads.bit_length() - 1

    @T.prim_func(s_tir=True)
    def main(x: T.handle, w: T.Buffer((dim,), "uint16"), y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        X = T.match_buffer(x, (n, dim), "uint16")
        Y = T.match_buffer(y, (n, dim), "uint16")
        for t in T.thread_binding(n, "blockIdx.x"):
            for tx in T.thread_binding(threads, "threadIdx.x"):
                with T.sblock("norm"):
                    vt, vx = T.axis.remap("SS", [t, tx])
                    T.reads(X[vt, 0:dim], w[0:dim])
                    T.writes(Y[vt, 0:dim])
                    value = T.sblock_alloc_buffer((turns, wide), "uint16", scope="local")
                    weight = T.sblock_alloc_buffer((wide,), "uint16", scope="local")
                    total = T.sblock_alloc_buffer((1,), "float64", scope="local")
                    factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    sums = T.sblock_alloc_buffer((threads,), "float64", scope="shared")
                    total[0] = T.float64(0)
                    for c in T.unroll(turns):
                        if c * threads + vx < chunks:
                            for i in T.vectorized(wide):
                                value[c, i] = X[vt, (c * threads + vx) * wide + i]
                            for i in T.unroll(wide):
                                total[0] = total[0] + T.Cast(
                                    "float64", bf16_to_f32(value[c, i]) * bf16_to_f32(value[c, i])
                                )
                    sums[vx] = total[0]
                    for h in T.unroll(halvings):
                        T.tvm_storage_sync("shared")
                        if vx < T.shift_right(threads // 2, h):
                            sums[vx] = sums[vx] + sums[vx + T.shift_right(threads // 2, h)]
                    T.tvm_storage_sync("shared")
                    factor[0] = T.float32(1) / T.sqrt(T.Cast("float32", sums[0] / T.float64(dim)) + T.float32(eps))
                    for c in T.unroll(turns):
                        if c * threads + vx < chunks:
                            for i in T.vectorized(wide):
                                weight[i] = w[(c * threads + vx) * wide + i]
                            for i in T.unroll(wide):
                                value[c, i] = f32_to_bf16(
                                    bf16_to_f32(weight[i]) * (bf16_to_f32(value[c, i]) * factor[0])
                                )
                            for i in T.vectorized(wide):
                                Y[vt, (c * threads + vx) * wide + i] = value[c, i]

    return main
