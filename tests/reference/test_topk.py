"""Selection: our tie rule by brute force, torch's by what torch picked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds41_tvm.reference.topk import topk_lowest_index, topk_torch_cpu

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "numerics.npz")
SPECIAL = st.sampled_from([-np.inf, np.nan, np.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0])
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(0, 40)), elements=SPECIAL)


def recorded_rows() -> list[tuple[np.ndarray, int, np.ndarray]]:
    ends, picks = np.cumsum(GOLDEN["topk_len"]), np.cumsum(GOLDEN["topk_k"])
    values = np.split(GOLDEN["topk_vals"], ends[:-1])
    sets = np.split(GOLDEN["topk_set"], picks[:-1])
    return [(v, int(k), s) for v, k, s in zip(values, GOLDEN["topk_k"], sets, strict=True)]


@pytest.mark.parametrize("partial_sort", [False, True])
def test_torch_selections_are_the_recorded_ones(partial_sort: bool) -> None:
    rows = [row for row in recorded_rows() if (row[1] * 64 <= len(row[0])) == partial_sort]
    assert len(rows) >= 10
    for values, k, expected in rows:
        np.testing.assert_array_equal(topk_torch_cpu(values[None], k)[0], expected)


def test_recorded_rows_tell_the_tie_rules_apart() -> None:
    different = [row for row in recorded_rows() if (topk_lowest_index(row[0][None], row[1])[0] != row[2]).any()]
    assert len(different) >= 10


def test_introselect_that_runs_out_of_depth() -> None:
    """Values made to defeat the median of three, with ties around the cut; the set is torch 2.13's."""
    ramp = [-53 if i % 2 == 0 else -i for i in range(19)] + [-53] + [-2 * i for i in range(10)]
    values = np.array([*ramp, -53, -53, -53, -53, -54, -55, -56, -57, -58, -59], np.float32)
    expected = [1, 3, 5, 7, 9, *range(11, 18), *range(19, 34)]
    np.testing.assert_array_equal(topk_torch_cpu(values[None], 27)[0], expected)


def test_partial_sort_begins_where_k_times_64_is_the_length() -> None:
    """Ones at every fifth position; the sets are torch 2.13's, and each branch would give another."""
    scores = np.zeros((1, 128), np.float32)
    scores[0, 3::5] = 1
    np.testing.assert_array_equal(topk_torch_cpu(scores, 2), [[3, 8]])
    np.testing.assert_array_equal(topk_torch_cpu(scores[:, :127], 2), [[48, 58]])


@given(ROWS, st.integers(1, 45))
def test_torch_selections_hold_the_best_values(scores: np.ndarray, k: int) -> None:
    picks = topk_torch_cpu(scores, k)
    taken = min(k, scores.shape[1])
    for row, chosen in zip(scores, picks, strict=True):
        assert (np.diff(chosen[:taken]) > 0).all()
        assert (chosen[taken:] == -1).all()
        np.testing.assert_array_equal(np.sort(row[chosen[:taken]]), np.sort(row)[scores.shape[1] - taken :])


@given(ROWS, st.integers(1, 45))
def test_lowest_index_is_a_stable_sort_without_masked_positions(scores: np.ndarray, k: int) -> None:
    for row, chosen in zip(scores, topk_lowest_index(scores, k), strict=True):
        reachable = [p for p in range(len(row)) if row[p] != -np.inf]
        order = sorted(reachable, key=lambda p: (not np.isnan(row[p]), -row[p] if not np.isnan(row[p]) else 0, p))
        best = sorted(order[:k])
        assert chosen.tolist() == best + [-1] * (k - len(best))


def test_equal_scores_are_taken_in_ascending_position() -> None:
    scores = np.float32([[1, 2, 1, 2, 1, -np.inf, 1]])
    np.testing.assert_array_equal(topk_lowest_index(scores, 4), [[0, 1, 2, 3]])
    np.testing.assert_array_equal(topk_lowest_index(scores, 7), [[0, 1, 2, 3, 4, 6, -1]])


@pytest.mark.parametrize("rule", [topk_lowest_index, topk_torch_cpu])
def test_nothing_to_select_from(rule) -> None:
    np.testing.assert_array_equal(rule(np.zeros((2, 0), np.float32), 3), np.full((2, 3), -1))


def test_torch_lets_masked_picks_through() -> None:
    scores = np.float32([[-np.inf, 1, -np.inf, -np.inf]])
    assert (topk_torch_cpu(scores, 3)[0] >= 0).all()
    np.testing.assert_array_equal(topk_lowest_index(scores, 3), [[1, -1, -1]])


def test_minus_infinity_that_is_not_hidden_is_the_last_choice() -> None:
    scores = np.float32([[-np.inf, 1, -np.inf, np.nan, 5]])
    hidden = np.array([[False, False, False, False, True]])
    np.testing.assert_array_equal(topk_lowest_index(scores, 3, hidden), [[0, 1, 3]])
    np.testing.assert_array_equal(topk_lowest_index(scores, 5, hidden), [[0, 1, 2, 3, -1]])
