"""RMSNorm of rows (official ``RMSNorm``)."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16


def rms_norm(dim: int, eps: float) -> PrimFunc:
    """y = bf16(w * (x / sqrt(mean(x^2) + eps))), all in f32, eps inside the root.

    Shapes: x, y bf16 bits ``[n, dim]``, w bf16 bits ``[dim]``. The squares are exact in f32 and summed in f64 (`lanes`
    interleaved partial sums, then these in ascending order), so that the mean is the correctly rounded one: a last bit
    of it can tip a whole row's rounding to bf16.
    """
    lanes = next(size for size in (8, 4, 2, 1) if dim % size == 0)

    @T.prim_func(s_tir=True)
    def main(x: T.handle, w: T.Buffer((dim,), "uint16"), y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        X = T.match_buffer(x, (n, dim), "uint16")
        Y = T.match_buffer(y, (n, dim), "uint16")
        partial = T.sblock_alloc_buffer((n, lanes), "float64")
        total = T.sblock_alloc_buffer((n,), "float64")
        factor = T.sblock_alloc_buffer((n,), "float32")
        for t in range(n):
            for i, lane in T.grid(dim // lanes, lanes):
                with T.sblock("squares"):
                    vt = T.axis.spatial(n, t)
                    vi = T.axis.reduce(dim // lanes, i)
                    vl = T.axis.spatial(lanes, lane)
                    with T.init():
                        partial[vt, vl] = T.float64(0)
                    partial[vt, vl] = partial[vt, vl] + T.Cast(
                        "float64", bf16_to_f32(X[vt, vi * lanes + vl]) * bf16_to_f32(X[vt, vi * lanes + vl])
                    )
            for lane in range(lanes):
                with T.sblock("sum"):
                    vt = T.axis.spatial(n, t)
                    vl = T.axis.reduce(lanes, lane)
                    with T.init():
                        total[vt] = T.float64(0)
                    total[vt] = total[vt] + partial[vt, vl]
            with T.sblock("factor"):
                vt = T.axis.spatial(n, t)
                factor[vt] = T.float32(1) / T.sqrt(T.Cast("float32", total[vt] / T.float64(dim)) + T.float32(eps))
            for d in range(dim):
                with T.sblock("scale"):
                    vt = T.axis.spatial(n, t)
                    vd = T.axis.spatial(dim, d)
                    Y[vt, vd] = f32_to_bf16(bf16_to_f32(w[vd]) * (bf16_to_f32(X[vt, vd]) * factor[vt]))

    return main
