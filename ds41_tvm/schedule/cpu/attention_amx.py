"""Sparse attention on AMX tiles, with the precision of f32.

Its own program, because a tile register cannot be reached by scheduling the plain kernel. Decoded rows and queries are
bf16 values, so the scores are exact products summed in f32. The attention weights are f32: each is written as the sum
of three bf16 values (8 + 8 + 8 bits, exact), and the output adds the three products.

Layouts: rows bf16 ``[row, channel]`` for the scores and, in pairs, uint32 ``[row / 2, channel]`` for the output;
queries bf16 ``[channel / 2, head, 2]``; scores f32 ``[row, head]``, then ``[head, row]``; weights bf16 ``[part, head,
row]``. Rows are padded to whole steps of 32 with zeros of weight zero.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.attention import LOWEST, sink_weight
from ds41_tvm.kernels.expr import exp
from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16
from ds41_tvm.schedule.cpu import amx
from ds41_tvm.schedule.cpu.gather import Sizes, gathered_attention

STEP, PAIRS, SIDE = amx.STEP, amx.PAIRS, amx.SIDE


def sparse_attention_amx(sizes: Sizes, *, columns: int | None = None) -> PrimFunc:
    """As `kernels.attention.sparse_attention`. `columns`: output tiles that share a load of weights."""
    if columns is None:
        columns = 4 if sizes.dim % (SIDE * 4) == 0 else 2
    capacity = -(-(sizes.window + sizes.k) // STEP) * STEP
    constants = (sizes.dim, sizes.task_heads, sizes.padded, capacity, columns)
    spare = capacity - sizes.window - sizes.k
    return gathered_attention(sizes, sizes.dim, True, spare, _attend, constants)


@T.macro
def _pair_rows(rows, pairs, count, steps, dim):
    """Zero the padding rows, then pairs[r, d] = rows 2r (low half) and 2r + 1 (high half)."""
    for r in range(steps * T.int64(STEP) - count):
        for d in range(dim // 32):
            for i in T.vectorized(32):
                rows[0, count + r, d * 32 + i] = T.uint16(0)
    for r in range(steps * T.int64(PAIRS)):
        for d in range(dim // 16):
            for i in T.vectorized(16):
                pairs[r, d * 16 + i] = T.bitwise_or(
                    T.Cast("uint32", rows[0, r * 2, d * 16 + i]),
                    T.shift_left(T.Cast("uint32", rows[0, r * 2 + 1, d * 16 + i]), T.uint32(16)),
                )


@T.macro
def _load_queries(Q, vt, first_head, query, dim, heads, padded):
    """query[c, h] = channels 2c and 2c + 1 of head h; heads that pad the last tile are zero."""
    for c in range(dim // 2):
        for h in range(padded):
            for i in T.unroll(2):
                query[c, h, i] = T.if_then_else(
                    h < heads, Q[vt, first_head + T.min(h, heads - 1), c * 2 + i], T.uint16(0)
                )


@T.macro
def _scores(rows, query, score, steps, dim, padded):
    """score[r, h] = sum_d rows[r, d] * query[d, h]: two tiles of rows by one of heads at a time."""
    for r, h in T.grid(steps, padded // SIDE):
        amx.clear(2)
        for c in range(dim // STEP):
            T.evaluate(amx.load(6, query, (c * PAIRS * padded + h * SIDE) * 2, padded * 4))
            for i in T.unroll(2):
                T.evaluate(amx.load(4 + i, rows, (r * T.int64(STEP) + i * SIDE) * dim + c * STEP, dim * 2))
            for i in T.unroll(2):
                T.evaluate(amx.multiply(i, 4 + i, 6))
        for i in T.unroll(2):
            T.evaluate(amx.store(i, score, (r * T.int64(STEP) + i * SIDE) * padded + h * SIDE, padded * 4))


@T.macro
def _softmax(score, by_head, weight, total, lanes, sink, first_head, count, steps, dim, heads, padded, capacity):
    """weight[:, h, r] = the three parts of e^(s - top), s = dim^-0.5 * score; total[h] their sum and the sink's term.

    Sums over rows: 16 interleaved partial sums, then these in ascending order.
    """
    for h in range(heads):
        for r in range(count):
            by_head[r] = score[r, h] * T.float32(dim**-0.5)
        for r in range(steps * T.int64(STEP) - count):
            by_head[count + r] = T.float32(LOWEST)
        for i in T.vectorized(16):
            lanes[i] = T.float32(LOWEST)
        for r in range(steps * 2):
            for i in T.vectorized(16):
                lanes[i] = T.max(lanes[i], by_head[r * 16 + i])
        total[padded] = T.float32(LOWEST)
        for i in range(16):
            total[padded] = T.max(total[padded], lanes[i])
        for i in T.vectorized(16):
            lanes[i] = T.float32(0)
        for r in range(steps * 2):
            for i in T.vectorized(16):
                # e^(LOWEST - top) is not zero but tiny: padding must weigh nothing.
                by_head[r * 16 + i] = T.Select(
                    by_head[r * 16 + i] > T.float32(LOWEST), exp(by_head[r * 16 + i] - total[padded]), T.float32(0)
                )
            for i in T.vectorized(16):
                lanes[i] = lanes[i] + by_head[r * 16 + i]
            for i in T.vectorized(16):
                weight[h, r * 16 + i] = f32_to_bf16(by_head[r * 16 + i])
            for i in T.vectorized(16):
                by_head[r * 16 + i] = by_head[r * 16 + i] - bf16_to_f32(weight[h, r * 16 + i])
            for i in T.vectorized(16):
                weight[padded + h, r * 16 + i] = f32_to_bf16(by_head[r * 16 + i])
            for i in T.vectorized(16):
                weight[padded * 2 + h, r * 16 + i] = f32_to_bf16(
                    by_head[r * 16 + i] - bf16_to_f32(weight[padded + h, r * 16 + i])
                )
        total[h] = sink_weight(sink[first_head + h], total[padded])
        for i in range(16):
            total[h] = total[h] + lanes[i]


@T.macro
def _output(pairs, weight, part, total, Out, vt, first_head, steps, dim, heads, padded, capacity, columns):
    """Out[h, d] = bf16(sum_r weight[h, r] * rows[r, d] / total[h]): one tile of heads by `columns` of channels at a
    time.
    """
    for h, d in T.grid(padded // SIDE, dim // (SIDE * columns)):
        amx.clear(columns)
        for r in range(steps):
            for i in T.unroll(3):
                T.evaluate(
                    amx.load(4 + i, weight, (padded * i + h * SIDE) * capacity + r * T.int64(STEP), capacity * 2)
                )
            for c in T.unroll(columns):
                T.evaluate(amx.load(7, pairs, r * T.int64(PAIRS * dim) + (d * columns + c) * SIDE, dim * 4))
                for i in T.unroll(3):
                    T.evaluate(amx.multiply(c, 4 + i, 7))
        for c in T.unroll(columns):
            T.evaluate(amx.store(c, part, c * SIDE, columns * SIDE * 4))
        for i in range(SIDE):
            if h * SIDE + i < heads:
                for lane in T.vectorized(SIDE * columns):
                    Out[vt, first_head + h * SIDE + i, d * (SIDE * columns) + lane] = f32_to_bf16(
                        part[i, lane] / total[h * SIDE + i]
                    )


@T.macro
def _attend(Q, Out, sink, vt, first_head, rows, count, constants):
    setup = T.sblock_alloc_buffer((64,), "uint8", scope="local")
    pairs = T.sblock_alloc_buffer((constants[3] // 2, constants[0]), "uint32")
    # uint16 like the buffers that may take its memory later: access pointers must not meet another type there.
    query = T.sblock_alloc_buffer((constants[0] // 2, constants[2], 2), "uint16")
    score = T.sblock_alloc_buffer((constants[3], constants[2]), "float32")
    by_head = T.sblock_alloc_buffer((constants[3],), "float32")
    weight = T.sblock_alloc_buffer((3 * constants[2], constants[3]), "uint16")
    total = T.sblock_alloc_buffer((constants[2] + 1,), "float32")  # the last one: the greatest score of a head
    lanes = T.sblock_alloc_buffer((16,), "float32", scope="local")
    part = T.sblock_alloc_buffer((SIDE, SIDE * constants[4]), "float32", scope="local")
    steps: T.let = (count + T.int64(STEP - 1)) // T.int64(STEP)
    _pair_rows(rows, pairs, count, steps, constants[0])
    _load_queries(Q, vt, first_head, query, constants[0], constants[1], constants[2])
    amx.configure(setup, SIDE, 0)
    _scores(rows, query, score, steps, constants[0], constants[2])
    _softmax(
        score, by_head, weight, total, lanes, sink, first_head, count, steps, constants[0], constants[1], constants[2],
        constants[3],
    )  # fmt: skip
    _output(
        pairs, weight, part, total, Out, vt, first_head, steps, constants[0], constants[1], constants[2], constants[3],
        constants[4],
    )  # fmt: skip
    T.evaluate(amx.op("tilerelease"))
