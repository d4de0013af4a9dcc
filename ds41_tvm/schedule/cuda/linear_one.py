"""Linear layers of one row on tensor cores: every weight is read once, straight into registers.

A block makes `columns` columns of a row; its warps share out the chunks of inner indices. The row is row 0 of a product
whose other rows are zero: reading the weights is what takes time. A lane holds four pairs of a step of 32 inner indices
in both operands, so that it reads 16 bytes of x and whole words of several columns of w at a time: pair 4t + i of a
step is inner pair t of half i % 2 of the step's product i // 2. See `linear_mma` for the order of the sums.
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


def _pair(s: Sizes, words: Any, factors: Any, at: Any, i: Any, j: Any) -> Any:
    """bf16 pair i of column j of step `at`."""
    if s.weight == "bf16":
        return words[(at * 4 + i) * s.words + j]
    codes = memory.e4m3_pair(s.mma, words[(at * 4 + i) * s.words + j // 2], j % 2)
    return memory.scale_pair(s.mma, codes, factors[at * 2], factors[at * 2 + 1])


@T.macro
def _chunk(s, xs, W, scale, words, factors, row, acc, exchange, tile, column, chunk, vx):
    """acc = the products of a chunk, for this thread's warp."""
    for i in s.each(s.wide * 4):
        acc[i] = T.float32(0)
    for o in range(s.steps // s.ahead):
        for u in s.each(s.ahead):
            _load_weights(s, W, scale, tile, column, chunk * s.steps + o * s.ahead + u, vx % 32, u, words, factors)
        memory.issue(s.mma)
        for u in s.each(s.ahead):
            for i in s.each(4):
                row[u * 4 + i] = T.if_then_else(
                    vx % 32 < 4, xs[(chunk * s.steps + o * s.ahead + u) * PAIRS + vx % 4 * 4 + i], T.uint32(0)
                )
        for u in s.each(s.ahead):
            for h in s.each(2):
                for j in s.each(s.wide):
                    multiply(
                        s.mma, acc, j * 4, row[u * 4 + h * 2], T.uint32(0), row[u * 4 + h * 2 + 1], T.uint32(0),
                        _pair(s, words, factors, u, h * 2, j), _pair(s, words, factors, u, h * 2 + 1, j), exchange, vx,
                    )  # fmt: skip


@T.macro
def one_row(s, X, W, scale, Y, vj, vb, vx, m):
    """The columns of block vj of row vb."""
    xs = T.sblock_alloc_buffer((s.k // 2,), "uint32", scope="shared")
    part = T.sblock_alloc_buffer((s.chunks, s.columns), "float32", scope="shared")
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, s.warps), "uint32", scope="shared")
    words = T.sblock_alloc_buffer((max(4, s.ahead * 4 * s.words),), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((s.ahead * 2,), "uint32", scope="local")
    row = T.sblock_alloc_buffer((s.ahead * 4,), "uint32", scope="local")
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
            s, xs, W, scale, words, factors, row, acc, exchange, vj * s.columns // s.tile, vj * s.columns % s.tile,
            o * s.warps + vx // 32, vx,
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
