"""Quantisers, bit by bit: against the NumPy codes and against recorded values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.packing import aligned
from ds41_tvm.reference.quantize import pack_rows, quantize_activation, unpack_rows

RECORDED = {"window": "fp8_e8m0_block32_out", "latent": "fp4_e4m3_block16_out", "index": "fp4_e8m0_block32_out"}
SHAPES = [
    ("window", 1, 64),
    ("window", 3, 32),
    ("latent", 1, 64),
    ("latent", 2, 96),
    ("index", 1, 64),
    ("index", 5, 32),
]


def every_pattern(heads: int, dim: int) -> np.ndarray:
    """All bf16 patterns at random places, then blocks in which every magnitude is alike, tiny, huge or bad."""
    rng = np.random.default_rng(dim)
    width = heads * dim
    rows = -(-(1 << 16) // width)
    wild = rng.permutation(rows * width).astype(np.uint16).reshape(rows, heads, dim)
    exponent = rng.integers(0, 255, size=(600, heads, 1), dtype=np.uint16) << 7
    tame = exponent + rng.integers(0, 300, size=(600, heads, dim), dtype=np.uint16)
    tame |= rng.integers(0, 2, size=tame.shape, dtype=np.uint16) << 15
    tame[0], tame[1], tame[2], tame[3] = 0, 0x8000, 0x7F7F, 1
    tame[4, :, 17] = 0x7FC0
    tame[5, :, 31] = 0xFF80
    return np.concatenate([wild, tame])


def run(function: Any, x: np.ndarray, row: np.ndarray, out: np.ndarray) -> np.ndarray:
    given = aligned(x.shape, x.dtype)
    given[...] = x
    rows = aligned(row.shape, np.int64)
    rows[...] = row
    function(given, rows, out)
    return out


@pytest.mark.parametrize(("kind", "heads", "dim"), SHAPES)
def test_rows_are_the_references_and_land_where_they_should(compiled: Any, kind: Any, heads: int, dim: int) -> None:
    x = every_pattern(heads, dim)
    size = row_bytes(kind, dim)
    place = np.random.default_rng(1).permutation(2 * len(x))[: len(x)]
    out = aligned((2 * len(x), heads, size), np.uint8)
    out[...] = 0xA5
    run(compiled("pack_rows", kind=kind, heads=heads, dim=dim), x, place, out)
    np.testing.assert_array_equal(out[place], pack_rows(kind, x))
    untouched = np.setdiff1d(np.arange(len(out)), place)
    assert (out[untouched] == 0xA5).all()


@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_values(compiled: Any, numerics: Any, kind: Any) -> None:
    x = numerics["quant_in"]
    out = aligned((96, 1, row_bytes(kind, 64)), np.uint8)
    run(compiled("pack_rows", kind=kind, heads=1, dim=64), x[:, None], np.arange(96), out)
    np.testing.assert_array_equal(unpack_rows(kind, out[:, 0], 64), numerics[RECORDED[kind]])


def test_no_rows(compiled: Any) -> None:
    out = aligned((3, 1, row_bytes("index", 64)), np.uint8)
    out[...] = 7
    run(
        compiled("pack_rows", kind="index", heads=1, dim=64),
        np.zeros((0, 1, 64), np.uint16),
        np.zeros(0, np.int64),
        out,
    )
    assert (out == 7).all()


def test_activations(call: Any, compiled: Any, numerics: Any) -> None:
    function = compiled("quantize_activation", dim=64)
    x = every_pattern(1, 64).reshape(-1, 64)
    expected = quantize_activation(x)
    got = call(function, [x], x.shape, np.uint16)
    bad = (expected & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal((got & 0x7FFF) > 0x7F80, bad)
    np.testing.assert_array_equal(got[~bad], expected[~bad])
    recorded = call(function, [numerics["quant_in"]], (96, 64), np.uint16)
    np.testing.assert_array_equal(recorded, numerics["fp8_e8m0_block32_out"])
