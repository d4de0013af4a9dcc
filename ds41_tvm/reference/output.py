"""Output projection: the grouped ``wo_a``; ``wo_b`` is a plain linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import U16
from ds41_tvm.reference.linear import Accumulate, linear


def output_groups(o: U16, wo_a: NDArray[Any], groups: int, accumulate: Accumulate = "f64") -> U16:
    """y[t, g * rank + r] = bf16(sum_k wo_a[g * rank + r, k] * o_g[t, k]), o_g the g-th run of heads.

    o bf16 bits [n, heads, D], already rotated back; wo_a bf16 bits [groups * rank, heads * D / groups]
    (``o_groups``, ``o_lora_rank``); y bf16 bits [n, groups * rank].
    """
    grouped = o.reshape(len(o), groups, -1)
    parts = wo_a.reshape(groups, -1, wo_a.shape[-1])
    return np.concatenate([linear(grouped[:, g], parts[g], accumulate) for g in range(groups)], axis=-1)
