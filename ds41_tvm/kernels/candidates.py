"""Scores of blocks of compressed positions, for the candidate source (official ``select_candidate_blocks``)."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.kernels.topk import order_key


def block_scores(size: int) -> PrimFunc:
    """b[t, j] = max of s[t, p] over the visible positions p of block j; +infinity for the newest visible block.

    Blocks with nothing visible score -infinity. Top-k over b with limit ``ceil(visible / size)`` then gives the
    candidate blocks. Shapes: s bf16 bits ``[n, width]``, visible int32 ``[n]``, b bf16 bits ``[n, blocks]``.
    """

    @T.prim_func(s_tir=True)
    def main(s: T.handle, visible: T.handle, b: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width, blocks = T.int64(), T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        V = T.match_buffer(visible, (n,), "int32")
        B = T.match_buffer(b, (n, blocks), "uint16")
        for t in range(n):
            with T.sblock("blocks"):
                vt = T.axis.spatial(n, t)
                T.reads(S[vt, 0:width], V[vt])
                T.writes(B[vt, 0:blocks])
                best = T.sblock_alloc_buffer((1,), "uint16", scope="local")
                seen = T.sblock_alloc_buffer((1,), "int64", scope="local")
                seen[0] = T.Cast("int64", V[vt])
                for j in range(blocks):
                    best[0] = T.uint16(MASKED)
                    for i in range(size):
                        if j * T.int64(size) + i < seen[0]:
                            if order_key(S[vt, j * T.int64(size) + i]) > order_key(best[0]):
                                best[0] = S[vt, j * T.int64(size) + i]
                    if seen[0] > T.int64(0) and j == (seen[0] - T.int64(1)) // T.int64(size):
                        best[0] = T.uint16(0x7F80)
                    B[vt, j] = best[0]

    return main


def candidate_limit(size: int) -> PrimFunc:
    """limit[t] = min((c - 1) * size + visible[t] - newest * size, c * size): how many columns of compact candidate
    scores are positions.

    c is the number of candidate blocks of row t and `newest` the last of them, the only one that can be visible in
    part; 0 without any. Shapes: candidates int32 ``[n, blocks]`` (ascending, then -1), visible and limit int32 ``[n]``.
    """

    @T.prim_func(s_tir=True)
    def main(candidates: T.handle, visible: T.handle, limit: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, blocks = T.int64(), T.int64()
        C = T.match_buffer(candidates, (n, blocks), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        L = T.match_buffer(limit, (n,), "int32")
        for t in range(n):
            with T.sblock("limit"):
                vt = T.axis.spatial(n, t)
                T.reads(C[vt, 0:blocks], V[vt])
                T.writes(L[vt])
                state = T.sblock_alloc_buffer((2,), "int32", scope="local")
                state[0] = T.int32(0)
                state[1] = T.int32(0)
                for j in range(blocks):
                    if C[vt, j] >= T.int32(0):
                        state[0] = state[0] + T.int32(1)
                        state[1] = C[vt, j]
                L[vt] = T.Select(
                    state[0] > T.int32(0),
                    T.min((state[0] - state[1] - T.int32(1)) * T.int32(size) + V[vt], state[0] * T.int32(size)),
                    T.int32(0),
                )

    return main
