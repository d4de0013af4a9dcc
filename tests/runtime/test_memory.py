"""Pools of rows, scratch memory, aligned arrays, threads."""

from __future__ import annotations

import numpy as np
import pytest

from ds41_tvm.cpu_features import available_threads
from ds41_tvm.errors import UsageError
from ds41_tvm.runtime.memory import RowPool, Workspace
from ds41_tvm.runtime.threads import check_threads


def pool() -> RowPool:
    return RowPool(3, {"a": ((5,), np.uint8), "b": ((2, 4), np.float32)})


def test_units_are_zero_lowest_first_and_never_the_first_one() -> None:
    p = pool()
    assert [p.take() for _ in range(5)] == [1, 2, 3, 4, 5]
    for array in p.arrays.values():
        array[3:] = 9
    p.give(4)
    p.give(2)
    assert p.used == 3
    assert p.take() == 2
    for array in p.arrays.values():
        assert not array[6:9].any()
        assert array[12:15].all()
        assert not array[:3].any()
    assert (p.take(), p.take()) == (4, 6)


def test_growth_keeps_rows_and_alignment() -> None:
    p = pool()
    for i in range(1, 40):
        unit = p.take()
        assert unit == i
        for array in p.arrays.values():
            assert not array[unit * 3 : unit * 3 + 3].any()
            array[unit * 3 : unit * 3 + 3] = i
    for array in p.arrays.values():
        assert array.ctypes.data % 64 == 0
        for i in range(40):
            assert (array[3 * i : 3 * i + 3] == i).all()


def test_bytes_of_a_unit() -> None:
    assert pool().unit_bytes == 3 * (5 + 2 * 4 * 4)


def test_scratch_memory_is_kept_by_name() -> None:
    w = Workspace()
    first = w.get("x", (3, 5), np.float32)
    first[:] = 1
    assert first.ctypes.data % 64 == 0
    assert w.get("x", (2, 2), np.uint16).ctypes.data == first.ctypes.data
    other = w.get("y", (3, 5), np.float32)
    assert not np.shares_memory(first, other)
    larger = w.get("x", (30, 5), np.float32)
    assert larger.shape == (30, 5)
    assert not np.shares_memory(first, larger)
    w.fill(0xFF)
    assert np.isnan(larger).all()
    assert np.isnan(other).all()
    assert w.nbytes == larger.nbytes + other.nbytes
    assert w.get("empty", (0, 4), np.uint8).shape == (0, 4)


@pytest.mark.parametrize("threads", [0, -1, 1.0, "2", True, 10**6])
def test_impossible_numbers_of_threads(threads: object) -> None:
    with pytest.raises(UsageError, match="expected an integer from 1 to"):
        check_threads(threads)  # type: ignore[arg-type]


def test_all_processors_by_default() -> None:
    assert check_threads(None) == available_threads()
    assert check_threads(1) == 1
