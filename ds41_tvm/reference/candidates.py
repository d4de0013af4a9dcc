"""Candidate blocks: the parts of the context to which later indexers are restricted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import F32
from ds41_tvm.reference.topk import I32, TOPK, Ties, ascending


def select_candidate_blocks(
    scores: F32, visible: NDArray[np.int64], topk_blocks: int, block_size: int, ties: Ties = "lowest-index"
) -> I32:
    """Block numbers kept for each query: int32 [n, topk_blocks], ascending, then -1.

    scores float32 [n, T], -infinity at positions >= visible[t]; visible [n] positions each query may see. A
    block scores the best of its `block_size` positions (the last block may be short). The block of the newest
    visible position is always kept; then the best ones; blocks with nothing visible never. (The official code
    tells these by a score of -infinity, and so drops a visible block too if all its scores overflow to that.)
    """
    n, length = scores.shape
    blocks = -(-length // block_size)
    padded = np.full((n, blocks * block_size), -np.inf, np.float32)
    padded[:, :length] = scores
    best = padded.reshape(n, blocks, block_size).max(-1) if blocks else padded
    newest = (visible - 1) // block_size  # -1, no block at all, where nothing is visible
    best[np.arange(blocks) == newest[:, None]] = np.inf
    hidden = np.arange(blocks) > newest[:, None]
    picks = TOPK[ties](best, min(topk_blocks, blocks), hidden)
    # torch picks masked blocks too where fewer than topk_blocks are visible; those are dropped here.
    picks[picks > newest[:, None]] = -1
    return ascending(picks.astype(np.int64), topk_blocks)


def candidate_positions(blocks: I32, block_size: int, length: int) -> NDArray[np.bool_]:
    """bool [n, length]: which positions lie in the blocks [n, c] that `select_candidate_blocks` kept."""
    count = -(-length // block_size)
    inside = np.zeros((len(blocks), count + 1), bool)  # the last column takes the -1 entries
    np.put_along_axis(inside, blocks.astype(np.int64), True, axis=-1)
    return np.repeat(inside[:, :count], block_size, axis=-1)[:, :length]
