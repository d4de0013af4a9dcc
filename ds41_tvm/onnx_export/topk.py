"""Selection of the k best scores: equal ones in ascending position, hidden ones never."""

from __future__ import annotations

import numpy as np

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import HIDDEN, define


def select_best(k: int) -> Function:
    """Positions of the k best ranks of each row, int64 [batch, tokens, min(k, T)], ascending, then -1.

    ranks f32 [batch, tokens, T] from `rank_scores`. `TopK` takes the lowest index among equal values; its k is
    fixed, so a shorter axis is padded with hidden positions first and the result cut afterwards.
    """

    @define(
        f"SelectBest{k}",
        "ranks",
        "positions",
        f"Positions of the {k} best, ties to the lowest, ascending, then -1; at most as many as there are.",
    )
    def made(b: Body, ranks: str) -> str:
        length, most = b.size(ranks, 2), b.i64([k])
        missing = b.op("Max", b.op("Sub", most, length), b.i64([0]))
        pads = b.op("Concat", b.i64([0, 0, 0, 0, 0]), missing, axis=0)
        padded = b.op("Pad", ranks, pads, b.f32(HIDDEN))
        values, picks = b.ops("TopK", padded, most, outputs=2, axis=2)
        nowhere = b.i64(np.iinfo(np.int32).max)
        picks = b.op("Where", b.op("Greater", values, b.f32(HIDDEN)), picks, nowhere)
        ordered, _ = b.ops("TopK", picks, most, outputs=2, axis=2, largest=0)
        positions = b.op("Where", b.op("Equal", ordered, nowhere), b.i64(-1), ordered)
        return b.slice(positions, b.i64([0]), b.op("Min", length, most), 2)

    return made
