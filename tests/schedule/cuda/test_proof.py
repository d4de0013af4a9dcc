"""The launcher of GPU programs on a processor: it refuses what does not fit, as TVM's own host code does."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from ds41_tvm.errors import CompileError
from ds41_tvm.packing import aligned
from ds41_tvm.program import kernel
from ds41_tvm.proof import opencl, opencl_functions
from ds41_tvm.schedule.cuda.common import fma


def zeros(shape: Any, dtype: Any) -> np.ndarray:
    out = aligned(shape, dtype)
    out[...] = 0
    return out


def scale() -> Any:
    wanted = kernel("scale_weights", heads=6, factor=0.3)
    return opencl_functions([wanted])[wanted.name]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([zeros((3, 6), np.uint16)], "Expected 2 arguments"),
        ([zeros((3, 5), np.uint16), zeros((3, 6), np.uint16)], r"W.shape\[1\]"),
        ([zeros((3, 6), np.uint16), zeros((4, 6), np.uint16)], r"Y.shape\[0\]"),
        ([zeros((3, 6), np.int16), zeros((3, 6), np.uint16)], "W.dtype"),
        ([zeros((3, 6, 1), np.uint16), zeros((3, 6), np.uint16)], "W.ndim"),
        ([zeros((3, 12), np.uint16)[:, ::2], zeros((3, 6), np.uint16)], "C-contiguous"),
        ([zeros((9, 6), np.uint16)[1:4], zeros((3, 6), np.uint16)], "64-byte aligned"),
    ],
)
def test_arrays_that_do_not_fit(arrays: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale()(*arrays)


def test_no_rows_launch_nothing() -> None:
    scale()(zeros((0, 6), np.uint16), zeros((0, 6), np.uint16))


def test_without_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(CompileError, match="pip install 'pyopencl"):
        opencl.Device()


@T.prim_func(s_tir=True)
def products(
    a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32"), c: T.Buffer((64,), "float32"),
    apart: T.Buffer((64,), "float32"), fused: T.Buffer((64,), "float32"), half: T.Buffer((64,), "float32"),
):  # fmt: skip
    for bx in T.thread_binding(2, "blockIdx.x"):
        for tx in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("products"):
                i = T.axis.spatial(64, bx * 32 + tx)
                apart[i] = a[i] * b[i] + c[i]
                fused[i] = fma(a[i], b[i], c[i])
                half[i] = T.sqrt(a[i] * a[i] / T.float32(3))


def test_rounding_points_are_the_programs() -> None:
    """A product is rounded before it is added unless the program fuses the two; division and root are exact."""
    rng = np.random.default_rng(0)
    a, b, c, apart, fused, half = (zeros(64, np.float32) for _ in range(6))
    a[:], b[:] = (rng.normal(size=(2, 64)) * 3).astype(np.float32)
    c[:] = -(a * b) * np.float32(1 + 2.0**-20)
    opencl.opencl_function(products)(a, b, c, apart, fused, half)
    np.testing.assert_array_equal(apart, a * b + c)
    exact = (a.astype(np.float64) * b + c).astype(np.float32)
    np.testing.assert_array_equal(fused, exact)
    assert (apart != fused).sum() > 30
    np.testing.assert_array_equal(half, np.sqrt(a * a / np.float32(3)))
