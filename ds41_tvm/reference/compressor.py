"""Compressor: `ratio` consecutive tokens become one latent row."""

from __future__ import annotations

import numpy as np

from ds41_tvm.numerics.formats import F32, U16, bf16_encode


def pool_groups(kv: F32, gate: F32) -> U16:
    """y[g, d] = bf16(sum_m softmax_m(gate[g, m, d]) * kv[g, m, d]) over the members m of a group.

    kv, gate float32 [groups, ratio, D]; y bf16 bits [groups, D]. float32 inside; members by position.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        weight = np.exp(gate - gate.max(1, keepdims=True))
    weight = weight / _sum_members(weight)[:, None]
    return bf16_encode(_sum_members(kv * weight))


def _sum_members(x: F32) -> F32:
    total = x[:, 0]
    for member in range(1, x.shape[1]):
        total = total + x[:, member]
    return total
