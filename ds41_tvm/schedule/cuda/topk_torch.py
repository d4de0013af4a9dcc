"""torch's top-k on a GPU: a thread for each row, its pairs in device memory. To compare with torch, not for speed."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.topk_torch import pair_of, select_row

THREADS = 32


def topk_torch_cpu(k: int) -> PrimFunc:
    """As `kernels.topk_torch.topk_torch_cpu`. The host allocates 9 bytes for every score."""

    @T.prim_func(s_tir=True)
    def main(s: T.handle, total: T.handle, limit: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width = T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        N = T.match_buffer(total, (n,), "int32")
        L = T.match_buffer(limit, (n,), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        pairs = T.sblock_alloc_buffer((n, width + T.int64(1)), "int64")
        marks = T.sblock_alloc_buffer((n, width + T.int64(1)), "uint8")
        for t in T.thread_binding(n, "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("pairs"):
                    vt, vx = T.axis.remap("SS", [t, tx])
                    T.reads(S[vt, 0:width], N[vt])
                    T.writes(pairs[vt, 0 : width + T.int64(1)], marks[vt, 0 : width + T.int64(1)])
                    for c in range((N[vt] + (THREADS - 1)) // THREADS):
                        if c * THREADS + vx < N[vt]:
                            pairs[vt, c * THREADS + vx] = pair_of(S[vt, c * THREADS + vx], c * THREADS + vx)
                            marks[vt, c * THREADS + vx] = T.uint8(0)
        for b in T.thread_binding((n + T.int64(THREADS - 1)) // T.int64(THREADS), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("select"):
                    vt = T.axis.spatial(n, b * T.int64(THREADS) + T.Cast("int64", tx))
                    T.where(b * T.int64(THREADS) + T.Cast("int64", tx) < n)
                    T.reads(N[vt], L[vt], pairs[vt, 0 : width + T.int64(1)], marks[vt, 0 : width + T.int64(1)])
                    T.writes(Out[vt, 0:k], pairs[vt, 0 : width + T.int64(1)], marks[vt, 0 : width + T.int64(1)])
                    pair = T.match_buffer(
                        pairs[vt, 0 : width + T.int64(1)], (width + T.int64(1),), "int64", offset_factor=1
                    )
                    mark = T.match_buffer(
                        marks[vt, 0 : width + T.int64(1)], (width + T.int64(1),), "uint8", offset_factor=1
                    )
                    r = T.sblock_alloc_buffer((12,), "int32", scope="local")
                    v = T.sblock_alloc_buffer((2,), "int64", scope="local")
                    select_row(N, L, Out, vt, k, pair, mark, r, v)

    return main
