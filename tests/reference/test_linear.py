"""Linear layers: one rounding, exact products, quantised inputs; and what builds on them."""

from __future__ import annotations

import numpy as np
import pytest

from ds41_tvm.errors import NumericsError
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode, e4m3_decode, e4m3_encode
from ds41_tvm.reference.linear import linear, linear_f32, linear_fp8
from ds41_tvm.reference.output import output_groups
from ds41_tvm.reference.quantize import pack_rows, quantize_activation, round_trip


def random_bf16(*shape: int, seed: int = 0) -> np.ndarray:
    return bf16_encode(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def test_the_sum_is_rounded_once() -> None:
    # In bf16 1 + 2^-8 is a tie that goes down to 1: rounded in between, the second 2^-8 would be lost too.
    x = bf16_encode(np.float32([[1, 1, 1]]))
    w = bf16_encode(np.float32([[1, 2**-8, 2**-8]]))
    assert bf16_decode(linear(x, w))[0, 0] == 1 + 2**-7
    assert linear_f32(x, w)[0, 0] == np.float32(1 + 2**-7)


def test_cancellation_is_exact() -> None:
    x = bf16_encode(np.float32([[2**100, 1, -(2**100)]]))
    w = bf16_encode(np.float32([[1, 1, 1]]))
    # float64 holds 53 bits: this only shows that nothing narrower is used before the sum.
    x2 = bf16_encode(np.float32([[2**40, 1, -(2**40)]]))
    assert linear_f32(x2, w)[0, 0] == 1
    assert linear_f32(x, w)[0, 0] == 0


def test_float32_weights_are_taken_as_they_are() -> None:
    w = np.float32([[1.0000001, 2.0000002]])
    x = bf16_encode(np.float32([[1, 0], [0, 1]]))
    np.testing.assert_array_equal(linear_f32(x, w), w.T)


def test_the_fast_form_is_close() -> None:
    x, w = random_bf16(5, 64), random_bf16(7, 64, seed=1)
    np.testing.assert_allclose(linear_f32(x, w, "f32"), linear_f32(x, w), rtol=1e-4, atol=1e-4)


def test_fp8_quantises_the_input_and_scales_the_weight() -> None:
    x = random_bf16(5, 64)
    values = np.random.default_rng(2).normal(size=(40, 64)).astype(np.float32)
    codes, scales = e4m3_encode(values), np.uint8([[126, 128], [125, 127]])
    full = e4m3_decode(codes) * (2.0 ** (scales.astype(int) - 127)).repeat(32, 0)[:40].repeat(32, 1).astype(np.float32)
    expected = linear(quantize_activation(x), full)
    np.testing.assert_array_equal(linear_fp8(x, codes, scales), expected)
    assert (linear_fp8(x, codes, scales) != linear(x, full)).any()


def test_a_bad_token_spoils_its_own_row_only() -> None:
    x, w = random_bf16(4, 32), random_bf16(3, 32, seed=1)
    good = linear(x, w)
    x[2, 5] = 0x7FC0
    got = linear(x, w)
    np.testing.assert_array_equal(got[[0, 1, 3]], good[[0, 1, 3]])
    assert np.isnan(bf16_decode(got[2])).all()


def test_groups_of_heads_have_their_own_weights() -> None:
    o, wo_a = random_bf16(5, 4, 32), random_bf16(6, 64, seed=3)
    got = output_groups(o, wo_a, 2)
    np.testing.assert_array_equal(got[:, :3], linear(o[:, :2].reshape(5, 64), wo_a[:3]))
    np.testing.assert_array_equal(got[:, 3:], linear(o[:, 2:].reshape(5, 64), wo_a[3:]))


@pytest.mark.parametrize(("kind", "size"), [("window", 66), ("latent", 36), ("index", 34)])
def test_packed_rows_have_their_sizes_and_quantise_per_row(kind, size: int) -> None:
    x = random_bf16(5, 2, 64)
    rows = pack_rows(kind, x)
    assert rows.shape == (5, 2, size)
    np.testing.assert_array_equal(rows[3, 1], pack_rows(kind, x[3, 1]))
    np.testing.assert_array_equal(round_trip(kind, round_trip(kind, x))[0], round_trip(kind, round_trip(kind, x[0])))


def test_an_unknown_kind_of_row_is_named() -> None:
    with pytest.raises(NumericsError, match=r"unknown kind.*'key'"):
        pack_rows("key", random_bf16(1, 32))  # type: ignore[arg-type]
