"""The NumPy codecs against recorded values, ml_dtypes over all codes, and values that go wrong easily."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds41_tvm.errors import NumericsError
from ds41_tvm.numerics import formats

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "numerics.npz")
ALL_BF16 = np.arange(65536, dtype=np.uint16)
ALL_BYTES = np.arange(256, dtype=np.uint8)
FINITE_AMAX = np.arange(0x7F80, dtype=np.uint16)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def one_block(values: list[float], dim: int = 32) -> np.ndarray:
    x = np.zeros(dim, np.float32)
    x[: len(values)] = values
    return formats.bf16_encode(x)


def test_bf16_encode_matches_recorded_bits() -> None:
    np.testing.assert_array_equal(formats.bf16_encode(GOLDEN["bf16_in"].view(np.float32)), GOLDEN["bf16_out"])


def test_bf16_round_trip_keeps_every_number_and_every_nan() -> None:
    back = formats.bf16_encode(formats.bf16_decode(ALL_BF16))
    is_nan = (ALL_BF16 & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back, np.where(is_nan, ALL_BF16 | 0x40, ALL_BF16))


@pytest.mark.parametrize(
    ("f32_bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # tie, even below
        (0x3F818000, 0x3F82),  # tie, even above
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest f32 rounds to infinity
        (0x7F800001, 0x7FC0),  # a NaN with low payload only must not become infinity
        (0xFF800001, 0xFFC0),
        (0x00008000, 0x0000),  # half of the smallest subnormal, tie to even
        (0x00008001, 0x0001),
        (0x80000000, 0x8000),
    ],
)
def test_bf16_special_values(f32_bits: int, expected: int) -> None:
    assert formats.bf16_encode(np.array([f32_bits], np.uint32).view(np.float32))[0] == expected


def test_e4m3_matches_recorded_codes() -> None:
    np.testing.assert_array_equal(formats.e4m3_encode(GOLDEN["e4m3_in"]), GOLDEN["e4m3_out"])


def test_e2m1_matches_recorded_values() -> None:
    values = formats.e2m1_decode(formats.e2m1_encode(GOLDEN["e2m1_in"]))
    np.testing.assert_array_equal(bits(values), bits(GOLDEN["e2m1_out"]))


def test_decoders_match_ml_dtypes_on_every_code() -> None:
    e4m3 = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(formats.e4m3_decode(ALL_BYTES), e4m3)
    np.testing.assert_array_equal(np.signbit(formats.e4m3_decode(ALL_BYTES)), ALL_BYTES >= 128)
    e2m1 = ALL_BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(bits(formats.e2m1_decode(ALL_BYTES[:16])), bits(e2m1))
    e8m0 = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(formats.e8m0_decode(ALL_BYTES), e8m0)


def test_encoders_match_clamp_then_ml_dtypes_on_every_bf16() -> None:
    x = formats.bf16_decode(ALL_BF16[(ALL_BF16 & 0x7FFF) <= 0x7F80])
    e4m3 = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(formats.e4m3_encode(x), e4m3)
    e2m1 = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(formats.e2m1_encode(x), e2m1)


def test_encoding_a_decoded_code_gives_it_back() -> None:
    numbers = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F]
    np.testing.assert_array_equal(formats.e4m3_encode(formats.e4m3_decode(numbers)), numbers)
    np.testing.assert_array_equal(formats.e2m1_encode(formats.e2m1_decode(ALL_BYTES[:16])), ALL_BYTES[:16])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.8131605, 1.875),
        (465.0, 448.0),
        (np.inf, 448.0),
        (-np.inf, -448.0),
        (2.0**-10, 0.0),
        (3 * 2.0**-10, 2.0**-8),
    ],
)
def test_e4m3_special_values(value: float, expected: float) -> None:
    assert formats.e4m3_decode(formats.e4m3_encode(np.float32([value])))[0] == expected


def test_e4m3_nan_keeps_its_sign() -> None:
    nan = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(formats.e4m3_encode(nan), [0x7F, 0xFF])


def test_e2m1_ties_go_to_the_even_code_with_the_sign_kept() -> None:
    x = np.float32([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.375, 1e9, np.inf])
    expected = np.float32([0, 0, 1, 1, 2, 2, 4, 4, 6, 6, 6])
    np.testing.assert_array_equal(bits(formats.e2m1_decode(formats.e2m1_encode(x))), bits(expected))
    np.testing.assert_array_equal(bits(formats.e2m1_decode(formats.e2m1_encode(-x))), bits(-expected))


# ---- scales


@pytest.mark.parametrize(
    ("scale", "limit", "floor"),
    [
        (formats.e8m0_scale_window, 448.0, float(np.float32(1e-4))),
        (formats.e8m0_scale_index, 6.0, 6 * 2.0**-126),
    ],
)
def test_e8m0_scales_are_the_smallest_sufficient_power_for_every_amax(scale, limit: float, floor: float) -> None:
    amax = np.maximum(formats.bf16_decode(FINITE_AMAX).astype(np.float64), floor)
    power = np.ldexp(1.0, scale(FINITE_AMAX).astype(np.int64) - 127)
    assert (power * limit >= amax).all()
    assert (power / 2 * limit < amax).all()


def test_latent_scale_is_the_rounded_sixth_for_every_amax() -> None:
    amax = np.maximum(formats.bf16_decode(FINITE_AMAX), np.float32(6 * 2.0**-9))
    expected = np.minimum(amax / np.float32(6), 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(formats.e4m3_scale_latent(FINITE_AMAX), expected)
    assert expected.min() == 1


def test_infinite_and_nan_amax_give_the_nan_scale() -> None:
    bad = np.arange(0x7F80, 0x8000, dtype=np.uint16)
    assert (formats.e8m0_scale_window(bad) == 255).all()
    assert (formats.e8m0_scale_index(bad) == 255).all()
    assert (formats.e4m3_scale_latent(bad) == 0x7F).all()


# ---- block quantisers


def round_trip(kind: str, x: np.ndarray) -> np.ndarray:
    quantize, dequantize = getattr(formats, f"quantize_{kind}"), getattr(formats, f"dequantize_{kind}")
    out: np.ndarray = dequantize(*quantize(x))
    return out


@pytest.mark.parametrize(
    ("kind", "recorded"),
    [
        ("window", "fp8_e8m0_block32_out"),
        ("latent", "fp4_e4m3_block16_out"),
        ("index", "fp4_e8m0_block32_out"),
    ],
)
def test_block_quantisers_match_recorded_bits(kind: str, recorded: str) -> None:
    np.testing.assert_array_equal(round_trip(kind, GOLDEN["quant_in"]), GOLDEN[recorded])


@pytest.mark.parametrize("kind", ["window", "latent", "index"])
def test_zero_blocks_stay_zero_with_their_signs(kind: str) -> None:
    x = np.where(np.arange(64) % 3 == 0, 0x8000, 0).astype(np.uint16)
    np.testing.assert_array_equal(round_trip(kind, x), x)


def test_latent_scale_saturates_and_elements_clamp() -> None:
    out = formats.bf16_decode(round_trip("latent", one_block([3000.0, -1500.0, 400.0])))
    np.testing.assert_array_equal(out[:3], [2688.0, -1344.0, 448.0])


@pytest.mark.parametrize(("amax", "scale"), [(6.375, 2.0), (6.4, 2.0), (6.0, 1.0), (5.97, 1.0)])
def test_index_scale_changes_just_above_six(amax: float, scale: float) -> None:
    _, scales = formats.quantize_index(one_block([amax]))
    assert formats.e8m0_decode(scales)[0] == scale


@pytest.mark.parametrize("kind", ["window", "latent", "index"])
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_a_bad_value_spoils_its_own_block_only(kind: str, bad: int) -> None:
    x = formats.bf16_encode(np.linspace(-3, 3, 64, dtype=np.float32))
    good = round_trip(kind, x)
    x[40] = bad
    block = 16 if kind == "latent" else 32
    inside = np.arange(64) // block == 40 // block
    out = round_trip(kind, x)
    assert np.isnan(formats.bf16_decode(out)[inside]).all()
    np.testing.assert_array_equal(out[~inside], good[~inside])
    codes, scales = getattr(formats, f"quantize_{kind}")(x)
    assert scales[40 // block] == (0x7F if kind == "latent" else 255)
    stored = codes if kind == "window" else formats.unpack_nibbles(codes)
    assert not stored[inside].any()


@pytest.mark.parametrize("kind", ["window", "latent", "index"])
def test_wrong_size_or_dtype_is_named(kind: str) -> None:
    quantize = getattr(formats, f"quantize_{kind}")
    with pytest.raises(NumericsError, match=r"shape \(2, 40\).*multiple of 32"):
        quantize(np.zeros((2, 40), np.uint16))
    with pytest.raises(NumericsError, match="float32"):
        quantize(np.zeros((2, 64), np.float32))


@given(hnp.arrays(np.uint16, st.sampled_from([(32,), (3, 64), (2, 2, 96)]), elements=st.integers(0, 65535)))
def test_quantising_a_quantised_row_changes_nothing(x: np.ndarray) -> None:
    for kind in ("window", "index"):
        once = round_trip(kind, x)
        finite = np.isfinite(formats.bf16_decode(once))
        twice = round_trip(kind, np.where(finite, once, np.uint16(0)))
        np.testing.assert_array_equal(twice[finite], once[finite])


# ---- packing


def test_nibbles_of_a_run_lie_in_halves() -> None:
    packed = formats.pack_nibbles((np.arange(64) % 16).astype(np.uint8) ^ np.repeat([0, 1], 32).astype(np.uint8))
    np.testing.assert_array_equal(packed[:16], [i | i << 4 for i in range(16)])
    packed = formats.pack_nibbles(np.repeat([1, 2, 3, 4], 16).astype(np.uint8))
    np.testing.assert_array_equal(packed, [0x21] * 16 + [0x43] * 16)


@given(hnp.arrays(np.uint8, st.sampled_from([(32,), (2, 64), (3, 1, 128)]), elements=st.integers(0, 15)))
def test_unpacking_nibbles_gives_the_codes_back(codes: np.ndarray) -> None:
    np.testing.assert_array_equal(formats.unpack_nibbles(formats.pack_nibbles(codes)), codes)


@pytest.mark.parametrize(("kind", "dim", "expected"), [("window", 512, 528), ("latent", 512, 288), ("index", 128, 68)])
def test_released_rows_have_the_designed_sizes(kind, dim: int, expected: int) -> None:
    assert formats.row_bytes(kind, dim) == expected


@pytest.mark.parametrize("kind", ["window", "latent", "index"])
def test_rows_pack_and_unpack(kind) -> None:
    x = formats.bf16_encode(np.random.default_rng(1).normal(size=(5, 96)).astype(np.float32))
    parts = getattr(formats, f"quantize_{kind}")(x)
    row = getattr(formats, f"pack_{kind}_row")(*parts)
    assert row.shape == (5, formats.row_bytes(kind, 96))
    for got, expected in zip(getattr(formats, f"unpack_{kind}_row")(row, 96), parts, strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(NumericsError, match=f"packed {kind} row of 64 elements"):
        getattr(formats, f"unpack_{kind}_row")(row, 64)


def test_row_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(NumericsError, match="multiple of 32"):
        formats.row_bytes("window", 40)
    with pytest.raises(NumericsError, match="unknown kind"):
        formats.row_bytes("key", 64)  # type: ignore[arg-type]


# ---- weights


def test_weight_blocks_may_be_cut_at_the_edges() -> None:
    codes = np.full((40, 70), 0x38, np.uint8)  # 1.0
    scales = (np.arange(6).reshape(2, 3) + 120).astype(np.uint8)
    out = formats.dequantize_weight(codes, scales)
    for row in (0, 31, 32, 39):
        for column in (0, 31, 32, 63, 64, 69):
            assert out[row, column] == 2.0 ** (int(scales[row // 32, column // 32]) - 127)


def test_weight_scales_of_the_wrong_shape_are_named() -> None:
    with pytest.raises(NumericsError, match=r"\(1, 1\), expected \(2, 3\)"):
        formats.dequantize_weight(np.zeros((40, 70), np.uint8), np.zeros((1, 1), np.uint8))
