"""Candidate blocks by brute force, and the edges: short last block, nothing visible, few blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41_tvm.reference.candidates import candidate_positions, select_candidate_blocks


def brute_force(scores: np.ndarray, visible: int, topk_blocks: int, size: int) -> list[int]:
    blocks = range(-(-len(scores) // size))
    reachable = [b for b in blocks if b * size < visible and max(scores[b * size : (b + 1) * size]) > -np.inf]
    newest = (visible - 1) // size
    order = sorted(reachable, key=lambda b: (b != newest, -max(scores[b * size : (b + 1) * size]), b))
    kept = sorted(order[:topk_blocks])
    return kept + [-1] * (topk_blocks - len(kept))


@given(st.data())
def test_blocks_are_those_of_a_plain_sort(data: st.DataObject) -> None:
    length, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    topk_blocks = data.draw(st.integers(1, 12))
    values = np.array(data.draw(st.lists(st.integers(-2, 3), min_size=2 * length, max_size=2 * length)), np.float32)
    visible = np.array(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2)))
    scores = np.where(np.arange(length) < visible[:, None], values.reshape(2, length), -np.inf).astype(np.float32)
    kept = select_candidate_blocks(scores, visible, topk_blocks, size)
    for row in range(2):
        assert kept[row].tolist() == brute_force(scores[row], int(visible[row]), topk_blocks, size)


@pytest.mark.parametrize("ties", ["lowest-index", "torch-cpu"])
def test_the_newest_block_stays_though_its_scores_are_worst(ties) -> None:
    scores = np.float32([[5, 5, 4, 4, 3, -9, -np.inf]])
    np.testing.assert_array_equal(select_candidate_blocks(scores, np.array([6]), 2, 2, ties), [[0, 2]])


@pytest.mark.parametrize("ties", ["lowest-index", "torch-cpu"])
def test_blocks_with_nothing_visible_are_dropped(ties) -> None:
    scores = np.full((2, 7), -np.inf, np.float32)
    scores[1, 0] = 1.0
    kept = select_candidate_blocks(scores, np.array([0, 1]), 3, 2, ties)
    np.testing.assert_array_equal(kept, [[-1, -1, -1], [0, -1, -1]])


def test_no_positions_at_all() -> None:
    kept = select_candidate_blocks(np.zeros((2, 0), np.float32), np.array([0, 0]), 3, 2)
    np.testing.assert_array_equal(kept, np.full((2, 3), -1))
    assert candidate_positions(kept, 2, 0).shape == (2, 0)


def test_positions_of_blocks_cover_a_short_last_block() -> None:
    inside = candidate_positions(np.int32([[0, 2, -1], [-1, -1, -1]]), 3, 7)
    np.testing.assert_array_equal(inside, [[1, 1, 1, 0, 0, 0, 1], [0] * 7])


def test_a_nan_block_comes_before_the_newest() -> None:
    scores = np.float32([[1, np.nan, 2, 2, 0, 0]])
    np.testing.assert_array_equal(select_candidate_blocks(scores, np.array([6]), 1, 2), [[0]])
    np.testing.assert_array_equal(select_candidate_blocks(scores, np.array([6]), 2, 2), [[0, 2]])


@pytest.mark.parametrize("ties", ["lowest-index", "torch-cpu"])
def test_a_visible_block_of_minus_infinities_is_the_last_choice(ties) -> None:
    scores = np.float32([[-np.inf, -np.inf, 1, 1, 2, -np.inf, -np.inf, -np.inf]])
    np.testing.assert_array_equal(select_candidate_blocks(scores, np.array([5]), 2, 2, ties), [[1, 2]])
    np.testing.assert_array_equal(select_candidate_blocks(scores, np.array([5]), 4, 2, ties), [[0, 1, 2, -1]])
