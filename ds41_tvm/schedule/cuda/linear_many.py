"""Linear layers of many rows on tensor cores: blocks of rows and columns out of shared memory.

Every step of 32 inner indices, x and w arrive in shared memory while the products of the steps before run; fp8 weights
pass through registers, where each is decoded once for the block. Fragments hold the pairs that `linear_one` gives them,
and the sums have the same order.

Shared memory, in words of two inner indices: x ``[stage, row, 16]``, of which a lane reads four at a time, w ``[stage,
tile, 16, column]`` with its 16-byte pieces swapped about so that the lanes of a warp meet different banks.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ds41_tvm.numerics.tir import f32_to_bf16
from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.linear_sizes import PAIRS, THREADS, Sizes
from ds41_tvm.schedule.cuda.mma import exchange_shape, multiply


def _piece(s: Sizes, pair: Any, piece: Any) -> Any:
    """Where 16-byte piece `piece` of row `pair` of a tile lies."""
    return T.bitwise_xor(piece, T.bitwise_and(pair // 4 * 2, s.tile // 4 - 1))


@T.macro
def _start_rows(s, X, xs, stage, step, first_row, base, vx, m):
    """Copy x of one step; rows past the last one repeat it."""
    for i in s.each(-(-s.block_rows * 4 // THREADS)):
        if i * THREADS + vx < s.block_rows * 4:
            memory.copy(
                s.mma, xs, (stage, (i * THREADS + vx) // 4, vx % 4 * 4), 16, X,
                (
                    T.min(first_row + (i * THREADS + vx) // 4, m * 16 - 1) // 16,
                    T.min(first_row + (i * THREADS + vx) // 4, m * 16 - 1) % 16,
                ),
                base + step * 32 + vx % 4 * 8,
            )  # fmt: skip


@T.macro
def _start_piece(s, W, ws, stage, step, tile, at):
    memory.copy(
        s.mma, ws,
        (
            stage, at // (PAIRS * s.tile // 4), at // (s.tile // 4) % PAIRS,
            _piece(s, at // (s.tile // 4) % PAIRS, at % (s.tile // 4)) * 4,
        ),
        16, W, (tile + at // (PAIRS * s.tile // 4), step * PAIRS + at // (s.tile // 4) % PAIRS), at % (s.tile // 4) * 4,
    )  # fmt: skip


@T.macro
def _start_weights(s, W, ws, stage, step, tile, vx):
    """Copy bf16 weights of one step."""
    for i in s.each(-(-s.warp_columns * PAIRS * s.tile // 4 // THREADS)):
        if i * THREADS + vx < s.warp_columns * PAIRS * s.tile // 4:
            _start_piece(s, W, ws, stage, step, tile, i * THREADS + vx)


@T.macro
def _load_codes(s, W, scale, codes, factors, step, tile, vx):
    """16 bytes of fp8 weights of one step, eight columns, into registers."""
    if vx < s.warp_columns * PAIRS * s.tile // 8:
        memory.load_words(
            s.mma, codes, 0, 4, W,
            (tile + vx // (PAIRS * s.tile // 8), step * PAIRS + vx // (s.tile // 8) % PAIRS), vx % (s.tile // 8) * 8,
        )  # fmt: skip
        factors[0] = memory.e8m0_factors(scale[(tile + vx // (PAIRS * s.tile // 8)) * s.tile // 32, step])[0]
        factors[1] = memory.e8m0_factors(scale[(tile + vx // (PAIRS * s.tile // 8)) * s.tile // 32, step])[1]


@T.macro
def _decode(s, codes, factors, words, ws, stage, vx):
    """The codes of `_load_codes`, decoded, to shared memory."""
    if vx < s.warp_columns * PAIRS * s.tile // 8:
        for i in s.each(8):
            words[i] = memory.scale_pair(s.mma, memory.e4m3_pair(s.mma, codes[i // 2], i % 2), factors[0], factors[1])
        for h in s.each(2):
            memory.store_words(
                s.mma, words, h * 4, 4, ws, (stage, vx // (PAIRS * s.tile // 8), vx // (s.tile // 8) % PAIRS),
                _piece(s, vx // (s.tile // 8) % PAIRS, vx % (s.tile // 8) * 2 + h) * 4,
            )  # fmt: skip


@T.macro
def _products(s, xs, ws, x_stage, w_stage, low, high, words, acc, exchange, vx):
    """acc += the products of one step."""
    for i in s.each(4):
        for v in T.vectorized(s.lane_columns):
            words[i * s.lane_columns + v] = ws[
                w_stage, vx // 32 % s.warp_columns, vx % 4 * 4 + i,
                _piece(s, vx % 4 * 4 + i, vx % 32 // 4 * s.lane_columns // 4) * 4
                + vx % 32 // 4 * s.lane_columns % 4 + v,
            ]  # fmt: skip
    for r in s.each(s.row_tiles):
        for v in T.vectorized(4):
            low[v] = xs[x_stage, (vx // 32 // s.warp_columns * s.row_tiles + r) * 16 + vx % 32 // 4, vx % 4 * 4 + v]
        for v in T.vectorized(4):
            high[v] = xs[
                x_stage, (vx // 32 // s.warp_columns * s.row_tiles + r) * 16 + vx % 32 // 4 + 8, vx % 4 * 4 + v
            ]
        for h in s.each(2):
            for j in s.each(s.lane_columns):
                multiply(
                    s.mma, acc, (r * s.lane_columns + j) * 4, low[h * 2], high[h * 2], low[h * 2 + 1], high[h * 2 + 1],
                    words[h * 2 * s.lane_columns + j], words[(h * 2 + 1) * s.lane_columns + j], exchange, vx,
                )  # fmt: skip


def _result(s: Sizes, tot: Any, r: Any, i: Any) -> Any:
    """Word i of the results of a lane's row r."""

    def value(column: Any) -> Any:
        at = (r // 2 * s.lane_columns + column % s.lane_columns) * 4 + r % 2 * 2 + column // s.lane_columns
        return T.Cast("float32", tot[at])

    if s.out == "f32":
        return T.reinterpret("uint32", value(i))
    low, high = (T.Cast("uint32", f32_to_bf16(value(i * 2 + c))) for c in (0, 1))
    return T.bitwise_or(low, T.shift_left(high, T.uint32(16)))


@T.macro
def _store(s, Y, tot, words, first_row, column, vx, m):
    """Each lane has 2 * lane_columns columns next to each other in rows g and g + 8 of its tiles."""
    for r in s.each(s.row_tiles * 2):
        if first_row + (vx // 32 // s.warp_columns * s.row_tiles * 2 + r) * 8 + vx % 32 // 4 < m * 16:
            for i in s.each(s.row_words):
                words[i] = _result(s, tot, r, i)
            for i in s.each(s.row_words // min(4, s.row_words)):
                memory.store_words(
                    s.mma, words, i * 4, min(4, s.row_words), Y,
                    (
                        (first_row + (vx // 32 // s.warp_columns * s.row_tiles * 2 + r) * 8) // 16,
                        (first_row + (vx // 32 // s.warp_columns * s.row_tiles * 2 + r) * 8) % 16 + vx % 32 // 4,
                    ),
                    column + (vx // 32 % s.warp_columns) * s.tile + vx % 4 * 2 * s.lane_columns + i * 4,
                )  # fmt: skip


@T.macro
def many_rows(s, X, W, scale, Y, vj, vb, vx, m):
    """The columns of block vj of the rows of block vb."""
    xs = T.sblock_alloc_buffer((s.stages, s.block_rows, PAIRS), "uint32", scope=s.shared)
    ws = T.sblock_alloc_buffer((s.weight_stages, s.warp_columns, PAIRS, s.tile), "uint32", scope=s.shared)
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, THREADS // 32), "uint32", scope="shared")
    codes = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((2,), "uint32", scope="local")
    words = T.sblock_alloc_buffer((4 * s.lane_columns,), "uint32", scope="local")
    low = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    high = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    acc = T.sblock_alloc_buffer((s.row_tiles * s.lane_columns * 4,), "float32", scope="local")
    tot = T.sblock_alloc_buffer((s.row_tiles * s.lane_columns * 4,), s.total_type, scope="local")
    first_row: T.let = vb * s.block_rows
    tile: T.let = vj * s.warp_columns
    base: T.let = tile * s.tile // s.per_group * s.k
    for p in s.each(s.stages - 1):
        if p < s.k // 32:
            _start_rows(s, X, xs, p, p, first_row, base, vx, m)
            if s.weight == "bf16":
                _start_weights(s, W, ws, p, p, tile, vx)
        memory.commit(s.mma)
    if s.weight == "fp8":
        _load_codes(s, W, scale, codes, factors, 0, tile, vx)
    for i in s.each(s.row_tiles * s.lane_columns * 4):
        tot[i] = T.Cast(s.total_type, T.float32(0))
    for c in range(s.chunks):
        for i in s.each(s.row_tiles * s.lane_columns * 4):
            acc[i] = T.float32(0)
        for st in range(s.steps):
            step: T.let = c * s.steps + st
            memory.wait(s.mma, s.stages - 2)
            if s.weight == "fp8":
                _decode(s, codes, factors, words, ws, step % 2, vx)
                if step + 1 < s.k // 32:
                    _load_codes(s, W, scale, codes, factors, step + 1, tile, vx)
            T.tvm_storage_sync("shared")
            if step + s.stages - 1 < s.k // 32:
                _start_rows(s, X, xs, (step + s.stages - 1) % s.stages, step + s.stages - 1, first_row, base, vx, m)
                if s.weight == "bf16":
                    _start_weights(s, W, ws, (step + s.stages - 1) % s.stages, step + s.stages - 1, tile, vx)
            memory.commit(s.mma)
            _products(s, xs, ws, step % s.stages, step % s.weight_stages, low, high, words, acc, exchange, vx)
        for i in s.each(s.row_tiles * s.lane_columns * 4):
            tot[i] = tot[i] + T.Cast(s.total_type, acc[i])
    _store(s, Y, tot, words, first_row, tile * s.tile, vx, m)
