"""Long rows: several turns of a block of threads, with and without whole loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_encode
from ds41_tvm.program import kernel
from ds41_tvm.proof import opencl_functions
from ds41_tvm.schedule.cuda.topk import EACH, threads_for


def order_keys(bits: np.ndarray) -> np.ndarray:
    """Integers that order like the bf16 values: -0 equal to 0, NaN on top."""
    magnitude = (bits & 0x7FFF).astype(np.int64)
    return np.where(magnitude > 0x7F80, 1 << 20, np.where(bits & 0x8000, -magnitude, magnitude))


def hostile_rows(width: int, turn: int) -> np.ndarray:
    """bf16 bits [rows, width]."""
    rng = np.random.default_rng(width)
    rows = [
        np.zeros(width),  # everything ties
        np.arange(width) % 2.0,  # two values, both many
        np.arange(width, dtype=np.float64),  # the best are last, each in the next turn
        -np.arange(width, dtype=np.float64),
        np.where(np.arange(width) % turn == turn - 1, 1.0, 0.0),  # best where turns meet
        np.where(np.arange(width) < width - 3, -np.inf, 5.0),
        rng.normal(size=width),
        rng.normal(size=width) * 2.0 ** rng.integers(-120, 120, size=width),
        np.where(rng.random(width) < 0.01, np.nan, rng.normal(size=width)),
        np.where(rng.random(width) < 0.5, 0.0, -0.0),
        1 + rng.integers(0, 3, size=width) / 128,  # one bin, neighbouring keys
    ]
    bits = bf16_encode(np.stack(rows).astype(np.float32))
    return np.concatenate([bits, rng.integers(0, 1 << 16, size=(2, width)).astype(np.uint16)])


@pytest.mark.parametrize(("k", "widths"), [(5, [2047, 2048, 2049, 6144]), (512, [4097, 12000])])
def test_rows_of_several_turns(call: Any, k: int, widths: list[int]) -> None:
    turn = threads_for(k) * EACH
    assert max(widths) > 2 * turn
    wanted = kernel("topk_lowest_index", k=k, size=0)
    function = opencl_functions([wanted])[wanted.name]
    for width in widths:
        s = hostile_rows(width, turn)
        limit = np.full(len(s), width, np.int32)
        limit[::3] = np.random.default_rng(k).integers(k, width, size=len(limit[::3]))
        got = call(function, [s, limit], (len(s), k), np.int32)  # three times: the same bits
        keys = order_keys(s)
        for t in range(len(s)):
            best = np.argsort(-keys[t, : limit[t]], kind="stable")[:k]
            np.testing.assert_array_equal(got[t], np.sort(best), err_msg=f"row {t} of width {width}")
