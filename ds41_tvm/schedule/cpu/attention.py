"""Sparse attention with fused multiply-adds: two register-tiled products over the gathered rows.

Its own program, because the plain kernel decodes a row inside every dot product. Layouts: decoded rows ``[row,
channel]``, queries ``[channel, head]``, scores ``[row, head]``. A vector holds 16 heads in the first product and in
the softmax, 16 channels in the second, so no sum runs across a vector and every sum is taken in ascending order:
channels in the scores, rows in the softmax and the output.
"""

from __future__ import annotations

from typing import NamedTuple

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.attention import LOWEST, sink_weight
from ds41_tvm.kernels.expr import exp
from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16
from ds41_tvm.schedule.cpu.gather import Sizes, gathered_attention


class Tiles(NamedTuple):
    """Register tiles: `rows` x `wide` accumulators of scores (6 x 64 are 24 of 32 vector registers), `heads` x `lanes`
    of outputs.
    """

    rows: int
    wide: int
    heads: int
    lanes: int


def sparse_attention_fma(
    sizes: Sizes, *, rows: int = 6, wide: int | None = None, heads: int = 4, lanes: int | None = None
) -> PrimFunc:
    """As `kernels.attention.sparse_attention`, with register tiles as in `Tiles`."""
    capacity = sizes.window + sizes.k + rows
    tiles = Tiles(
        rows,
        wide or next(t for t in (64, 32, 16) if sizes.padded % t == 0),
        heads,
        lanes or (64 if sizes.dim % 64 == 0 else 32),
    )
    # The last task's scores are read in whole tiles of heads.
    scored = -(-sizes.padded // heads) * heads
    constants = (sizes.dim, sizes.task_heads, sizes.padded, capacity, tiles, scored)
    return gathered_attention(sizes, "float32", lambda value: value, rows, _attend, constants)


@T.macro
def _scores(rows, query, score, tile, count, dim, padded, high, wide):
    """score[r, h] = dim^-0.5 * sum_d rows[r, d] * query[d, h], a tile of `high` x `wide` at a time."""
    for r, c in T.grid((count + T.int64(high - 1)) // T.int64(high), padded // wide):
        for i in T.unroll(high):
            for lane in T.vectorized(wide):
                tile[i, lane] = T.float32(0)
        for d in range(dim):
            for i in T.unroll(high):
                for lane in T.vectorized(wide):
                    tile[i, lane] = tile[i, lane] + rows[r * T.int64(high) + i, d] * query[d, c * wide + lane]
        for i in T.unroll(high):
            for lane in T.vectorized(wide):
                score[r * T.int64(high) + i, c * wide + lane] = tile[i, lane] * T.float32(dim**-0.5)


@T.macro
def _softmax(score, sink, first_head, top, total, count, padded, heads):
    """score becomes e^(score - top); total its sum plus the sink's term. 16 heads at a time."""
    for c in range(padded // 16):
        for lane in T.vectorized(16):
            top[lane] = T.float32(LOWEST)
        for r in range(count):
            for lane in T.vectorized(16):
                top[lane] = T.max(top[lane], score[r, c * 16 + lane])
        for lane in T.vectorized(16):
            total[c * 16 + lane] = T.float32(0)
        for r in range(count):
            for lane in T.vectorized(16):
                score[r, c * 16 + lane] = exp(score[r, c * 16 + lane] - top[lane])
            for lane in T.vectorized(16):
                total[c * 16 + lane] = total[c * 16 + lane] + score[r, c * 16 + lane]
        for lane in range(16):
            if c * 16 + lane < heads:
                total[c * 16 + lane] = total[c * 16 + lane] + sink_weight(sink[first_head + c * 16 + lane], top[lane])


@T.macro
def _output(rows, score, total, tile, Out, vt, first_head, count, dim, heads, high, wide):
    """Out[h, d] = bf16(sum_r score[r, h] * rows[r, d] / total[h]), a tile of `high` x `wide` at a time."""
    for d, g in T.grid(dim // wide, (heads + high - 1) // high):
        for i in T.unroll(high):
            for lane in T.vectorized(wide):
                tile[i, lane] = T.float32(0)
        for r in range(count):
            for i in T.unroll(high):
                for lane in T.vectorized(wide):
                    tile[i, lane] = tile[i, lane] + score[r, g * high + i] * rows[r, d * wide + lane]
        for i in T.unroll(high):
            if g * high + i < heads:
                for lane in T.vectorized(wide):
                    Out[vt, first_head + g * high + i, d * wide + lane] = f32_to_bf16(
                        tile[i, lane] / total[g * high + i]
                    )


@T.macro
def _attend(Q, Out, sink, vt, first_head, rows, count, constants):
    query = T.sblock_alloc_buffer((constants[0], constants[2]), "float32")
    score = T.sblock_alloc_buffer((constants[3], constants[5]), "float32")
    total = T.sblock_alloc_buffer((constants[2],), "float32")
    top = T.sblock_alloc_buffer((16,), "float32", scope="local")
    tile = T.sblock_alloc_buffer((constants[4].rows, constants[4].wide), "float32", scope="local")
    out_tile = T.sblock_alloc_buffer((constants[4].heads, constants[4].lanes), "float32", scope="local")
    for d in range(constants[0]):
        for h in range(constants[2]):
            query[d, h] = T.if_then_else(
                h < constants[1],
                bf16_to_f32(Q[vt, first_head + T.min(h, constants[1] - 1), d]),
                T.float32(0),
            )
    _scores(
        rows, query, score, tile, count, constants[0], constants[2], constants[4].rows, constants[4].wide
    )  # fmt: skip
    _softmax(score, sink, first_head, top, total, count, constants[2], constants[1])
    _output(
        rows, score, total, out_tile, Out, vt, first_head, count, constants[0], constants[1],
        constants[4].heads, constants[4].lanes,
    )  # fmt: skip
