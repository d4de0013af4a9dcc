"""Index scores for CPUs: a vector holds 16 heads, a register tile some positions.

Its own program, because the plain kernel decodes a key for every head. A task is one query and some columns; it lays
the query out as ``[channel, head]`` once, decodes each key row once, and sums a block of 32 channels in registers. Such
a sum is exact (integers times a power of two), so its order is free; blocks and heads are added in ascending order as
in the plain kernel, and the bits are the same.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import bf16_product
from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.numerics.tir import bf16_to_f32, e2m1_to_f32, e8m0_to_f32, f32_to_bf16, round_bf16


def index_scores_cpu(
    heads: int, dim: int, block_rows: int, candidate_block: int, spread: int, *, tile: int = 8, columns: int = 512
) -> PrimFunc:
    """As `kernels.indexer.index_scores`. `tile`: positions of a register tile; `columns`: of a parallel task."""
    factory = _candidates if candidate_block else _dense
    return factory(heads, dim, block_rows, candidate_block, spread, tile, columns)


@T.macro
def _load_query(Q, W, vt, query, weight, heads, padded, dim):
    """query[channel, head] in f32 (exact), weight[head]; heads that pad the last vector are zero."""
    for h in range(padded):
        for b in range(dim // 32):
            for i in range(16):
                if h < heads:
                    query[b * 32 + i, h] = e2m1_to_f32(Q[vt, h, b * 16 + i]) * e8m0_to_f32(Q[vt, h, dim // 2 + b])
                    query[b * 32 + 16 + i, h] = e2m1_to_f32(
                        T.shift_right(Q[vt, h, b * 16 + i], T.uint8(4))
                    ) * e8m0_to_f32(Q[vt, h, dim // 2 + b])
                else:
                    query[b * 32 + i, h] = T.float32(0)
                    query[b * 32 + 16 + i, h] = T.float32(0)
        weight[h] = T.if_then_else(h < heads, bf16_to_f32(W[vt, T.min(h, heads - 1)]), T.float32(0))


@T.macro
def _decode_key(key, i, K, row, dim):
    for b in range(dim // 32):
        for lane in T.vectorized(16):
            key[i, b * 32 + lane] = e2m1_to_f32(K[row, b * 16 + lane]) * e8m0_to_f32(K[row, dim // 2 + b])
        for lane in T.vectorized(16):
            key[i, b * 32 + 16 + lane] = e2m1_to_f32(T.shift_right(K[row, b * 16 + lane], T.uint8(4))) * e8m0_to_f32(
                K[row, dim // 2 + b]
            )


@T.macro
def _score_tile(key, query, weight, acc, dot, product, score, heads, padded, dim, high):
    """score[i] of the `high` rows of `key`, 16 heads at a time."""
    for c in range(padded // 16):
        for i in T.unroll(high):
            for lane in T.vectorized(16):
                dot[i, lane] = T.float32(0)
        for b in range(dim // 32):
            for i in T.unroll(high):
                for lane in T.vectorized(16):
                    acc[i, lane] = T.float32(0)
            for d in range(32):
                for i in T.unroll(high):
                    for lane in T.vectorized(16):
                        acc[i, lane] = acc[i, lane] + key[i, b * 32 + d] * query[b * 32 + d, c * 16 + lane]
            for i in T.unroll(high):
                for lane in T.vectorized(16):
                    dot[i, lane] = dot[i, lane] + acc[i, lane]
        for i in T.unroll(high):
            for lane in T.vectorized(16):
                product[i, c * 16 + lane] = bf16_product(
                    T.max(round_bf16(dot[i, lane]), T.float32(0)), weight[c * 16 + lane]
                )
    for i in T.unroll(high):
        score[i] = T.float32(0)
    for h in range(heads):
        for i in T.unroll(high):
            score[i] = score[i] + product[i, h]


def _dense(heads: int, dim: int, block_rows: int, _size: int, _spread: int, high: int, chunk: int) -> PrimFunc:
    row_bytes, padded = dim // 2 + dim // 32, -(-heads // 16) * 16

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle, s: T.handle
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        S = T.match_buffer(s, (n, width), "uint16")
        for task in T.parallel(n * ((width + T.int64(chunk - 1)) // T.int64(chunk))):
            with T.sblock("scores"):
                v = T.axis.spatial(n * ((width + T.int64(chunk - 1)) // T.int64(chunk)), task)
                T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes], B[0:seqs, 0:blocks], N[0:n],
                        V[0:n])  # fmt: skip
                T.writes(S[0:n, 0:width])
                query = T.sblock_alloc_buffer((dim, padded), "float32")
                key = T.sblock_alloc_buffer((high, dim), "float32")
                product = T.sblock_alloc_buffer((high, padded), "float32")
                weight = T.sblock_alloc_buffer((padded,), "float32")
                acc = T.sblock_alloc_buffer((high, 16), "float32", scope="local")
                dot = T.sblock_alloc_buffer((high, 16), "float32", scope="local")
                score = T.sblock_alloc_buffer((high,), "float32", scope="local")
                # first column of the task, one past its last visible one, one past its last, a key row
                at = T.sblock_alloc_buffer((4,), "int64", scope="local")
                vt: T.let = v // ((width + T.int64(chunk - 1)) // T.int64(chunk))
                at[0] = v % ((width + T.int64(chunk - 1)) // T.int64(chunk)) * T.int64(chunk)
                at[2] = T.min(at[0] + T.int64(chunk), width)
                at[1] = T.min(at[2], T.Cast("int64", V[vt]))
                if at[0] < at[1]:
                    _load_query(Q, W, vt, query, weight, heads, padded, dim)
                    for g in range((at[1] - at[0] + T.int64(high - 1)) // T.int64(high)):
                        for i in range(high):
                            # Past the last visible position the tile repeats it.
                            at[3] = T.min(at[0] + g * T.int64(high) + i, at[1] - T.int64(1))
                            at[3] = T.Cast("int64", B[N[vt], at[3] // T.int64(block_rows)]) * T.int64(block_rows) + at[
                                3
                            ] % T.int64(block_rows)
                            _decode_key(key, i, K, at[3], dim)
                        _score_tile(key, query, weight, acc, dot, product, score, heads, padded, dim, high)
                        for i in range(high):
                            if at[0] + g * T.int64(high) + i < at[1]:
                                S[vt, at[0] + g * T.int64(high) + i] = f32_to_bf16(score[i])
                for c in range(at[2] - T.max(at[0], at[1])):
                    S[vt, T.max(at[0], at[1]) + c] = T.uint16(MASKED)

    return main


def _candidates(heads: int, dim: int, block_rows: int, size: int, spread: int, high: int, chunk: int) -> PrimFunc:
    row_bytes, padded = dim // 2 + dim // 32, -(-heads // 16) * 16

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle,
        candidates: T.handle, s: T.handle,
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
        S = T.match_buffer(s, (n, width), "uint16")
        if spread == 1:
            for t in T.parallel(n):
                with T.sblock("mask"):
                    vm = T.axis.spatial(n, t)
                    T.reads()
                    T.writes(S[vm, 0:width])
                    for c in range(width):
                        S[vm, c] = T.uint16(MASKED)
        for task in T.parallel(n * ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk))):
            with T.sblock("scores"):
                v = T.axis.spatial(n * ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk)), task)
                T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes], B[0:seqs, 0:blocks], N[0:n],
                        V[0:n], C[0:n, 0:count])  # fmt: skip
                T.writes(S[0:n, 0:width])
                query = T.sblock_alloc_buffer((dim, padded), "float32")
                key = T.sblock_alloc_buffer((high, dim), "float32")
                product = T.sblock_alloc_buffer((high, padded), "float32")
                weight = T.sblock_alloc_buffer((padded,), "float32")
                acc = T.sblock_alloc_buffer((high, 16), "float32", scope="local")
                dot = T.sblock_alloc_buffer((high, 16), "float32", scope="local")
                score = T.sblock_alloc_buffer((high,), "float32", scope="local")
                position = T.sblock_alloc_buffer((high,), "int64", scope="local")
                # first column of the task, columns of it, a column, a key row, tile holds a visible position
                at = T.sblock_alloc_buffer((5,), "int64", scope="local")
                vt: T.let = v // ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk))
                at[0] = v % ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk)) * T.int64(chunk)
                at[1] = T.min(T.int64(chunk), count * T.int64(size) - at[0])
                if C[vt, at[0] // T.int64(size)] >= 0:
                    _load_query(Q, W, vt, query, weight, heads, padded, dim)
                for g in range((at[1] + T.int64(high - 1)) // T.int64(high)):
                    at[4] = T.int64(0)
                    for i in range(high):
                        at[2] = T.min(at[0] + g * T.int64(high) + i, count * T.int64(size) - T.int64(1))
                        position[i] = T.Cast("int64", C[vt, at[2] // T.int64(size)]) * T.int64(size) + at[2] % T.int64(
                            size
                        )
                        if position[i] < T.int64(0) or position[i] >= T.Cast("int64", V[vt]):
                            position[i] = T.int64(-1)
                        else:
                            at[4] = T.int64(1)
                    if at[4] == T.int64(1):
                        for i in range(high):
                            at[3] = T.max(position[i], T.int64(0))
                            at[3] = T.Cast("int64", B[N[vt], at[3] // T.int64(block_rows)]) * T.int64(block_rows) + at[
                                3
                            ] % T.int64(block_rows)
                            _decode_key(key, i, K, at[3], dim)
                        _score_tile(key, query, weight, acc, dot, product, score, heads, padded, dim, high)
                    for i in range(high):
                        if g * T.int64(high) + i < at[1]:
                            if spread == 1:
                                if position[i] >= T.int64(0):
                                    S[vt, position[i]] = f32_to_bf16(score[i])
                            else:
                                S[vt, at[0] + g * T.int64(high) + i] = T.Select(
                                    position[i] >= T.int64(0), f32_to_bf16(score[i]), T.uint16(MASKED)
                                )

    return main
