"""Sparse attention against a plain softmax in float64, and its edges."""

from __future__ import annotations

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.attention import sparse_attention, window_indices

HEADS, DIM, ROWS = 3, 32, 20
SCALE = DIM**-0.5


@pytest.fixture
def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    q = bf16_encode(rng.normal(size=(4, HEADS, DIM)).astype(np.float32) * np.float32(2))
    rows = bf16_encode(rng.normal(size=(ROWS, DIM)).astype(np.float32))
    return q, rows, rng.normal(size=HEADS).astype(np.float32)


def expected(q: np.ndarray, rows: np.ndarray, chosen: list[int], sink: np.ndarray) -> np.ndarray:
    query, kv = bf16_decode(q).astype(np.float64), bf16_decode(rows[chosen]).astype(np.float64)
    logits = np.concatenate([query @ kv.T * SCALE, sink[:, None].astype(np.float64)], axis=1)
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    out: np.ndarray = weight[:, :-1] @ kv
    return out


def test_the_sink_takes_weight_and_gives_no_value(operands) -> None:
    q, rows, sink = operands
    idx = np.int32([[0, 3, 7, -1], [-1, 5, -1, 19], [2, -1, -1, -1], [1, 2, 3, 4]])
    got = bf16_decode(sparse_attention(q, rows, idx, sink, SCALE))
    for t in range(4):
        chosen = [int(i) for i in idx[t] if i >= 0]
        np.testing.assert_allclose(got[t], expected(q[t], rows, chosen, sink), rtol=2**-8, atol=1e-6)


def test_a_query_with_no_row_gives_zeros(operands) -> None:
    q, rows, sink = operands
    out = sparse_attention(q, rows, np.full((4, 5), -1, np.int32), sink, SCALE)
    np.testing.assert_array_equal(out, np.zeros_like(q))


def test_extreme_sinks(operands) -> None:
    q, rows, _ = operands
    idx = np.tile(np.int32([0, 1]), (4, 1))
    none = sparse_attention(q, rows, idx, np.full(HEADS, -np.inf, np.float32), SCALE)
    weights = expected(q[0], rows, [0, 1], np.full(HEADS, -1e30))
    np.testing.assert_allclose(bf16_decode(none)[0], weights, rtol=2**-8, atol=1e-6)
    everything = sparse_attention(q, rows, idx, np.full(HEADS, 1e30, np.float32), SCALE)
    assert not bf16_decode(everything).any()


def test_where_the_empty_entries_stand_does_not_matter(operands) -> None:
    q, rows, sink = operands
    packed = sparse_attention(q, rows, np.tile(np.int32([4, 9, -1, -1]), (4, 1)), sink, SCALE)
    spread = sparse_attention(q, rows, np.tile(np.int32([-1, 4, -1, 9]), (4, 1)), sink, SCALE)
    np.testing.assert_array_equal(packed, spread)


def test_a_nan_row_spoils_the_queries_that_take_it_only(operands) -> None:
    q, rows, sink = operands
    idx = np.int32([[0, 1], [2, 3], [0, 2], [1, 3]])
    good = sparse_attention(q, rows, idx, sink, SCALE)
    rows = rows.copy()
    rows[0] = 0x7FC0
    got = sparse_attention(q, rows, idx, sink, SCALE)
    np.testing.assert_array_equal(got[[1, 3]], good[[1, 3]])
    assert np.isnan(bf16_decode(got[[0, 2]])).all()


def test_window_rows_are_the_last_positions_before_and_with_the_query() -> None:
    np.testing.assert_array_equal(window_indices(np.arange(3), 4, 0), [[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, 0, 1, 2]])
    np.testing.assert_array_equal(window_indices(np.array([9, 10]), 3, 7), [[0, 1, 2], [1, 2, 3]])
