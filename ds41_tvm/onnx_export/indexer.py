"""Indexer: how well each compressed position fits a query."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import HIDDEN, LARGEST, LOWEST, define, round_bf16


def scale_weights(heads: int, head_dim: int) -> Function:
    """w' = bf16(w * (head_dim^-0.5 * heads^-0.5)): [batch, tokens, heads]."""
    factor = np.float32(head_dim**-0.5 * heads**-0.5)

    @define("ScaleIndexWeights", "w", "y", "bf16(w * (index_head_dim^-0.5 * index_n_heads^-0.5)).")
    def made(b: Body, w: str) -> str:
        return b.call(round_bf16, b.op("Mul", w, b.f32(factor)))  # type: ignore[no-any-return]

    return made


def index_scores(heads: int) -> Function:
    """s[t, p] = bf16(sum_h bf16(bf16(relu(q_h . k_p)) * w_h)).

    q [batch, tokens, heads, D], keys [batch, 1, positions, D], w [batch, tokens, heads]; s [batch, tokens,
    positions]. Each block's dot product is a small integer times powers of two, so the f64 product is exact
    before its one rounding; the heads are summed in f32, in ascending order.
    """

    @define("IndexScores", "q keys w", "scores", "bf16(sum over heads of bf16(bf16(relu(q . k)) * w)), ascending.")
    def made(b: Body, q: str, keys: str, w: str) -> str:
        transposed = b.op("Transpose", b.cast(keys, TensorProto.DOUBLE), perm=[0, 1, 3, 2])
        product = b.op("MatMul", b.cast(q, TensorProto.DOUBLE), transposed)
        dot = b.call(round_bf16, b.cast(product, TensorProto.FLOAT))
        # Not Relu: what that does to NaN differs between engines; here it becomes 0.
        positive = b.op("Where", b.op("Greater", dot, b.f32(0)), dot, b.f32(0))
        weighted = b.call(round_bf16, b.op("Mul", positive, b.op("Unsqueeze", w, b.i64([3]))))
        by_head = b.ops("Split", weighted, b.i64([1] * heads), outputs=heads, axis=2)
        return b.call(round_bf16, b.op("Squeeze", b.op("Sum", *by_head), b.i64([2])))  # type: ignore[no-any-return]

    return made


@define(
    "RankScores",
    "scores visible allowed",
    "ranks",
    "Scores that order as the selection does: hidden ones the least number, -0 as 0, NaN above every number.",
)
def rank_scores(b: Body, scores: str, visible: str, allowed: str) -> str:
    """scores f32 [batch, tokens, T]; visible int64 [tokens]: how many; allowed bool, broadcast -> f32 like scores."""
    zero = b.f32(0)
    plain = b.op("Where", b.op("Equal", scores, zero), zero, scores)
    # Below and above every bf16 number; -infinity is the last choice, above what is hidden.
    finite = b.op("Clip", plain, b.f32(LOWEST), b.f32(LARGEST))
    ranks = b.op("Where", b.op("IsNaN", scores), b.f32(np.inf), finite)
    positions = b.arange(b.size(scores, 2))
    shown = b.op("Less", positions, b.op("Unsqueeze", visible, b.i64([1])))
    return b.op("Where", b.op("And", shown, allowed), ranks, b.f32(HIDDEN))


def visible_positions(ratio: int) -> Function:
    """(position + 1) // ratio: compressed positions whose whole group lies at or before a token: int64 [tokens]."""

    @define(f"Visible{ratio}", "positions", "count", f"(position + 1) // {ratio}: groups that a token sees whole.")
    def made(b: Body, positions: str) -> str:
        return b.op("Div", b.op("Add", positions, b.i64(1)), b.i64(ratio))

    return made
