"""Index scores on tensor cores, bit for bit as `kernels.indexer.index_scores`.

Twice an e2m1 value is a small integer, and a product of 32 channels, one block of scales, is one int8 step, exact. What
follows is in f32 in the order of the contract: blocks of channels ascending, then heads ascending.

A warp scores 16 positions, whose keys it keeps decoded in registers for the queries of the block that share a sequence;
the queries are decoded once for the block. A packed word of a row, eight nibbles of a block, is the two registers of a
lane: in which order channels meet inner indices does not matter, as long as keys and queries agree.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.numerics.tir import f32_to_bf16
from ds41_tvm.schedule.cuda.indexer_tile import (
    POSITIONS,
    PRODUCTS,
    THREADS,
    WARPS,
    Sizes,
    load_keys,
    score,
    stage_queries,
)
from ds41_tvm.schedule.cuda.mma import exchange_shape, form_of


def _position(s: Sizes, C: Any, V: Any, t: Any, column: Any, count: Any) -> Any:
    """Position of a column of candidates, -1 if it is not visible or none."""
    last = T.min(column, count * s.candidate_block - 1)
    block = C[t, last // s.candidate_block]
    position = T.Cast("int64", block) * T.int64(s.candidate_block) + last % s.candidate_block
    seen = T.bitwise_and(block >= 0, position < T.Cast("int64", V[t]))
    return T.Select(seen, position, T.int64(-1))


@T.macro
def _buffers_and_scores(s, Q, W, K, B, N, V, C, S, n, width, count, vb, vg, vx):
    queries = T.sblock_alloc_buffer((s.queries * s.padded * s.scales * 8,), "uint32", scope=s.shared)
    q_scale = T.sblock_alloc_buffer((s.queries * s.padded * s.scales,), "float32", scope=s.shared)
    weight = T.sblock_alloc_buffer((s.queries * s.padded,), "float32", scope=s.shared)
    products = T.sblock_alloc_buffer((WARPS, s.padded, PRODUCTS), "float32", scope=s.shared)
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, WARPS), "uint32", scope="shared")
    words = T.sblock_alloc_buffer((1,), "uint32", scope="local")
    keys = T.sblock_alloc_buffer((s.scales * 4,), "uint32", scope="local")
    k_scale = T.sblock_alloc_buffer((s.scales * 2,), "float32", scope="local")
    total = T.sblock_alloc_buffer((1,), "float32", scope="local")
    c = T.sblock_alloc_buffer((4,), "int32", scope="local")
    dot = T.sblock_alloc_buffer((4,), "float32", scope="local")
    held = T.sblock_alloc_buffer((1,), "int32", scope="local")  # sequence whose keys are in registers
    at = T.sblock_alloc_buffer((2,), "int64", scope="local")
    first: T.let = vg * s.queries
    column: T.let = vb * POSITIONS + vx // 32 * 16
    stage_queries(s, Q, W, queries, q_scale, weight, words, first, n, vx)
    T.tvm_storage_sync("shared")
    held[0] = -1
    for q in range(s.queries):
        if first + q < n:
            if C is None:
                if vb * POSITIONS < T.Cast("int64", V[first + q]):
                    if held[0] != N[first + q]:
                        held[0] = N[first + q]
                        for h in s.each(2):
                            # Past the last column the tile repeats it; what lies past the visible ones is not stored.
                            at[0] = T.min(column + h * 8 + vx % 32 // 4, width - 1)
                            at[1] = T.Cast("int64", B[held[0], at[0] // s.block_rows]) * T.int64(s.block_rows) + (
                                at[0] % s.block_rows
                            )
                            load_keys(s, K, keys, k_scale, words, at[1], h, vx % 32)
                    score(s, q, queries, q_scale, weight, keys, k_scale, products, total, words, c, dot, exchange, vx)
                if vx % 32 < 16 and column + vx % 16 < width:
                    S[first + q, column + vx % 16] = T.Select(
                        column + vx % 16 < T.Cast("int64", V[first + q]), f32_to_bf16(total[0]), T.uint16(MASKED)
                    )
            else:
                if C[first, vb * POSITIONS // s.candidate_block] >= 0:
                    for h in s.each(2):
                        at[0] = _position(s, C, V, first, column + h * 8 + vx % 32 // 4, count)
                        at[0] = T.max(at[0], T.int64(0))
                        at[1] = T.Cast("int64", B[N[first], at[0] // s.block_rows]) * T.int64(s.block_rows) + (
                            at[0] % s.block_rows
                        )
                        load_keys(s, K, keys, k_scale, words, at[1], h, vx % 32)
                    score(s, q, queries, q_scale, weight, keys, k_scale, products, total, words, c, dot, exchange, vx)
                if vx % 32 < 16 and column + vx % 16 < count * s.candidate_block:
                    at[0] = _position(s, C, V, first, column + vx % 16, count)
                    if s.spread == 1:
                        if at[0] >= T.int64(0):
                            S[first, at[0]] = f32_to_bf16(total[0])
                    else:
                        S[first, column + vx % 16] = T.Select(
                            at[0] >= T.int64(0), f32_to_bf16(total[0]), T.uint16(MASKED)
                        )


def index_scores_mma(s: Sizes) -> PrimFunc:
    """The program for `s`; `dim` a multiple of 32."""
    return _candidates(s) if s.candidate_block else _dense(s)


def _dense(s: Sizes) -> PrimFunc:
    heads, row_bytes = s.heads, s.row_bytes

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle, s_: T.handle
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        S = T.match_buffer(s_, (n, width), "uint16")
        for bx in T.thread_binding((width + (POSITIONS - 1)) // POSITIONS, "blockIdx.x"):
            for by in T.thread_binding((n + (s.queries - 1)) // s.queries, "blockIdx.y"):
                for tx in T.thread_binding(THREADS, "threadIdx.x"):
                    with T.sblock("scores"):
                        vb, vg, vx = T.axis.remap("SSS", [bx, by, tx])
                        T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes],
                                B[0:seqs, 0:blocks], N[0:n], V[0:n])  # fmt: skip
                        T.writes(S[0:n, 0:width])
                        _buffers_and_scores(s, Q, W, K, B, N, V, None, S, n, width, None, vb, vg, vx)

    return main


def _candidates(s: Sizes) -> PrimFunc:
    heads, row_bytes = s.heads, s.row_bytes

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle,
        candidates: T.handle, s_: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width, count = T.int64(), T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        C = T.match_buffer(candidates, (n, count), "int32")
        S = T.match_buffer(s_, (n, width), "uint16")
        if s.spread == 1:
            for bx in T.thread_binding((width + (THREADS - 1)) // THREADS, "blockIdx.x"):
                for by in T.thread_binding(n, "blockIdx.y"):
                    for tx in T.thread_binding(THREADS, "threadIdx.x"):
                        with T.sblock("mask"):
                            vb, vg, vx = T.axis.remap("SSS", [bx, by, tx])
                            T.reads()
                            T.writes(S[vg, 0:width])
                            if vb * THREADS + vx < width:
                                S[vg, vb * THREADS + vx] = T.uint16(MASKED)
        for bx in T.thread_binding((count * s.candidate_block + (POSITIONS - 1)) // POSITIONS, "blockIdx.x"):
            for by in T.thread_binding(n, "blockIdx.y"):
                for tx in T.thread_binding(THREADS, "threadIdx.x"):
                    with T.sblock("scores"):
                        vb, vg, vx = T.axis.remap("SSS", [bx, by, tx])
                        T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes],
                                B[0:seqs, 0:blocks], N[0:n], V[0:n], C[0:n, 0:count])  # fmt: skip
                        T.writes(S[0:n, 0:width])
                        _buffers_and_scores(s, Q, W, K, B, N, V, C, S, n, width, count, vb, vg, vx)

    return main


def _rule(op: str, p: dict[str, Any], kind: str, knobs: dict[str, int]) -> PrimFunc | None:
    if op != "index_scores" or p["dim"] % 32:
        return None
    return index_scores_mma(Sizes(**p, **knobs, mma=form_of(kind)))


RULES = (("index-scores-mma", _rule),)
