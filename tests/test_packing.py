"""Packed weights, element by element, and alignment."""

from __future__ import annotations

import numpy as np
import pytest

from ds41_tvm.packing import ALIGNMENT, aligned, aligned_copy, pack_linear
from ds41_tvm.program import Linear


def layer(n: int, k: int, weight: str, tile: int) -> Linear:
    return Linear(n=n, k=k, groups=1, weight=weight, out="bf16", total="f32", tile=tile, form="fma", rows=6, few=1)


@pytest.mark.parametrize(("n", "k", "tile"), [(8, 6, 4), (6, 5, 2), (3, 1, 1), (16, 4, 16)])
@pytest.mark.parametrize("weight", ["bf16", "fp8", "f32"])
def test_where_every_weight_goes(n: int, k: int, tile: int, weight: str) -> None:
    dtype = {"bf16": np.uint16, "fp8": np.uint8, "f32": np.float32}[weight]
    w = (np.arange(n * k) + 1).astype(dtype).reshape(n, k)
    scale = np.full((1, 1), 127, np.uint8)
    packed, *rest = pack_linear(layer(n, k, weight, tile), w, scale if weight == "fp8" else None)
    assert packed.ctypes.data % ALIGNMENT == 0
    bits = 8 * w.itemsize
    for j in range(n):
        for i in range(k + k % 2 if weight != "f32" else k):
            word = packed[j // tile, i if weight == "f32" else i // 2, j % tile]
            value = word if weight == "f32" else (int(word) >> (bits * (i % 2))) & (2**bits - 1)
            assert value == (w[j, i] if i < k else 0)
    assert len(rest) == (weight == "fp8")
    if rest:
        np.testing.assert_array_equal(rest[0], scale)
        assert rest[0].ctypes.data % ALIGNMENT == 0


def test_sources_in_any_layout() -> None:
    w = np.arange(48, dtype=np.uint16).reshape(8, 6)
    expected = pack_linear(layer(8, 6, "bf16", 4), w)[0]
    for given in (np.asfortranarray(w), np.repeat(w, 2, 1)[:, ::2], w[::-1][::-1]):
        np.testing.assert_array_equal(pack_linear(layer(8, 6, "bf16", 4), given)[0], expected)


def test_aligned_arrays() -> None:
    for shape in (0, 1, 7, (3, 5), (2, 0, 4)):
        for dtype in (np.uint8, np.uint16, np.float64):
            array = aligned(shape, dtype)
            assert array.dtype == dtype
            assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
            assert array.flags.c_contiguous
            assert array.flags.writeable
    good = aligned((4, 4), np.float32)
    assert aligned_copy(good) is good
    assert aligned_copy(good[:2]) is not None
    for other in (good.T[:3], good[:, 1:], np.broadcast_to(np.float32(1), (4, 4))):
        copy = aligned_copy(other)
        np.testing.assert_array_equal(copy, other)
        assert not np.shares_memory(copy, other)
        assert copy.ctypes.data % ALIGNMENT == 0
    fixed = good.copy()
    fixed.flags.writeable = False
    assert aligned_copy(fixed).flags.writeable
