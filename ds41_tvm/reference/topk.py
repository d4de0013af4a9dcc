"""Selection of the k best scores, under our own tie rule and under that of torch's CPU ``topk``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import F32
from ds41_tvm.reference.introselect import best_of_introselect, best_of_partial_sort

I32 = NDArray[np.int32]
Mask = NDArray[np.bool_]
Ties = Literal["lowest-index", "torch-cpu"]


def topk_lowest_index(scores: F32, k: int, hidden: Mask | None = None) -> I32:
    """Positions of the k best scores of each row, equal ones in ascending position, hidden ones never.

    scores float32 [n, T]; hidden bool [n, T], None: where the score is -infinity. A score may be -infinity without
    being hidden (a sum over heads that overflows): such a position is the last choice, but a choice, as in the
    official code. Result int32 [n, k], ascending, then -1. NaN ranks above every number, as in torch.
    """
    hidden = np.isneginf(scores) if hidden is None else hidden
    rank = np.where(np.isnan(scores), np.float32(np.inf), scores)
    # A NaN and an infinity tie in the rank; the key before it puts NaN first. Stable: equal keys stay ascending.
    order = np.lexsort((~np.isnan(scores), -rank, hidden), axis=-1)[:, :k]
    return ascending(np.where(np.take_along_axis(hidden, order, axis=-1), -1, order), k)


def topk_torch_cpu(scores: F32, k: int, hidden: Mask | None = None) -> I32:
    """Positions that ``torch.topk(scores, min(k, T))`` picks on the CPU, masked ones included.

    scores float32 [n, T]; `hidden` is not looked at; result int32 [n, k], ascending, then -1. torch (``TopKImpl.h``)
    takes libstdc++'s ``partial_sort`` where k * 64 <= T and its ``nth_element`` otherwise, ordering by "greater, NaN
    first".
    """
    n, length = scores.shape
    taken = min(k, length)
    picks = np.full((n, k), -1, np.int64)
    if taken:
        best = best_of_partial_sort if taken * 64 <= length else best_of_introselect
        for row in range(n):
            picks[row, :taken] = best(descending_rank(scores[row]), taken)
    return ascending(picks, k)


def descending_rank(values: F32) -> NDArray[np.int64]:
    """Integers, smaller for what torch orders first (NaN, then greater), the same for equal values."""
    keys = np.where(np.isnan(values), np.float32(-np.inf), -values)
    rank = np.unique(keys, return_inverse=True)[1].astype(np.int64) + 1
    return np.where(np.isnan(values), 0, rank)


def ascending(picks: NDArray[np.int64], k: int) -> I32:
    """Each row sorted, its -1 entries moved to the end, padded with -1 to k entries."""
    last = np.iinfo(np.int64).max
    rows = np.sort(np.where(picks < 0, last, picks), axis=-1)
    out = np.full((len(picks), k), -1, np.int32)
    out[:, : rows.shape[1]] = np.where(rows == last, -1, rows)
    return out


TOPK: dict[str, Callable[[F32, int, Mask | None], I32]] = {
    "lowest-index": topk_lowest_index,
    "torch-cpu": topk_torch_cpu,
}
