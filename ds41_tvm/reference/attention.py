"""Attention over selected rows, with a sink."""

from __future__ import annotations

import numpy as np

from ds41_tvm.numerics.formats import F32, U16, bf16_decode, bf16_encode
from ds41_tvm.reference.topk import I32


def sparse_attention(q: U16, rows: U16, idx: I32, sink: F32, scale: float) -> U16:
    """o = bf16(sum_j e_j * rows_j / (sum_j e_j + exp(sink - m))) over the chosen rows j.

    s_j = q . rows_j * scale, m = max_j s_j, e_j = exp(s_j - m).

    q bf16 bits [n, heads, D]; rows bf16 bits [r, D], keys and values in one; idx int32 [n, k] into rows, -1 =
    none; sink float32 [heads]; o bf16 bits [n, heads, D]. float32, products accumulated in float64; a query
    with no row gives zeros (official ``sparse_attn``).
    """
    values = bf16_decode(rows).astype(np.float64)
    out = np.zeros(q.shape, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for t, chosen in enumerate(idx):
            kv = values[chosen[chosen >= 0]]
            if not len(kv):
                continue
            score = (bf16_decode(q[t]).astype(np.float64) @ kv.T).astype(np.float32) * np.float32(scale)
            top = score.max(-1, keepdims=True)
            e = np.exp(score - top)
            total = e.sum(-1, dtype=np.float64).astype(np.float32) + np.exp(sink - top[:, 0])
            out[t] = (e.astype(np.float64) @ kv).astype(np.float32) / total[:, None]
    return bf16_encode(out)


def window_indices(positions: np.ndarray, window: int, first: int) -> I32:
    """Rows of each query's sliding window, positions max(0, t - window + 1) .. t: int32 [n, window].

    `first` is the position of row 0; -1 in front where the window reaches before position 0.
    """
    reach = np.asarray(positions, np.int64)[:, None] - window + 1 + np.arange(window)
    return np.where(reach >= 0, reach - first, -1).astype(np.int32)
