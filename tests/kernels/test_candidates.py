"""Scores of candidate blocks by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.candidates import select_candidate_blocks

VALUES = [-np.inf, np.nan, np.inf, -2.0, -0.0, 0.0, 0.5, 0.5, 3.0]


def block_scores(s: np.ndarray, visible: np.ndarray, size: int, blocks: int) -> np.ndarray:
    """float32 [n, blocks]; NaN above infinity, the newest visible block at infinity."""
    out = np.full((len(s), blocks), -np.inf, np.float32)
    for t, seen in enumerate(visible):
        for b in range(blocks):
            inside = s[t, b * size : min((b + 1) * size, seen)]
            if len(inside):
                out[t, b] = np.nan if np.isnan(inside).any() else inside.max()
        if seen:
            out[t, (seen - 1) // size] = np.inf
    return out


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("width", [1, 8, 25, 512])
def test_the_best_of_each_block(call: Any, compiled: Any, size: int, width: int) -> None:
    rng = np.random.default_rng(size * width)
    s = rng.choice(np.array(VALUES, np.float32), size=(60, width))
    s[20:40] = rng.normal(size=(20, width))
    s[40:45] = -1.0  # everything ties
    visible = rng.integers(0, width + 1, size=60).astype(np.int32)
    visible[:3] = 0, width, 1
    blocks = -(-width // size)
    bits = bf16_encode(s)
    hidden = np.arange(width) >= visible[:, None]
    bits[hidden] = 0x7FC0  # a hidden score is never read
    got = call(compiled("block_scores", size=size), [bits, visible], (60, blocks), np.uint16)
    np.testing.assert_array_equal(bf16_decode(got), block_scores(bf16_decode(bf16_encode(s)), visible, size, blocks))


@pytest.mark.parametrize(("k", "size"), [(3, 3), (6, 8), (40, 3)])
def test_with_top_k_it_is_the_references_choice(call: Any, compiled: Any, k: int, size: int) -> None:
    """Also where more blocks are wanted than exist, and where visible scores are NaN or infinite."""
    rng = np.random.default_rng(k)
    width = 64
    s = bf16_encode(rng.choice([-1.0, 0.0, -0.0, 0.5, 2.0], size=(50, width)).astype(np.float32))
    s[20:40] = bf16_encode(rng.choice(np.array(VALUES, np.float32), size=(20, width)))
    s[30:, : width // 2] = 0xFF80
    visible = rng.integers(0, width + 1, size=50).astype(np.int32)
    blocks = -(-width // size)
    best = call(compiled("block_scores", size=size), [s, visible], (50, blocks), np.uint16)
    limit = -(-visible // size).astype(np.int32)
    got = call(compiled("topk_lowest_index", k=k, size=0), [best, limit.astype(np.int32)], (50, k), np.int32)
    masked = np.where(np.arange(width) < visible[:, None], bf16_decode(s), np.float32(-np.inf))
    np.testing.assert_array_equal(got, select_candidate_blocks(masked, visible.astype(np.int64), k, size))
