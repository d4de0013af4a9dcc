"""Indexer: how well each compressed position fits a query."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import F32, U16, bf16_decode, bf16_encode


def scale_weights(w: U16, head_dim: int) -> U16:
    """w' = bf16(w * (head_dim^-0.5 * heads^-0.5)): bf16 bits [n, heads] -> bf16 bits [n, heads]."""
    factor = np.float32(head_dim**-0.5 * w.shape[-1] ** -0.5)
    return bf16_encode(bf16_decode(w) * factor)


def index_scores(q: U16, keys: U16, w: U16) -> U16:
    """s[t, p] = bf16(sum_h bf16(bf16(relu(q_h . k_p)) * w_h)), the sum over heads in float32, ascending.

    q bf16 bits [n, heads, D], keys bf16 bits [T, D], both already through fp4; w bf16 bits [n, heads] from
    `scale_weights`; s bf16 bits [n, T], nothing masked. Each block's dot product is a small integer times
    powers of two, so the float64 product is exact before its one rounding. relu(NaN) is 0: a bad key (stored as
    NaN) does not put itself into every later selection, as it does in the official code.
    """
    n, heads, _ = q.shape
    query, key = bf16_decode(q).astype(np.float64), bf16_decode(keys).astype(np.float64)
    weight = bf16_decode(w)
    total: F32 = np.zeros((n, len(keys)), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for head in range(heads):
            dot = _round((query[:, head] @ key.T).astype(np.float32))
            total = total + _round(np.fmax(dot, np.float32(0)) * weight[:, head, None])
    return bf16_encode(total)


def hidden_positions(
    count: int, visible: NDArray[np.int64], allowed: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """bool [n, count]: positions p >= visible[t], and those where `allowed` [n, count] is false."""
    hidden: NDArray[np.bool_] = np.arange(count) >= visible[:, None]
    return hidden if allowed is None else hidden | ~allowed


def mask_scores(scores: U16, hidden: NDArray[np.bool_]) -> F32:
    """float32 [n, T]: the score, -infinity where hidden."""
    return np.where(hidden, np.float32(-np.inf), bf16_decode(scores))


def _round(x: F32) -> F32:
    return bf16_decode(bf16_encode(x))
