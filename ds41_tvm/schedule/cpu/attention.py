"""Sparse attention with vector registers: two register-tiled products over the gathered rows.

Its own program, because the plain kernel decodes a row inside every dot product. All work goes by panels of channels,
so that what a product uses again and again stays in the first-level cache: a panel of the queries (pairs of channels
``[channel / 2, head]``, or f32 ``[channel, head]``) while all rows pass by it for the scores, and a few rows of a panel
while all heads use them for the output. A vector holds 16 heads in the scores and in the softmax, 16 channels in the
output, so no sum runs across a vector and every sum is taken in ascending order: channels in the scores, rows in the
softmax and the output.

Rows and queries are bf16 values. The scores are fused multiply-adds of their f32 forms, or dot products of pairs where
the processor has them; the weights of the output are f32, so its products are fused multiply-adds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.attention import LOWEST, sink_weight
from ds41_tvm.kernels.expr import exp, half
from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16
from ds41_tvm.schedule.cpu.dot import IMPORT, SOURCE, dot
from ds41_tvm.schedule.cpu.gather import Sizes, gathered_attention

SIDE = 16  # vector of 16 words; a square of them is transposed in registers
STAGES = 4  # log2(SIDE)
# Lanes of a tile by form: tiles of 6 x 64 and 4 x 64 fill 32 registers of 512 bits, 6 x 16 fill 16 of 256.
MOST = {"dot": 64, "avx512": 64, "fma": 16}


class Plan(NamedTuple):
    """Sizes of a task; channels of a `panel`; its tiles: `rows` x `wide` accumulators of scores (6 x 64 are 24 of 32
    vector registers), `heads` x `lanes` of outputs; `block` rows of a panel that the output takes at a time.
    """

    dim: int
    task_heads: int
    padded: int
    capacity: int
    pairs: bool
    panel: int
    rows: int
    wide: int
    heads: int
    lanes: int
    block: int

    @property
    def scored(self) -> int:
        """Heads of the scores' buffer: the output reads whole tiles of heads."""
        return -(-self.padded // self.heads) * self.heads

    @property
    def steps(self) -> int:
        """Rows of a panel of queries: pairs of channels, or channels."""
        return self.panel // 2 if self.pairs else self.panel

    @property
    def query_type(self) -> str:
        """Type of a query's word."""
        return "uint32" if self.pairs else "float32"


def sparse_attention_vector(
    sizes: Sizes, form: str, *, rows: int = 6, wide: int | None = None, heads: int | None = None,
    lanes: int | None = None, block: int = 32,
) -> PrimFunc:  # fmt: skip
    """As `kernels.attention.sparse_attention`; `form`: dot (``avx512bf16``), avx512 or fma; knobs as in `Plan`."""
    most, pairs = MOST[form], form == "dot"
    panel = 64 if sizes.dim % 64 == 0 else 32
    wide = wide or next(t for t in (64, 32, 16) if sizes.padded % t == 0 and t <= most)
    heads = heads or (4 if most == 64 else 6)
    capacity = sizes.window + sizes.k + rows
    plan = Plan(
        sizes.dim, sizes.task_heads, sizes.padded, capacity, pairs, panel, rows, wide, heads,
        lanes or min(most, panel), block,
    )  # fmt: skip
    return gathered_attention(sizes, plan.panel, form != "fma", rows, _attend, plan)


# ---- queries


def _interleave(a: Any, b: Any, part: int) -> Any:
    """a[8p], b[8p], a[8p + 1], b[8p + 1], ... for p = `part`."""
    return tirx.Shuffle(
        [a, b], [tirx.IntImm("int32", i + SIDE * side) for i in range(8 * part, 8 * part + 8) for side in (0, 1)]
    )


def _pairs_of(Q: Any, token: Any, head: Any, first: Any) -> Any:
    """Channels first..first + 31 of a head as 16 pairs."""
    return T.reinterpret("uint32x16", Q[token, head, T.ramp(first, 1, 2 * SIDE)])


@T.macro
def _transpose(square):
    """square[0][i, j] -> square[0][j, i]: rows i and i + 8 interleaved, four times over."""
    for stage in T.unroll(STAGES):
        for i in T.unroll(SIDE // 2):
            for part in T.unroll(2):
                square[(stage + 1) % 2, i * 2 + part, T.ramp(0, 1, SIDE)] = T.Select(
                    part == 0,
                    _interleave(
                        square[stage % 2, i, T.ramp(0, 1, SIDE)], square[stage % 2, i + 8, T.ramp(0, 1, SIDE)], 0
                    ),
                    _interleave(
                        square[stage % 2, i, T.ramp(0, 1, SIDE)], square[stage % 2, i + 8, T.ramp(0, 1, SIDE)], 1
                    ),
                )


@T.macro
def _load_queries(Q, vt, first_head, query, plan):
    """query[p, c, h] = channels 2c and 2c + 1 of panel p, or channel c; heads beyond the last repeat it."""
    square = T.sblock_alloc_buffer((2, SIDE, SIDE), "uint32", scope="local")
    for b, g in T.grid(plan.dim // (2 * SIDE), plan.padded // SIDE):
        for i in T.unroll(SIDE):
            square[0, i, T.ramp(0, 1, SIDE)] = _pairs_of(
                Q, vt, first_head + T.min(g * SIDE + i, plan.task_heads - 1), b * 2 * SIDE
            )
        _transpose(square)
        if plan.pairs:
            for c in T.unroll(SIDE):
                for lane in T.vectorized(SIDE):
                    query[b * SIDE // plan.steps, b * SIDE % plan.steps + c, g * SIDE + lane] = square[0, c, lane]
        else:
            for c in T.unroll(2 * SIDE):
                for lane in T.vectorized(SIDE):
                    query[b * 2 * SIDE // plan.steps, b * 2 * SIDE % plan.steps + c, g * SIDE + lane] = half(
                        square[0, c // 2, lane], c
                    )


# ---- scores


@T.macro
def _products(rows, query, tile, p, r, c, plan):
    """tile[i, h] += row r * plan.rows + i of panel p times the queries of heads c * plan.wide + h."""
    if plan.pairs:
        for d in range(plan.steps):
            for i in T.unroll(plan.rows):
                for v in T.unroll(plan.wide // SIDE):
                    tile[i, T.ramp(v * SIDE, 1, SIDE)] = dot(
                        tile[i, T.ramp(v * SIDE, 1, SIDE)],
                        T.broadcast(
                            T.reinterpret("uint32", rows[p, r * T.int64(plan.rows) + i, T.ramp(d * 2, 1, 2)]), SIDE
                        ),
                        query[p, d, T.ramp(c * plan.wide + v * SIDE, 1, SIDE)],
                    )
    else:
        row = T.sblock_alloc_buffer((plan.rows, plan.panel), "float32")
        for i in range(plan.rows):
            for d in T.vectorized(plan.panel):
                row[i, d] = bf16_to_f32(rows[p, r * T.int64(plan.rows) + i, d])
        for d in range(plan.steps):
            for i in T.unroll(plan.rows):
                for h in T.vectorized(plan.wide):
                    tile[i, h] = tile[i, h] + row[i, d] * query[p, d, c * plan.wide + h]


@T.macro
def _scores(rows, query, score, count, plan):
    """score[r, h] = sum_d rows[r, d] * query[d, h], a tile of `rows` x `wide` of a panel at a time."""
    tile = T.sblock_alloc_buffer((plan.rows, plan.wide), "float32", scope="local")
    for c, p in T.grid(plan.padded // plan.wide, plan.dim // plan.panel):
        for r in range((count + T.int64(plan.rows - 1)) // T.int64(plan.rows)):
            if p == 0:
                for i in T.unroll(plan.rows):
                    for h in T.vectorized(plan.wide):
                        tile[i, h] = T.float32(0)
            else:
                for i in T.unroll(plan.rows):
                    for h in T.vectorized(plan.wide):
                        tile[i, h] = score[r * T.int64(plan.rows) + i, c * plan.wide + h]
            _products(rows, query, tile, p, r, c, plan)
            for i in T.unroll(plan.rows):
                for h in T.vectorized(plan.wide):
                    score[r * T.int64(plan.rows) + i, c * plan.wide + h] = tile[i, h]


@T.macro
def _softmax(score, total, sink, first_head, count, plan):
    """s = dim^-0.5 * score; score becomes e^(s - top), total its sum plus the sink's term. 16 heads at a time."""
    top = T.sblock_alloc_buffer((SIDE,), "float32", scope="local")
    for c in range(plan.padded // SIDE):
        for lane in T.vectorized(SIDE):
            top[lane] = T.float32(LOWEST)
        for r in range(count):
            for lane in T.vectorized(SIDE):
                score[r, c * SIDE + lane] = score[r, c * SIDE + lane] * T.float32(plan.dim**-0.5)
            for lane in T.vectorized(SIDE):
                top[lane] = T.max(top[lane], score[r, c * SIDE + lane])
        for lane in T.vectorized(SIDE):
            total[c * SIDE + lane] = T.float32(0)
        for r in range(count):
            for lane in T.vectorized(SIDE):
                score[r, c * SIDE + lane] = exp(score[r, c * SIDE + lane] - top[lane])
            for lane in T.vectorized(SIDE):
                total[c * SIDE + lane] = total[c * SIDE + lane] + score[r, c * SIDE + lane]
        for lane in range(SIDE):
            if c * SIDE + lane < plan.task_heads:
                total[c * SIDE + lane] = total[c * SIDE + lane] + sink_weight(
                    sink[first_head + c * SIDE + lane], top[lane]
                )


# ---- output


@T.macro
def _add_block(block, score, sums, first, high, plan):
    """sums[h, d] += sum of score[first + r, h] * block[r, d] over the `high` rows of a block."""
    tile = T.sblock_alloc_buffer((plan.heads, plan.lanes), "float32", scope="local")
    for d, g in T.grid(plan.panel // plan.lanes, (plan.task_heads + plan.heads - 1) // plan.heads):
        for i in T.unroll(plan.heads):
            for lane in T.vectorized(plan.lanes):
                tile[i, lane] = sums[g * plan.heads + i, d * plan.lanes + lane]
        for r in range(high):
            for i in T.unroll(plan.heads):
                for lane in T.vectorized(plan.lanes):
                    tile[i, lane] = (
                        tile[i, lane] + score[first + r, g * plan.heads + i] * block[r, d * plan.lanes + lane]
                    )
        for i in T.unroll(plan.heads):
            for lane in T.vectorized(plan.lanes):
                sums[g * plan.heads + i, d * plan.lanes + lane] = tile[i, lane]


@T.macro
def _output(rows, score, total, Out, vt, first_head, count, plan):
    """Out[h, d] = bf16(sum_r score[r, h] * rows[r, d] / total[h]), a panel at a time."""
    sums = T.sblock_alloc_buffer((plan.scored, plan.panel), "float32")
    block = T.sblock_alloc_buffer((plan.block, plan.panel), "float32")
    for p in range(plan.dim // plan.panel):
        for h in range(plan.scored):
            for lane in T.vectorized(plan.panel):
                sums[h, lane] = T.float32(0)
        for b in range((count + T.int64(plan.block - 1)) // T.int64(plan.block)):
            first: T.let = b * T.int64(plan.block)
            high: T.let = T.min(count - first, T.int64(plan.block))
            for r in range(high):
                for lane in T.vectorized(plan.panel):
                    block[r, lane] = bf16_to_f32(rows[p, first + r, lane])
            _add_block(block, score, sums, first, high, plan)
        for h in range(plan.task_heads):
            for lane in T.vectorized(plan.panel):
                Out[vt, first_head + h, p * plan.panel + lane] = f32_to_bf16(sums[h, lane] / total[h])


@T.macro
def _attend(Q, Out, sink, vt, first_head, rows, count, plan):
    query = T.sblock_alloc_buffer((plan.dim // plan.panel, plan.steps, plan.padded), plan.query_type)
    score = T.sblock_alloc_buffer((plan.capacity, plan.scored), "float32")
    total = T.sblock_alloc_buffer((plan.padded,), "float32")
    with T.attr(T.int32(0), IMPORT, SOURCE if plan.pairs else ""):
        _load_queries(Q, vt, first_head, query, plan)
        _scores(rows, query, score, count, plan)
        _softmax(score, total, sink, first_head, count, plan)
        _output(rows, score, total, Out, vt, first_head, count, plan)
