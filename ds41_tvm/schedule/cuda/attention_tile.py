"""One tile of rows of sparse attention: scores, weights, and what they add to the output.

Shared memory: queries ``[head, channel]``, rows ``[row, channel]`` and weights ``[part, head, row]`` as bf16 pairs,
scores f32 ``[half, head, row]``. A tile of output channels belongs to one warp, which keeps its sums over all rows.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ds41_tvm.kernels.attention import LOWEST, sink_weight
from ds41_tvm.kernels.expr import exp
from ds41_tvm.numerics.tir import f32_bits, f32_to_bf16, round_bf16
from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.attention_sizes import INVALID, ROWS, THREADS
from ds41_tvm.schedule.cuda.mma import from_lane, load_matrices, multiply

NAN_BITS = 0x7FC00000


@T.macro
def clear(s, acc, top, total):
    """Nothing summed yet."""
    for i in s.each(s.head_tiles * s.channel_tiles * 4):
        acc[i] = T.float32(0)
    top[0] = T.float32(LOWEST)
    total[0] = T.float32(0)


@T.macro
def start_queries(s, Q, queries, vt, part, vx):
    """Start to copy the queries of the block's heads; heads that pad the last tile are zero."""
    for i in range(-(-s.padded * s.dim // 8 // THREADS)):
        task: T.let = i * THREADS + vx
        if task < s.padded * s.dim // 8:
            head: T.let = task // (s.dim // 8)
            if head < s.part_heads and part * s.part_heads + head < s.heads:
                memory.copy(
                    s.mma, queries, (s.piece(head, task % (s.dim // 8)),), 16, Q, (vt, part * s.part_heads + head),
                    task % (s.dim // 8) * 8,
                )  # fmt: skip
            else:
                for v in T.vectorized(4):
                    queries[s.piece(head, task % (s.dim // 8)) + v] = T.uint32(0)


@T.macro
def score(s, queries, values, scores, steps, low, high, words, acc, exchange, vx):
    """scores[half, h, r] = q_h . v_r over a half of the channels, in ascending order, in `steps` steps."""
    unit: T.let = vx // 32 % s.units
    tile: T.let = unit % s.head_tiles
    side: T.let = unit // s.head_tiles % s.halves
    group: T.let = unit // (s.head_tiles * s.halves)
    for i in s.each(s.row_tiles * 4):
        acc[i] = T.float32(0)
    for step in range(steps):
        for v in T.vectorized(4):
            low[v] = queries[s.piece(tile * 16 + vx % 32 // 4, (side * (s.steps // s.halves) + step) * 4 + vx % 4) + v]
        for v in T.vectorized(4):
            high[v] = queries[
                s.piece(tile * 16 + 8 + vx % 32 // 4, (side * (s.steps // s.halves) + step) * 4 + vx % 4) + v
            ]
        for j in s.each(s.row_tiles):
            for v in T.vectorized(4):
                words[v] = values[
                    s.piece(
                        (group * s.row_tiles + j) * 8 + vx % 32 // 4,
                        (side * (s.steps // s.halves) + step) * 4 + vx % 4,
                    ) + v
                ]  # fmt: skip
            for h in s.each(2):
                multiply(
                    s.mma, acc, j * 4, low[h * 2], high[h * 2], low[h * 2 + 1], high[h * 2 + 1], words[h * 2],
                    words[h * 2 + 1], exchange, vx,
                )  # fmt: skip
    if vx // 32 < s.units:
        for i in s.each(s.row_tiles * 4):
            scores[
                side, tile * 16 + i % 4 // 2 * 8 + vx % 32 // 4, (group * s.row_tiles + i // 4) * 8 + vx % 4 * 2 + i % 2
            ] = acc[i]


def _is_nan(x: Any) -> Any:
    return T.bitwise_and(f32_bits(x), T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000)


def _pair(low: Any, high: Any) -> Any:
    return T.bitwise_or(
        T.Cast("uint32", f32_to_bf16(low)), T.shift_left(T.Cast("uint32", f32_to_bf16(high)), T.uint32(16))
    )


@T.macro
def gather(s, scores, part, vx):
    """part = eight of the scores of a head, which four lanes share."""
    for c in s.each(8):
        part[c] = scores[0, vx // 4 % s.padded, vx % 4 * 8 + c]
    if s.halves == 2:
        for c in s.each(8):
            part[c] = part[c] + scores[1, vx // 4 % s.padded, vx % 4 * 8 + c]


@T.macro
def weigh(s, place, slot, weights, factor, top, total, part, words, exchange, vx):
    """weights[., h, r] = the bf16 parts of e^(s_r - top_h), s_r = dim^-0.5 * score; top and total take the tile in.

    `part` holds the lane's eight scores.

    Four lanes share a head. A factor of e^(old top - new top) brings what was summed before to the new top. Slots
    without a row weigh nothing; a NaN weighs NaN.
    """
    head: T.let = vx // 4 % s.padded
    top[1] = top[0]
    for c in s.each(8):
        part[c] = part[c] * T.float32(s.dim**-0.5)
        top[1] = T.max(
            top[1],
            T.Select(
                T.bitwise_or(_is_nan(part[c]), place[slot + vx % 4 * 8 + c] == T.int32(INVALID)), T.float32(LOWEST),
                part[c],
            ),
        )  # fmt: skip
    for m in range(2):
        from_lane(s.mma, top, 2, top[1], m + 1, exchange, vx)
        top[1] = T.max(top[1], top[2])
    total[1] = T.float32(0)
    for c in s.each(8):
        part[c] = T.Select(_is_nan(part[c]), T.reinterpret("float32", T.uint32(NAN_BITS)), exp(part[c] - top[1]))
        part[c] = T.Select(place[slot + vx % 4 * 8 + c] == T.int32(INVALID), T.float32(0), part[c])
        total[1] = total[1] + part[c]
    for m in range(2):
        from_lane(s.mma, total, 2, total[1], m + 1, exchange, vx)
        total[1] = total[1] + total[2]
    if vx % 4 == 0:
        factor[head] = exp(top[0] - top[1])
    total[0] = total[0] * exp(top[0] - top[1]) + total[1]
    top[0] = top[1]
    for w in s.each(s.weight_parts):
        for i in s.each(4):
            words[i] = _pair(part[i * 2], part[i * 2 + 1])
        memory.store_words(s.mma, words, 0, 4, weights, (), w * (s.padded * ROWS // 2) + s.weight_piece(head, vx % 4))
        for c in s.each(8):
            part[c] = part[c] - round_bf16(part[c])


@T.macro
def add(s, values, weights, factor, fragment, words, acc, exchange, vx):
    """acc[h, d] = acc[h, d] * factor_h + sum_r weights[., h, r] * values[r, d] for the warp's channels."""
    for t in s.each(s.head_tiles):
        for i in s.each(s.channel_tiles * 4):
            acc[t * s.channel_tiles * 4 + i] = (
                acc[t * s.channel_tiles * 4 + i] * factor[t * 16 + i % 4 // 2 * 8 + vx % 32 // 4]
            )
    for h in s.each(ROWS // 16):
        for t in s.each(s.weight_parts * s.head_tiles):
            load_matrices(
                s.mma, fragment, t * 4, False, weights,
                t // s.head_tiles * (s.padded * ROWS // 2)
                + s.weight_piece(t % s.head_tiles * 16 + vx % 16, h * 2 + vx % 32 // 16),
                exchange, vx,
            )  # fmt: skip
        for j in s.each(-(-s.channel_tiles // 2)):
            load_matrices(
                s.mma, words, 0, True, values,
                s.piece(
                    h * 16 + vx % 16, T.min(vx // 32 * s.channel_tiles + j * 2 + vx % 32 // 16, s.channels // 8 - 1)
                ),
                exchange, vx,
            )  # fmt: skip
            for i in s.each(min(2, s.channel_tiles)):
                for t in s.each(s.weight_parts * s.head_tiles):
                    multiply(
                        s.mma, acc, (t % s.head_tiles * s.channel_tiles + j * 2 + i) * 4, fragment[t * 4],
                        fragment[t * 4 + 1], fragment[t * 4 + 2], fragment[t * 4 + 3], words[i * 2], words[i * 2 + 1],
                        exchange, vx,
                    )  # fmt: skip


@T.macro
def finish(s, Out, sink, factor, top, total, acc, words, vt, part, channel, vx):
    """Out = bf16(acc / (total + e^(sink - top))), from `channel` on."""
    if vx % 4 == 0:
        factor[vx // 4 % s.padded] = total[0] + sink_weight(
            sink[T.min(part * s.part_heads + vx // 4 % s.padded, s.heads - 1)], top[0]
        )
    T.tvm_storage_sync("shared")
    for t in s.each(s.head_tiles):
        for h in s.each(2):
            head: T.let = t * 16 + h * 8 + vx % 32 // 4
            if head < s.part_heads and part * s.part_heads + head < s.heads:
                for j in s.each(s.channel_tiles):
                    if vx // 32 * s.channel_tiles + j < s.channels // 8:
                        words[0] = _pair(
                            acc[(t * s.channel_tiles + j) * 4 + h * 2] / factor[head],
                            acc[(t * s.channel_tiles + j) * 4 + h * 2 + 1] / factor[head],
                        )
                        memory.store_words(
                            s.mma, words, 0, 1, Out, (vt, part * s.part_heads + head),
                            channel + (vx // 32 * s.channel_tiles + j) * 8 + vx % 4 * 2,
                        )  # fmt: skip
