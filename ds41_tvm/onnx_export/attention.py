"""Attention over gathered rows, with a sink."""

from __future__ import annotations

import numpy as np

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import define, round_bf16


def gather_window(window: int) -> Function:
    """Each query's window rows: rows uint8 [batch, older + tokens, bytes], x [batch, tokens, ...] for its length.

    Gives rows uint8 [batch, tokens, window, bytes] and whether each exists, bool [tokens, window]. The query of
    token i takes rows older + i - window + 1 .. older + i; what would lie before the first is a row of zeros.
    """

    @define("GatherWindow", "rows x", "picked exists", f"The {window} newest rows up to each token's own.")
    def made(b: Body, rows: str, x: str) -> list[str]:
        total, tokens = b.size(rows, 1), b.size(x, 1)
        first = b.op("Sub", b.op("Sub", total, tokens), b.i64([window - 1]))
        query = b.op("Unsqueeze", b.op("Add", b.arange(tokens), first), b.i64([1]))
        places = b.op("Add", query, b.i64(np.arange(window)))
        exists = b.op("GreaterOrEqual", places, b.i64(0))
        with_zeros = b.op("Pad", rows, b.i64([0, 0, 0, 0, 1, 0]))
        picked = b.op("Gather", with_zeros, b.op("Where", exists, places, total), axis=1)
        return [picked, exists]

    return made


@define(
    "GatherSelected",
    "rows selection",
    "picked exists",
    "The selected rows of each query, and whether each exists (selection -1: no).",
)
def gather_selected(b: Body, rows: str, selection: str) -> list[str]:
    """rows uint8 [batch, n, bytes], selection int64 [batch, tokens, k] -> [batch, tokens, k, bytes], bool [.., k]."""
    exists = b.op("GreaterOrEqual", selection, b.i64(0))
    with_zeros = b.op("Pad", rows, b.i64([0, 0, 0, 0, 1, 0]))
    places = b.op("Where", exists, selection, b.size(rows, 1))
    picked = b.op("GatherND", with_zeros, b.op("Unsqueeze", places, b.i64([3])), batch_dims=1)
    return [picked, exists]


def sparse_attention(scale: float) -> Function:
    """o = bf16(sum_j e_j row_j / (sum_j e_j + exp(sink - m))), e_j = exp(s_j - m), s_j = q . row_j * scale.

    q [batch, tokens, heads, D]; rows f32 [batch, tokens, k, D], keys and values in one, zeros where `exists`
    bool [batch, tokens, k] is false; sink f32 [heads].
    """

    @define(
        "SparseAttention",
        "q rows exists sink",
        "o",
        "Softmax over each query's own rows plus the sink, which only adds to the denominator; f32, bf16 out.",
    )
    def made(b: Body, q: str, rows: str, exists: str, sink: str) -> str:
        product = b.op("MatMul", q, b.op("Transpose", rows, perm=[0, 1, 3, 2]))
        scaled = b.op("Mul", product, b.f32(np.float32(scale)))
        score = b.op("Where", b.op("Unsqueeze", exists, b.i64([2])), scaled, b.f32(-np.inf))
        top = b.reduce("ReduceMax", score, -1)
        e = b.op("Exp", b.op("Sub", score, top))
        rest = b.op("Exp", b.op("Sub", b.op("Unsqueeze", sink, b.i64([1])), top))
        total = b.op("Add", b.reduce("ReduceSum", e, -1), rest)
        return b.call(round_bf16, b.op("Div", b.op("MatMul", e, rows), total))  # type: ignore[no-any-return]

    return made
