"""Selection as torch's CPU topk makes it: what torch picked, and the NumPy repetition of its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.topk import topk_torch_cpu

SPECIAL = np.array([-np.inf, np.nan, np.inf, -1.0, -0.0, 0.0, 0.5, 1.0], np.float32)


def select(call: Any, native: Any, s: np.ndarray, k: int, total: Any = None, limit: Any = None) -> np.ndarray:
    n, width = s.shape
    total = np.full(n, width, np.int32) if total is None else np.asarray(total, np.int32)
    limit = total if limit is None else np.asarray(limit, np.int32)
    return call(native("topk_torch_cpu", k=k), [s, total, limit], (n, k), np.int32)


@pytest.mark.parametrize("k", [1, 2, 3, 6, 24, 64, 512])
def test_recorded_selections(call: Any, native: Any, numerics: Any, k: int) -> None:
    ends, picks = np.cumsum(numerics["topk_len"]), np.cumsum(numerics["topk_k"])
    values, sets = np.split(numerics["topk_vals"], ends[:-1]), np.split(numerics["topk_set"], picks[:-1])
    mine = [i for i, wanted in enumerate(numerics["topk_k"]) if wanted == k]
    assert mine
    for i in mine:
        bits = bf16_encode(values[i][None])
        np.testing.assert_array_equal(bf16_decode(bits)[0], values[i])  # the recorded scores are bf16
        np.testing.assert_array_equal(select(call, native, bits, k)[0], sets[i], err_msg=f"row {i}")


def test_introselect_that_runs_out_of_depth(call: Any, native: Any) -> None:
    """Values made to defeat the median of three, with ties around the cut; the set is torch 2.13's."""
    ramp = [-53 if i % 2 == 0 else -i for i in range(19)] + [-53] + [-2 * i for i in range(10)]
    values = np.array([*ramp, -53, -53, -53, -53, -54, -55, -56, -57, -58, -59], np.float32)
    expected = [1, 3, 5, 7, 9, *range(11, 18), *range(19, 34)]
    np.testing.assert_array_equal(select(call, native, bf16_encode(values[None]), 27)[0], expected)


def test_the_branch_changes_where_k_times_64_is_the_length(call: Any, native: Any) -> None:
    scores = np.zeros((1, 128), np.float32)
    scores[0, 3::5] = 1
    bits = bf16_encode(scores)
    np.testing.assert_array_equal(select(call, native, bits, 2), [[3, 8]])
    np.testing.assert_array_equal(select(call, native, bits[:, :127], 2), [[48, 58]])


@pytest.mark.parametrize("k", [1, 2, 6, 27])
@pytest.mark.parametrize("width", [1, 3, 6, 40, 128, 400])
def test_rows_full_of_ties(call: Any, native: Any, k: int, width: int) -> None:
    """Heap select and introselect on few values, all-equal rows, both zeros, sorted rows; many lengths in one call."""
    rng = np.random.default_rng(k * width)
    s = rng.choice(SPECIAL, size=(60, width))
    s[10:20] = rng.integers(0, 3, size=(10, width))
    s[20:24] = [[1.0], [-np.inf], [np.nan], [0.0]]
    s[24, ::2] = -0.0
    s[25], s[26] = np.arange(width), -np.arange(width)
    total = rng.integers(0, width + 1, size=60)
    total[::2] = width
    bits = bf16_encode(s.astype(np.float32))
    got = select(call, native, bits, k, total)
    for t in range(60):
        expected = topk_torch_cpu(bf16_decode(bits[t : t + 1, : total[t]]), k)
        np.testing.assert_array_equal(got[t : t + 1], expected, err_msg=f"row {t} of {total[t]}")


def test_picks_beyond_the_limit_are_dropped(call: Any, native: Any) -> None:
    """torch picks among all columns; a column at or beyond the limit is not reported."""
    rng = np.random.default_rng(5)
    s = bf16_encode(rng.choice(SPECIAL, size=(40, 30)))
    limit = rng.integers(0, 31, size=40)
    got = select(call, native, s, 6, np.full(40, 30), limit)
    for t in range(40):
        picks = [p for p in topk_torch_cpu(bf16_decode(s[t : t + 1]), 6)[0].tolist() if 0 <= p < limit[t]]
        assert got[t].tolist() == picks + [-1] * (6 - len(picks))


def test_no_rows(call: Any, native: Any) -> None:
    assert select(call, native, np.zeros((0, 9), np.uint16), 6).size == 0
