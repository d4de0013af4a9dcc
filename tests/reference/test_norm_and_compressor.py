"""RMSNorm and pooling against float64."""

from __future__ import annotations

import numpy as np

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.compressor import pool_groups
from ds41_tvm.reference.norm import rms_norm


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_norm_is_within_one_bf16_rounding_of_the_formula() -> None:
    x, w = bf16_encode(random(6, 96) * np.float32(7)), bf16_encode(1 + random(96, seed=1) * np.float32(0.1))
    wide = bf16_decode(x).astype(np.float64)
    expected = bf16_decode(w) * wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-20)
    np.testing.assert_allclose(bf16_decode(rms_norm(x, w, 1e-20)), expected, rtol=2**-8 * 1.001)


def test_norm_of_a_zero_row_is_zero() -> None:
    zero = np.zeros((1, 32), np.uint16)
    np.testing.assert_array_equal(rms_norm(zero, bf16_encode(np.ones(32, np.float32)), 1e-20), zero)


def test_eps_lies_inside_the_root() -> None:
    x = bf16_encode(np.full((1, 32), 2.0, np.float32))
    out = bf16_decode(rms_norm(x, bf16_encode(np.ones(32, np.float32)), 12.0))
    np.testing.assert_array_equal(out, np.full((1, 32), 0.5))


def test_norm_of_a_bad_row_leaves_the_others() -> None:
    x, w = bf16_encode(random(3, 32)), bf16_encode(np.ones(32, np.float32))
    good = rms_norm(x, w, 1e-20)
    x[1, 0] = 0x7F80
    got = rms_norm(x, w, 1e-20)
    np.testing.assert_array_equal(got[[0, 2]], good[[0, 2]])
    assert np.isnan(bf16_decode(got[1])).any()


def test_pooling_is_a_softmax_per_channel() -> None:
    kv, gate = random(4, 3, 32), random(4, 3, 32, seed=1) * np.float32(4)
    weight = np.exp(gate.astype(np.float64))
    expected = (kv * weight / weight.sum(1, keepdims=True)).sum(1)
    np.testing.assert_allclose(bf16_decode(pool_groups(kv, gate)), expected, rtol=2**-8 * 1.01, atol=1e-6)


def test_a_far_greater_gate_takes_all_without_overflow() -> None:
    kv = bf16_decode(bf16_encode(random(1, 2, 32)))
    gate = np.stack([np.full((1, 32), 3e38), np.full((1, 32), -3e38)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(pool_groups(kv, gate), bf16_encode(kv[:, 0]))


def test_one_member_is_itself() -> None:
    kv = random(2, 1, 32)
    np.testing.assert_array_equal(pool_groups(kv, random(2, 1, 32, seed=1)), bf16_encode(kv[:, 0]))


def test_no_group_completes() -> None:
    assert pool_groups(np.zeros((0, 2, 32), np.float32), np.zeros((0, 2, 32), np.float32)).shape == (0, 32)
