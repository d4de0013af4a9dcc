"""Index scores against exact integer arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.indexer import hidden_positions, index_scores, mask_scores, scale_weights
from ds41_tvm.reference.quantize import round_trip


def bf16(x: float) -> np.float32:
    return np.float32(bf16_decode(bf16_encode(np.float32([x])))[0])


@pytest.fixture
def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    q = round_trip("index", bf16_encode(rng.normal(size=(3, 5, 64)).astype(np.float32) * np.float32(3)))
    keys = round_trip("index", bf16_encode(rng.normal(size=(11, 64)).astype(np.float32)))
    w = bf16_encode(rng.normal(size=(3, 5)).astype(np.float32))
    return q, keys, w


def test_scores_round_an_exact_product_per_head_then_sum_in_f32(operands) -> None:
    q, keys, w = operands
    got = index_scores(q, keys, w)
    query, key, weight = bf16_decode(q), bf16_decode(keys), bf16_decode(w)
    for t in range(3):
        for p in range(11):
            total = np.float32(0)
            for h in range(5):
                pairs = zip(query[t, h].tolist(), key[p].tolist(), strict=True)
                dot = float(sum(Fraction(a) * Fraction(b) for a, b in pairs))
                total = np.float32(total + bf16(np.float32(max(bf16(dot), 0)) * weight[t, h]))
            assert got[t, p] == bf16_encode(np.float32([total]))[0]


def test_negative_products_count_nothing(operands) -> None:
    q, keys, w = operands
    opposite = index_scores(q ^ np.uint16(0x8000), keys, w)
    both = (bf16_decode(index_scores(q, keys, w)) != 0) & (bf16_decode(opposite) != 0)
    one_head = (
        index_scores(q[:, :1], keys, w[:, :1]),
        index_scores(q[:, :1] ^ np.uint16(0x8000), keys, w[:, :1]),
    )
    assert both.any()
    assert not ((bf16_decode(one_head[0]) != 0) & (bf16_decode(one_head[1]) != 0)).any()


def test_weights_are_scaled_in_f32_and_rounded_once() -> None:
    w = bf16_encode(np.float32([[1.0, -3.0]]))
    factor = np.float32(32**-0.5 * 2**-0.5)
    np.testing.assert_array_equal(scale_weights(w, 32), bf16_encode(np.float32([[1.0, -3.0]]) * factor))


def test_mask_hides_positions_not_visible_and_not_allowed() -> None:
    scores = bf16_encode(np.float32([[1, 2, 3], [4, 5, 6]]))
    allowed = np.array([[True, True, True], [False, True, True]])
    hidden = hidden_positions(3, np.array([1, 2]), allowed)
    np.testing.assert_array_equal(hidden, [[False, True, True], [True, False, True]])
    np.testing.assert_array_equal(mask_scores(scores, hidden), [[1, -np.inf, -np.inf], [-np.inf, 5, -np.inf]])
    everything = hidden_positions(3, np.array([3, 0]))
    np.testing.assert_array_equal(mask_scores(scores, everything), [[1, 2, 3], [-np.inf] * 3])


def test_products_that_are_nan_count_nothing(operands) -> None:
    q, keys, w = operands
    good = index_scores(q, keys, w)
    q, keys = q.copy(), keys.copy()
    q[1] = 0x7FC0
    keys[2] = 0x7FC0
    got = index_scores(q, keys, w)
    np.testing.assert_array_equal(got[1], 0)
    np.testing.assert_array_equal(got[:, 2], 0)
    rest = np.arange(len(keys)) != 2
    np.testing.assert_array_equal(got[[0, 2]][:, rest], good[[0, 2]][:, rest])


def test_a_nan_weight_spoils_its_own_scores_only(operands) -> None:
    q, keys, w = operands
    good = index_scores(q, keys, w)
    w = w.copy()
    w[1, 0] = 0x7FC0
    got = index_scores(q, keys, w)
    assert np.isnan(bf16_decode(got[1])).all()
    np.testing.assert_array_equal(got[[0, 2]], good[[0, 2]])
