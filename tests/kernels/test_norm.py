"""RMSNorm, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.norm import rms_norm


@pytest.mark.parametrize("dim", [7, 18, 32, 1280])
@pytest.mark.parametrize("eps", [1e-20, 1e-2])
def test_bits_are_the_references(call: Any, compiled: Any, dim: int, eps: float) -> None:
    """Rows of every size, zeros, one NaN and one infinity among them; long rows show float32 sums of squares."""
    rng = np.random.default_rng(dim)
    values = rng.normal(size=(400, dim)) * 10.0 ** rng.uniform(-12, 12, size=(400, 1))
    x = bf16_encode(values.astype(np.float32))
    x[7], x[8, 3], x[9, 0], x[10] = 0, 0x7FC0, 0xFF80, 0x8000
    w = bf16_encode((1 + 0.1 * rng.normal(size=dim)).astype(np.float32))
    got = call(compiled("rms_norm", dim=dim, eps=eps), [x, w], x.shape, np.uint16)
    expected = rms_norm(x, w, eps)
    number = ~np.isnan(bf16_decode(expected))
    np.testing.assert_array_equal(np.isnan(bf16_decode(got)), ~number)
    np.testing.assert_array_equal(got[number], expected[number])


def test_no_rows(call: Any, compiled: Any) -> None:
    w = np.zeros(32, np.uint16)
    assert (
        call(compiled("rms_norm", dim=32, eps=1e-20), [np.zeros((0, 32), np.uint16), w], (0, 32), np.uint16).size == 0
    )
