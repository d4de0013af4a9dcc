"""Packed rows: the bytes of the NumPy codecs, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41_tvm.numerics import formats as f
from ds41_tvm.onnx_export import quantize as o
from ds41_tvm.reference import quantize as r

Run = Callable[..., Any]
KINDS = ("window", "latent", "index")
PACK = {kind: o.pack_rows(kind, 32) for kind in KINDS}  # type: ignore[arg-type]


def special_rows() -> np.ndarray:
    """bf16 bits [n, 64]: one remarkable value among small ones, whole rows of zeros, ties."""
    base = np.linspace(-1, 1, 64, dtype=np.float32)
    rows = [np.zeros(64, np.float32), -np.zeros(64, np.float32), base]
    for value in (6.375, 6.4, 3000, 448, 465, 1e-4, 1e-30, 1e-39, 3.3e38, np.nan, np.inf, -np.inf, 1.8131605):
        row = base.copy()
        row[5] = value
        rows.append(row)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 8, np.float32)
    rows += [ties, -ties, ties * 2.0**-20, ties * 2.0**100, np.full(64, 3.3895e38, np.float32)]
    return f.bf16_encode(np.stack(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(run: Run, kind: Any) -> None:
    x = special_rows()
    values = f.bf16_decode(x)[None]
    expected = r.pack_rows(kind, x)
    np.testing.assert_array_equal(run(o.pack_rows(kind, 64), values)[0], expected)
    back = f.bf16_decode(r.round_trip(kind, x))
    np.testing.assert_array_equal(run(o.unpack_rows(kind, 64), expected[None, None])[0, 0], back)
    np.testing.assert_array_equal(run(o.round_trip(kind, 64), values)[0], back)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_quantisers(ort: Run, numerics: dict[str, np.ndarray], kind: Any) -> None:
    name = {"window": "fp8_e8m0_block32", "latent": "fp4_e4m3_block16", "index": "fp4_e8m0_block32"}[kind]
    got = ort(o.round_trip(kind, 64), f.bf16_decode(numerics["quant_in"])[None])[0]
    np.testing.assert_array_equal(f.bf16_encode(got), numerics[name + "_out"])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_row(ort: Run, kind: Any, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 65536, (3, 32), dtype=np.uint16) & np.uint16(data.draw(st.sampled_from([0xFFFF, 0xBFFF])))
    got = ort(PACK[kind], f.bf16_decode(x)[None])[0]
    np.testing.assert_array_equal(got, r.pack_rows(kind, x))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(run: Run, kind: Any) -> None:
    assert run(o.pack_rows(kind, 64), np.zeros((2, 0, 64), np.float32)).shape == (2, 0, f.row_bytes(kind, 64))
