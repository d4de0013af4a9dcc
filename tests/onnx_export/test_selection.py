"""Scores, ranks, top-k and candidate blocks: the reference's choices, ties and hidden positions included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41_tvm.numerics import formats as f
from ds41_tvm.onnx_export import attention, candidates, indexer, topk
from ds41_tvm.onnx_export.formats import HIDDEN
from ds41_tvm.reference import candidates as ref_candidates
from ds41_tvm.reference import indexer as ref_indexer
from ds41_tvm.reference.topk import topk_lowest_index

Run = Callable[..., Any]
EVERYTHING = np.array(True)
BEST = {k: topk.select_best(k) for k in range(1, 10)}


def tied_scores(seed: int, rows: int, length: int, odd: bool = True) -> np.ndarray:
    """bf16 bits [rows, length] with many ties, zeros of both signs, and NaN and infinities if `odd`."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (rows, length)).astype(np.float32) / 2
    x[rng.random(x.shape) < 0.2] = -0.0
    if odd:
        for value in (np.nan, np.inf, -np.inf):
            x[rng.random(x.shape) < 0.03] = value
    return f.bf16_encode(x)


def expected_selection(scores: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    hidden = ref_indexer.hidden_positions(scores.shape[1], visible)
    return topk_lowest_index(ref_indexer.mask_scores(scores, hidden), k, hidden)


def pad(chosen: np.ndarray, k: int) -> np.ndarray:
    out = np.full((*chosen.shape[:-1], k), -1)
    out[..., : chosen.shape[-1]] = chosen
    return out


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 40])
def test_selection(run: Run, length: int) -> None:
    scores, visible = tied_scores(length, 12, length), np.arange(12) * length // 11
    ranks = run(indexer.rank_scores, f.bf16_decode(scores)[None], visible, EVERYTHING)
    got = run(topk.select_best(6), ranks)[0]
    assert got.shape == (12, min(6, length))
    np.testing.assert_array_equal(pad(got, 6), expected_selection(scores, visible, 6))


def test_zeros_of_both_signs_tie(run: Run) -> None:
    scores = np.array([[[-0.0, 0.0, -0.0, 0.0, -1.0, 0.0]]], np.float32)
    ranks = run(indexer.rank_scores, scores, np.array([6]), EVERYTHING)
    np.testing.assert_array_equal(run(topk.select_best(3), ranks), [[[0, 1, 2]]])


@given(st.integers(0, 2**32 - 1), st.integers(0, 70), st.integers(1, 9))
def test_any_selection(ort: Run, seed: int, length: int, k: int) -> None:
    scores = tied_scores(seed, 5, length)
    visible = np.random.default_rng(seed).integers(0, length + 1, 5)
    ranks = ort(indexer.rank_scores, f.bf16_decode(scores)[None], visible, EVERYTHING)
    got = ort(BEST[k], ranks)[0]
    np.testing.assert_array_equal(pad(got, k), expected_selection(scores, visible, k))


def test_a_visible_score_of_minus_infinity_is_the_last_choice(run: Run) -> None:
    bits = f.bf16_encode(np.float32([[-np.inf, -3.38e38, -np.inf, 1, 2]]))
    ranks = run(indexer.rank_scores, f.bf16_decode(bits)[None], np.array([3]), EVERYTHING)
    np.testing.assert_array_equal(run(topk.select_best(2), ranks), [[[0, 1]]])
    np.testing.assert_array_equal(run(topk.select_best(4), ranks), [[[0, 1, 2, -1]]])


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 50])
def test_candidate_blocks(run: Run, length: int, odd: bool) -> None:
    scores, visible = tied_scores(length, 10, length, odd), np.arange(10) * length // 9
    if odd and length:
        scores[5:, : length // 2] = 0xFF80  # whole blocks of -infinity
        scores[7:, -4:] = 0x7FC0
    masked = ref_indexer.mask_scores(scores, ref_indexer.hidden_positions(length, visible))
    blocks = ref_candidates.select_candidate_blocks(masked, visible, 3, 4)
    ranks = run(indexer.rank_scores, f.bf16_decode(scores)[None], visible, EVERYTHING)
    got = run(candidates.candidate_blocks(3, 4), ranks, visible)
    np.testing.assert_array_equal(pad(got[0], 3), blocks)
    inside = run(candidates.candidate_positions(4), got, np.array([length]))[0]
    np.testing.assert_array_equal(inside, ref_candidates.candidate_positions(blocks, 4, length))
    again = run(indexer.rank_scores, f.bf16_decode(scores)[None], visible, inside[None])
    np.testing.assert_array_equal(again[0] == HIDDEN, ref_indexer.hidden_positions(length, visible, inside))


@pytest.mark.parametrize("positions", [0, 1, 33])
def test_scores(run: Run, positions: int) -> None:
    from ds41_tvm.reference.quantize import round_trip

    rng = np.random.default_rng(9)
    q, keys, w = (
        f.bf16_encode(rng.standard_normal(shape).astype(np.float32)) for shape in ((6, 4, 64), (positions, 64), (6, 4))
    )
    q, keys = round_trip("index", q), round_trip("index", keys)
    q[3], keys[:1] = 0x7FC0, 0x7FC0  # NaN products count nothing
    w[4, 1] = 0x7FC0
    scaled = run(indexer.scale_weights(4, 64), f.bf16_decode(w)[None])
    expected = ref_indexer.scale_weights(w, 64)
    np.testing.assert_array_equal(scaled[0], f.bf16_decode(expected))
    got = run(indexer.index_scores(4), f.bf16_decode(q)[None], f.bf16_decode(keys)[None, None], scaled)
    np.testing.assert_array_equal(got[0], f.bf16_decode(ref_indexer.index_scores(q, keys, expected)))


def test_gathered_rows_and_rows_that_do_not_exist(run: Run) -> None:
    rows = np.arange(1, 2 * 5 * 3 + 1, dtype=np.uint8).reshape(2, 5, 3)
    selection = np.array([[[0, 4, -1], [-1, -1, -1]], [[2, 3, 4], [1, -1, -1]]], np.int64)
    picked, exists = run(attention.gather_selected, rows, selection)
    np.testing.assert_array_equal(exists, selection >= 0)
    for b, t, k in np.ndindex(*selection.shape):
        expected = rows[b, selection[b, t, k]] if selection[b, t, k] >= 0 else 0
        np.testing.assert_array_equal(picked[b, t, k], np.broadcast_to(expected, 3))
    # Two older rows and three tokens, windows of four.
    picked, exists = run(attention.gather_window(4), rows, np.zeros((2, 3, 1), np.float32))
    np.testing.assert_array_equal(exists, [[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    for t, j in np.ndindex(3, 4):
        expected = rows[0, t + j - 1] if t + j >= 1 else np.zeros(3)
        np.testing.assert_array_equal(picked[0, t, j], expected)
