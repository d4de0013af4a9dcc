"""Selection with ties by position, against a plain sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.topk import topk_lowest_index

SPECIAL = np.array([-np.inf, np.nan, np.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 2.0], np.float32)


def brute_force(s: np.ndarray, limit: int, k: int) -> list[int]:
    """NaN first, then greater, then ascending column; the first min(k, limit), ascending."""
    order = sorted(range(limit), key=lambda c: (not np.isnan(s[c]), 0 if np.isnan(s[c]) else -s[c], c))
    return sorted(order[: min(k, limit)])


def rows(width: int) -> np.ndarray:
    """bf16 bits: ties, special values, equal rows, near values of both signs, every exponent."""
    rng = np.random.default_rng(width)
    some = rng.choice(SPECIAL, size=(20, width))
    some[3:6] = [[0.0], [-0.0], [np.nan]]
    some[6, ::2], some[6, 1::2] = 0.0, -0.0
    near = rng.normal(size=(20, width)) * 2.0 ** rng.integers(-126, 126, size=(20, width))
    return np.concatenate(
        [
            bf16_encode(some),
            bf16_encode(near.astype(np.float32)),
            rng.integers(0, 1 << 16, size=(20, width)).astype(np.uint16),
            # One high byte: the second level decides alone.
            (0x3F00 + rng.integers(0, 256, size=(10, width))).astype(np.uint16),
        ]
    )


@pytest.mark.parametrize(("k", "widths"), [(1, [1, 7]), (5, [1, 4, 5, 6, 60]), (512, [64, 511, 512, 513, 900])])
def test_the_best_columns(call: Any, compiled: Any, k: int, widths: list[int]) -> None:
    for width in widths:
        s = rows(width)
        limit = np.random.default_rng(0).integers(0, width + 1, size=len(s)).astype(np.int32)
        limit[::2] = width
        limit[1] = 0
        got = call(compiled("topk_lowest_index", k=k, size=0), [s, limit], (len(s), k), np.int32)
        for t, values in enumerate(bf16_decode(s)):
            best = brute_force(values, int(limit[t]), k)
            assert got[t].tolist() == best + [-1] * (k - len(best)), (t, width)


@pytest.mark.parametrize("k", [5, 512])
def test_the_references_choice(call: Any, compiled: Any, k: int) -> None:
    s = rows(600)
    limit = np.random.default_rng(1).integers(0, 601, size=len(s)).astype(np.int32)
    got = call(compiled("topk_lowest_index", k=k, size=0), [s, limit], (len(s), k), np.int32)
    hidden = np.arange(600) >= limit[:, None]
    np.testing.assert_array_equal(got, topk_lowest_index(bf16_decode(s), k, hidden))


@pytest.mark.parametrize(("k", "size", "count"), [(5, 3, 4), (5, 3, 1), (24, 8, 70)])
def test_columns_of_candidate_blocks_become_positions(call: Any, compiled: Any, k: int, size: int, count: int) -> None:
    rng = np.random.default_rng(k)
    s = rows(count * size)
    blocks = np.sort(np.argsort(rng.random((len(s), 3 * count)), axis=1)[:, :count], axis=1).astype(np.int32)
    limit = rng.integers(0, count * size + 1, size=len(s)).astype(np.int32)
    for t in range(len(s)):
        blocks[t, -(-limit[t] // size) :] = -1
    function = compiled("topk_lowest_index", k=k, size=size)
    got = call(function, [s, limit, blocks], (len(s), k), np.int32)
    for t, values in enumerate(bf16_decode(s)):
        best = [blocks[t, c // size] * size + c % size for c in brute_force(values, int(limit[t]), k)]
        assert got[t].tolist() == best + [-1] * (k - len(best)), t


def test_no_rows(call: Any, compiled: Any) -> None:
    inputs = [np.zeros((0, 9), np.uint16), np.zeros(0, np.int32)]
    assert call(compiled("topk_lowest_index", k=5, size=0), inputs, (0, 5), np.int32).size == 0
