"""Linear layers of one tile of up to 16 rows on tensor cores: every weight is read once, straight into registers.

A block makes `columns` columns of a row tile. Its warps share out the chunks of inner indices; a lane holds the same
four pairs of a step of 32 inner indices in both operands, so that it reads 16 bytes of x and whole words of several
columns of w at a time: pair 4t + i of a step is inner pair t of the product's half i. See `linear_mma` for the order of
the sums, which is that of the program for many rows.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.linear_sizes import PAIRS, Sizes
from ds41_tvm.schedule.cuda.mma import exchange_shape, multiply


@T.macro
def _load_weights(s, W, scale, tile, column, step, lane, at, words, factors):
    """Registers of one step: four pairs of `s.wide` columns; of fp8 also the factors of its scale."""
    for i in s.each(4):
        memory.load_words(
            s.mma, words, (at * 4 + i) * s.words, s.words, W, (tile, step * PAIRS + lane % 4 * 4 + i),
            column + lane // 4 * s.wide,
        )  # fmt: skip
    if s.weight == "fp8":
        factors[at * 2] = memory.e8m0_factors(scale[(tile * s.tile + column) // 32, step])[0]
        factors[at * 2 + 1] = memory.e8m0_factors(scale[(tile * s.tile + column) // 32, step])[1]


def _pair(s: Sizes, words: Any, factors: Any, at: int | Any, i: int | Any, j: int) -> Any:
    """bf16 pair i of column j of step `at`."""
    if s.weight == "bf16":
        return words[(at * 4 + i) * s.words + j]
    codes = memory.e4m3_pair(s.mma, words[(at * 4 + i) * s.words + j // 2], j % 2)
    return memory.scale_pair(s.mma, codes, factors[at * 2], factors[at * 2 + 1])


@T.macro
def _load_rows(s, X, xs, vb, lane, base, step, at, low, high):
    """x of one step: rows g and g + 8 of the tile; a single row is row 0, and rows of zeros make up the tile."""
    if s.rows == 1:
        for i in T.unroll(4):
            low[at * 4 + i] = T.if_then_else(lane < 4, xs[step * PAIRS + lane % 4 * 4 + i], T.uint32(0))
            high[at * 4 + i] = T.uint32(0)
    else:
        memory.load_words(s.mma, low, at * 4, 4, X, (vb, lane // 4), base + step * 32 + lane % 4 * 8)
        memory.load_words(s.mma, high, at * 4, 4, X, (vb, lane // 4 + 8), base + step * 32 + lane % 4 * 8)


@T.macro
def _chunk(s, X, xs, W, scale, words, factors, low, high, acc, exchange, vb, tile, column, base, chunk, vx):
    """acc = the products of a chunk, for this thread's warp."""
    for i in T.unroll(s.wide * 4):
        acc[i] = T.float32(0)
    for o in range(s.steps // s.ahead):
        for u in s.each(s.ahead):
            _load_weights(s, W, scale, tile, column, chunk * s.steps + o * s.ahead + u, vx % 32, u, words, factors)
        memory.issue(s.mma)
        for u in s.each(s.ahead):
            _load_rows(s, X, xs, vb, vx % 32, base, chunk * s.steps + o * s.ahead + u, u, low, high)
        for u in s.each(s.ahead):
            for h in s.each(2):
                for j in s.each(s.wide):
                    multiply(
                        s.mma, acc, j * 4, low[u * 4 + h * 2], high[u * 4 + h * 2], low[u * 4 + h * 2 + 1],
                        high[u * 4 + h * 2 + 1], _pair(s, words, factors, u, h * 2, j),
                        _pair(s, words, factors, u, h * 2 + 1, j), exchange, vx,
                    )  # fmt: skip


@T.macro
def one_row(s, X, W, scale, Y, vj, vb, vx, m):
    xs = T.sblock_alloc_buffer((s.k // 2,), "uint32", scope="shared")
    part = T.sblock_alloc_buffer((s.chunks, s.columns), "float32", scope="shared")
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, s.warps), "uint32", scope="shared")
    words = T.sblock_alloc_buffer((max(4, s.ahead * 4 * s.words),), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((s.ahead * 2,), "uint32", scope="local")
    low = T.sblock_alloc_buffer((s.ahead * 4,), "uint32", scope="local")
    high = T.sblock_alloc_buffer((s.ahead * 4,), "uint32", scope="local")
    acc = T.sblock_alloc_buffer((s.wide * 4,), "float32", scope="local")
    tot = T.sblock_alloc_buffer((1,), s.total_type, scope="local")
    for o in range(-(-s.k // 8 // s.threads)):
        if o * s.threads + vx < s.k // 8:
            memory.load_words(
                s.mma, words, 0, 4, X, (vb, 0), vj * s.columns // s.per_group * s.k + (o * s.threads + vx) * 8
            )
            for i in T.vectorized(4):
                xs[(o * s.threads + vx) * 4 + i] = words[i]
    T.tvm_storage_sync("shared")
    for o in range(s.rounds):
        _chunk(
            s, X, xs, W, scale, words, factors, low, high, acc, exchange, vb, vj * s.columns // s.tile,
            vj * s.columns % s.tile, 0, o * s.warps + vx // 32, vx,
        )  # fmt: skip
        if vx % 32 < 4:
            for i in s.each(s.wide * 2):
                part[o * s.warps + vx // 32, (vx % 4 * 2 + i % 2) * s.wide + i // 2] = acc[i // 2 * 4 + i % 2]
    T.tvm_storage_sync("shared")
    if vx < s.columns:
        tot[0] = T.Cast(s.total_type, T.float32(0))
        for c in range(s.chunks):
            tot[0] = tot[0] + T.Cast(s.total_type, part[c, vx])
        Y[vb, 0, vj * s.columns + vx] = s.store(T.Cast("float32", tot[0]))


@T.macro
def row_tile(s, X, W, scale, Y, vj, vb, vx, m):
    part = T.sblock_alloc_buffer((s.warps, 16 * s.columns), "float32", scope="shared")
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, s.warps), "uint32", scope="shared")
    words = T.sblock_alloc_buffer((s.ahead * 4 * s.words,), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((s.ahead * 2,), "uint32", scope="local")
    low = T.sblock_alloc_buffer((s.ahead * 4,), "uint32", scope="local")
    high = T.sblock_alloc_buffer((s.ahead * 4,), "uint32", scope="local")
    acc = T.sblock_alloc_buffer((s.wide * 4,), "float32", scope="local")
    tot = T.sblock_alloc_buffer((s.shares,), s.total_type, scope="local")
    for i in T.unroll(s.shares):
        tot[i] = T.Cast(s.total_type, T.float32(0))
    for o in range(s.rounds):
        _chunk(
            s, X, None, W, scale, words, factors, low, high, acc, exchange, vb, vj * s.columns // s.tile,
            vj * s.columns % s.tile, vj * s.columns // s.per_group * s.k, o * s.warps + vx // 32, vx,
        )  # fmt: skip
        for i in s.each(s.wide * 4):
            part[
                vx // 32, (vx % 32 // 4 + i % 4 // 2 * 8) * s.columns + (vx % 4 * 2 + i % 2) * s.wide + i // 4
            ] = acc[i]
        T.tvm_storage_sync("shared")
        for i in s.each(s.shares):
            if i * s.threads + vx < 16 * s.columns:
                for w in range(s.warps):
                    tot[i] = tot[i] + T.Cast(s.total_type, part[w, i * s.threads + vx])
        T.tvm_storage_sync("shared")
    for i in s.each(s.shares):
        if i * s.threads + vx < 16 * s.columns:
            Y[vb, (i * s.threads + vx) // s.columns, vj * s.columns + (i * s.threads + vx) % s.columns] = s.store(
                T.Cast("float32", tot[i])
            )
