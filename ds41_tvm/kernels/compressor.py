"""Pool the members of completed groups into one latent each (official ``Compressor``, ratio above 1)."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import exp
from ds41_tvm.numerics.tir import f32_to_bf16


def pool_groups(dim: int, ratio: int) -> PrimFunc:
    """y[g, d] = bf16(sum_m softmax_m(gate[m, d]) * kv[m, d]) over the `ratio` members m of group g, in f32.

    Shapes: kv, gate f32 ``[n, dim]`` of the step's tokens; ring f32 ``[p, 2, dim]`` of older tokens (kv, gate); member
    int64 ``[g, ratio]``: row of the step, or ``-1 - row of the ring``; y bf16 bits ``[g, dim]``. Members are taken in
    ascending position, weights divided by their sum before the products as a softmax does.
    """

    @T.prim_func(s_tir=True)
    def main(kv: T.handle, gate: T.handle, ring: T.handle, member: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, p, groups = T.int64(), T.int64(), T.int64()
        K = T.match_buffer(kv, (n, dim), "float32")
        G = T.match_buffer(gate, (n, dim), "float32")
        R = T.match_buffer(ring, (p, 2, dim), "float32")
        M = T.match_buffer(member, (groups, ratio), "int64")
        Y = T.match_buffer(y, (groups, dim), "uint16")
        score = T.sblock_alloc_buffer((groups, ratio, dim), "float32")
        value = T.sblock_alloc_buffer((groups, ratio, dim), "float32")
        top = T.sblock_alloc_buffer((groups, dim), "float32")
        weight = T.sblock_alloc_buffer((groups, ratio, dim), "float32")
        total = T.sblock_alloc_buffer((groups, dim), "float32")
        pooled = T.sblock_alloc_buffer((groups, dim), "float32")
        for g in range(groups):
            for m, d in T.grid(ratio, dim):
                with T.sblock("gather"):
                    vg, vm, vd = T.axis.remap("SSS", [g, m, d])
                    T.reads(K[0:n, vd], G[0:n, vd], R[0:p, 0:2, vd], M[vg, vm])
                    T.writes(score[vg, vm, vd], value[vg, vm, vd])
                    score[vg, vm, vd] = T.if_then_else(
                        M[vg, vm] >= T.int64(0), G[M[vg, vm], vd], R[T.int64(-1) - M[vg, vm], 1, vd]
                    )
                    value[vg, vm, vd] = T.if_then_else(
                        M[vg, vm] >= T.int64(0), K[M[vg, vm], vd], R[T.int64(-1) - M[vg, vm], 0, vd]
                    )
            for m, d in T.grid(ratio, dim):
                with T.sblock("top"):
                    vg, vm, vd = T.axis.remap("SRS", [g, m, d])
                    with T.init():
                        top[vg, vd] = T.float32(-3.0e38)
                    top[vg, vd] = T.max(top[vg, vd], score[vg, vm, vd])
            for m, d in T.grid(ratio, dim):
                with T.sblock("weight"):
                    vg, vm, vd = T.axis.remap("SSS", [g, m, d])
                    weight[vg, vm, vd] = exp(score[vg, vm, vd] - top[vg, vd])
            for m, d in T.grid(ratio, dim):
                with T.sblock("total"):
                    vg, vm, vd = T.axis.remap("SRS", [g, m, d])
                    with T.init():
                        total[vg, vd] = T.float32(0)
                    total[vg, vd] = total[vg, vd] + weight[vg, vm, vd]
            for m, d in T.grid(ratio, dim):
                with T.sblock("pooled"):
                    vg, vm, vd = T.axis.remap("SRS", [g, m, d])
                    with T.init():
                        pooled[vg, vd] = T.float32(0)
                    pooled[vg, vd] = pooled[vg, vd] + value[vg, vm, vd] * (weight[vg, vm, vd] / total[vg, vd])
            for d in range(dim):
                with T.sblock("store"):
                    vg, vd = T.axis.remap("SS", [g, d])
                    Y[vg, vd] = f32_to_bf16(pooled[vg, vd])

    return main
