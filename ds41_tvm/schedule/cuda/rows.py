"""Small operators on a GPU that need no word with other threads: a thread for a few elements, or for a block."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import exp
from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.kernels.topk import order_key
from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16
from ds41_tvm.schedule.cuda.common import WARP, vector

THREADS = 128


def _blocks(items: Any) -> Any:
    """Blocks of threads for so many items."""
    return (items + T.int64(THREADS - 1)) // T.int64(THREADS)


@T.macro
def _member(fresh, ring, place, which, first, out, wide):
    """A few channels of one member: a row of the step, or of the ring."""
    if place >= T.int64(0):
        for i in T.vectorized(wide):
            out[i] = fresh[place, first + i]
    else:
        for i in T.vectorized(wide):
            out[i] = ring[T.int64(-1) - place, which, first + i]


def scale_weights(heads: int, factor: float) -> PrimFunc:
    """As `kernels.indexer.scale_weights`."""
    wide = vector(heads, 8)

    @T.prim_func(s_tir=True)
    def main(w: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        W = T.match_buffer(w, (n, heads), "uint16")
        Y = T.match_buffer(y, (n, heads), "uint16")
        for b in T.thread_binding(_blocks(n * T.int64(heads // wide)), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("scale"):
                    vb = T.axis.spatial(_blocks(n * T.int64(heads // wide)), b)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(W[0:n, 0:heads])
                    T.writes(Y[0:n, 0:heads])
                    value = T.sblock_alloc_buffer((wide,), "uint16", scope="local")
                    item: T.let = vb * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < n * T.int64(heads // wide):
                        vt: T.let = item // T.int64(heads // wide)
                        first: T.let = item % T.int64(heads // wide) * T.int64(wide)
                        for i in T.vectorized(wide):
                            value[i] = W[vt, first + i]
                        for i in T.unroll(wide):
                            value[i] = f32_to_bf16(bf16_to_f32(value[i]) * T.float32(factor))
                        for i in T.vectorized(wide):
                            Y[vt, first + i] = value[i]

    return main


def copy_rows(size: int) -> PrimFunc:
    """As `kernels.rows.copy_rows`."""
    wide = vector(size, 16)

    @T.prim_func(s_tir=True)
    def main(x: T.handle, take: T.handle, place: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, m, p = T.int64(), T.int64(), T.int64()
        X = T.match_buffer(x, (n, size), "uint8")
        From = T.match_buffer(take, (m,), "int64")
        To = T.match_buffer(place, (m,), "int64")
        Out = T.match_buffer(out, (p, size), "uint8")
        for b in T.thread_binding(_blocks(m * T.int64(size // wide)), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("copy"):
                    vb = T.axis.spatial(_blocks(m * T.int64(size // wide)), b)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(X[0:n, 0:size], From[0:m], To[0:m])
                    T.writes(Out[0:p, 0:size])
                    item: T.let = vb * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < m * T.int64(size // wide):
                        vi: T.let = item // T.int64(size // wide)
                        first: T.let = item % T.int64(size // wide) * T.int64(wide)
                        for i in T.vectorized(wide):
                            Out[To[vi], first + i] = X[From[vi], first + i]

    return main


def block_scores(size: int) -> PrimFunc:
    """As `kernels.candidates.block_scores`: a thread for each block of positions."""

    @T.prim_func(s_tir=True)
    def main(s: T.handle, visible: T.handle, b: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width, blocks = T.int64(), T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        V = T.match_buffer(visible, (n,), "int32")
        B = T.match_buffer(b, (n, blocks), "uint16")
        for g in T.thread_binding(_blocks(n * blocks), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("blocks"):
                    vg = T.axis.spatial(_blocks(n * blocks), g)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(S[0:n, 0:width], V[0:n])
                    T.writes(B[0:n, 0:blocks])
                    best = T.sblock_alloc_buffer((1,), "uint16", scope="local")
                    item: T.let = vg * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < n * blocks:
                        vt: T.let = item // blocks
                        vj: T.let = item % blocks
                        seen: T.let = T.Cast("int64", V[vt])
                        best[0] = T.uint16(MASKED)
                        for i in range(size):
                            if vj * T.int64(size) + i < seen:
                                if order_key(S[vt, vj * T.int64(size) + i]) > order_key(best[0]):
                                    best[0] = S[vt, vj * T.int64(size) + i]
                        if seen > T.int64(0) and vj == (seen - T.int64(1)) // T.int64(size):
                            best[0] = T.uint16(0x7F80)
                        B[vt, vj] = best[0]

    return main


def candidate_limit(size: int) -> PrimFunc:
    """As `kernels.candidates.candidate_limit`: a warp for each row."""

    @T.prim_func(s_tir=True)
    def main(candidates: T.handle, visible: T.handle, limit: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, blocks = T.int64(), T.int64()
        C = T.match_buffer(candidates, (n, blocks), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        L = T.match_buffer(limit, (n,), "int32")
        for t in T.thread_binding(n, "blockIdx.x"):
            for tx in T.thread_binding(WARP, "threadIdx.x"):
                with T.sblock("limit"):
                    vt, vx = T.axis.remap("SS", [t, tx])
                    T.reads(C[vt, 0:blocks], V[vt])
                    T.writes(L[vt])
                    counts = T.sblock_alloc_buffer((WARP,), "int32", scope="shared")
                    newest = T.sblock_alloc_buffer((WARP,), "int32", scope="shared")
                    # candidate blocks, the newest of them
                    mine = T.sblock_alloc_buffer((2,), "int32", scope="local")
                    mine[0] = T.int32(0)
                    mine[1] = T.int32(-1)
                    for j in range((blocks + T.int64(WARP - 1)) // T.int64(WARP)):
                        if j * T.int64(WARP) + T.Cast("int64", vx) < blocks:
                            mine[0] = mine[0] + T.Cast("int32", C[vt, j * T.int64(WARP) + vx] >= T.int32(0))
                            mine[1] = T.max(mine[1], C[vt, j * T.int64(WARP) + vx])
                    counts[vx] = mine[0]
                    newest[vx] = mine[1]
                    T.tvm_storage_sync("shared")
                    if vx == 0:
                        for j in range(1, WARP):
                            mine[0] = mine[0] + counts[j]
                            mine[1] = T.max(mine[1], newest[j])
                        L[vt] = T.Select(
                            mine[0] > T.int32(0),
                            T.min((mine[0] - mine[1] - T.int32(1)) * T.int32(size) + V[vt], mine[0] * T.int32(size)),
                            T.int32(0),
                        )

    return main


def pool_groups(dim: int, ratio: int) -> PrimFunc:
    """As `kernels.compressor.pool_groups`: a thread for up to 4 channels of a group.

    The members' weights are computed twice, which keeps them out of memory; both times they are the same.
    """
    wide = vector(dim, 4)

    @T.prim_func(s_tir=True)
    def main(kv: T.handle, gate: T.handle, ring: T.handle, member: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, p, groups = T.int64(), T.int64(), T.int64()
        K = T.match_buffer(kv, (n, dim), "float32")
        G = T.match_buffer(gate, (n, dim), "float32")
        R = T.match_buffer(ring, (p, 2, dim), "float32")
        M = T.match_buffer(member, (groups, ratio), "int64")
        Y = T.match_buffer(y, (groups, dim), "uint16")
        for b in T.thread_binding(_blocks(groups * T.int64(dim // wide)), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("pool"):
                    vb = T.axis.spatial(_blocks(groups * T.int64(dim // wide)), b)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(K[0:n, 0:dim], G[0:n, 0:dim], R[0:p, 0:2, 0:dim], M[0:groups, 0:ratio])
                    T.writes(Y[0:groups, 0:dim])
                    top = T.sblock_alloc_buffer((wide,), "float32", scope="local")
                    total = T.sblock_alloc_buffer((wide,), "float32", scope="local")
                    pooled = T.sblock_alloc_buffer((wide,), "float32", scope="local")
                    score = T.sblock_alloc_buffer((wide,), "float32", scope="local")
                    value = T.sblock_alloc_buffer((wide,), "float32", scope="local")
                    result = T.sblock_alloc_buffer((wide,), "uint16", scope="local")
                    item: T.let = vb * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < groups * T.int64(dim // wide):
                        vg: T.let = item // T.int64(dim // wide)
                        first: T.let = item % T.int64(dim // wide) * T.int64(wide)
                        for i in T.unroll(wide):
                            top[i] = T.float32(-3.0e38)
                            total[i] = T.float32(0)
                            pooled[i] = T.float32(0)
                        for m in range(ratio):
                            _member(G, R, M[vg, m], 1, first, score, wide)
                            for i in T.unroll(wide):
                                top[i] = T.max(top[i], score[i])
                        for m in range(ratio):
                            _member(G, R, M[vg, m], 1, first, score, wide)
                            for i in T.unroll(wide):
                                total[i] = total[i] + exp(score[i] - top[i])
                        for m in range(ratio):
                            _member(G, R, M[vg, m], 1, first, score, wide)
                            _member(K, R, M[vg, m], 0, first, value, wide)
                            for i in T.unroll(wide):
                                pooled[i] = pooled[i] + value[i] * (exp(score[i] - top[i]) / total[i])
                        for i in T.unroll(wide):
                            result[i] = f32_to_bf16(pooled[i])
                        for i in T.vectorized(wide):
                            Y[vg, first + i] = result[i]

    return main
