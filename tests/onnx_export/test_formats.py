"""Rounding and codes in standard operators: the same bits as the NumPy codecs, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds41_tvm.numerics import formats as f
from ds41_tvm.onnx_export import formats as o

Run = Callable[..., Any]


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def test_bf16_rounding_of_every_upper_half_with_ties(run: Run) -> None:
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        got, expected = run(o.round_bf16, x), f.bf16_decode(f.bf16_encode(x))
        nan = np.isnan(x)
        np.testing.assert_array_equal(bits(got[~nan]), bits(expected[~nan]))
        assert np.isnan(got[nan]).all()


def test_e4m3_codes_at_every_value_and_midpoint(run: Run) -> None:
    values = f.e4m3_decode(np.arange(127, dtype=np.uint8))
    middle = (values[1:] + values[:-1]) / np.float32(2)
    edges = [np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    rest = np.array([1.8131605, 448, 463.9, 464, 465, 3000, 1e38, 2.0**-10, 2.0**-11, 1e-40, 0], np.float32)
    m = np.concatenate([values, middle, *edges, rest]).astype(np.float32)
    np.testing.assert_array_equal(run(o.encode_e4m3, m), f.e4m3_encode(m).astype(np.float32))
    assert f.e4m3_decode(run(o.encode_e4m3, np.float32([1.8131605])).astype(np.uint8))[0] == 1.875


def test_e2m1_codes_ties_to_even(run: Run) -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    near = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))]
    m = np.concatenate([ties, *near, [0, 0.5, 1, 1.5, 2, 3, 4, 6, 6.375, 6.4, 3000, 1e38]]).astype(np.float32)
    got = run(o.encode_e2m1, m)
    np.testing.assert_array_equal(got, f.e2m1_encode(m).astype(np.float32))
    np.testing.assert_array_equal(f.e2m1_decode(got[:7].astype(np.uint8)), [0, 1, 1, 2, 2, 4, 4])


@given(st.lists(st.floats(0, width=32, allow_infinity=False), min_size=1, max_size=200))
def test_any_magnitude(ort: Run, values: list[float]) -> None:
    m = np.array(values, np.float32)
    np.testing.assert_array_equal(ort(o.encode_e4m3, m), f.e4m3_encode(m).astype(np.float32))
    np.testing.assert_array_equal(ort(o.encode_e2m1, m), f.e2m1_encode(m).astype(np.float32))


def test_the_sign_of_zero_counts(run: Run) -> None:
    x = np.array([0.0, -0.0, 1, -1, 1e-40, -1e-40, 3e38, -3e38], np.float32)
    np.testing.assert_array_equal(run(o.is_negative, x), np.signbit(x))


def test_every_code_decodes_to_its_value(run: Run) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for function, decode in ((o.DECODE_E4M3, f.e4m3_decode), (o.DECODE_E8M0, f.e8m0_decode)):
        np.testing.assert_array_equal(run(function, codes), decode(codes))
    np.testing.assert_array_equal(bits(run(o.DECODE_E2M1, codes[:16])), bits(f.e2m1_decode(codes[:16])))
    np.testing.assert_array_equal(bits(run(o.DECODE_LOW, codes)), bits(f.e2m1_decode(codes & 15)))
    np.testing.assert_array_equal(bits(run(o.DECODE_HIGH, codes)), bits(f.e2m1_decode(codes >> 4)))


def test_scale_codes_of_every_bf16_magnitude(run: Run) -> None:
    amax = np.arange(0x7F80, dtype=np.uint16)
    x = f.bf16_decode(amax)[:, None]
    np.testing.assert_array_equal(run(o.SCALE_WINDOW, x)[:, 0], f.e8m0_scale_window(amax))
    np.testing.assert_array_equal(run(o.SCALE_INDEX, x)[:, 0], f.e8m0_scale_index(amax))
