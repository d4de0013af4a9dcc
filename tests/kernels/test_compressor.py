"""Pooling of groups whose members lie in the step, in the ring, or in both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode


@pytest.mark.parametrize("ratio", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [32, 96])
def test_softmax_over_the_members(call: Any, compiled: Any, ratio: int, dim: int) -> None:
    """Against float64, rounded once. Rows that are no member of a group are NaN."""
    rng = np.random.default_rng(ratio)
    groups, fresh, old = 40, 260, 170
    kv, gate = (np.full((fresh, dim), np.nan, np.float32) for _ in range(2))
    ring = np.full((old, 2, dim), np.nan, np.float32)
    rows = np.concatenate([rng.permutation(fresh)[: groups * ratio - 60], -1 - rng.permutation(old)[:60]])
    member = rng.permutation(rows).reshape(groups, ratio)
    k, g = 2 * rng.normal(size=(groups, ratio, dim)), 4 * rng.normal(size=(groups, ratio, dim))
    g[0], g[1, 0], g[2] = 0.0, 80.0, -50.0
    k, g = k.astype(np.float32), g.astype(np.float32)
    kv[member[member >= 0]], gate[member[member >= 0]] = k[member >= 0], g[member >= 0]
    ring[-1 - member[member < 0], 0], ring[-1 - member[member < 0], 1] = k[member < 0], g[member < 0]
    got = bf16_decode(
        call(compiled("pool_groups", dim=dim, ratio=ratio), [kv, gate, ring, member], (groups, dim), np.uint16)
    )
    weight = np.exp(g.astype(np.float64) - g.max(1, keepdims=True))
    weight /= weight.sum(1, keepdims=True)
    exact = (k * weight).sum(1)
    half_step = np.ldexp(1.0, np.frexp(np.maximum(abs(exact), 1e-30))[1] - 9)
    assert (abs(got - exact) <= half_step + 2.0**-21 * (abs(k) * weight).sum(1)).all()


def test_no_groups(call: Any, compiled: Any) -> None:
    kv = np.zeros((3, 32), np.float32)
    inputs = [kv, kv, np.zeros((8, 2, 32), np.float32), np.zeros((0, 2), np.int64)]
    assert call(compiled("pool_groups", dim=32, ratio=2), inputs, (0, 32), np.uint16).size == 0


def test_a_bad_group_stays_alone(call: Any, compiled: Any) -> None:
    rng = np.random.default_rng(0)
    kv, gate = (rng.normal(size=(12, 32)).astype(np.float32) for _ in range(2))
    inputs = [kv, gate, np.zeros((4, 2, 32), np.float32), np.arange(12).reshape(4, 3)]
    function = compiled("pool_groups", dim=32, ratio=3)
    good = call(function, inputs, (4, 32), np.uint16)
    kv[4], gate[5, 7] = np.nan, np.inf
    got = call(function, inputs, (4, 32), np.uint16)
    np.testing.assert_array_equal(got[[0, 2, 3]], good[[0, 2, 3]])
    assert np.isnan(bf16_decode(got[1])).all()
