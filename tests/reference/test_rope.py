"""Rotary embedding: tables bit for bit as recorded, and the algebra of rotations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.rope import rope_frequencies, rope_table, rotate

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "numerics.npz")


def random_bf16(*shape: int, seed: int = 0) -> np.ndarray:
    return bf16_encode(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize(
    ("preset", "ratio", "recorded"),
    [("flash", 1, "rope_flash_yarn"), ("flash", 0, "rope_flash_window"), ("tiny", 2, "rope_tiny_yarn")],
)
def test_tables_are_the_recorded_bits(preset: str, ratio: int, recorded: str) -> None:
    expected = GOLDEN[recorded]
    positions = GOLDEN["rope_pos"][: len(expected)]
    table = rope_table(rope_frequencies(AttentionConfig.preset(preset), ratio), positions)
    np.testing.assert_array_equal(table.view(np.uint32), expected.view(np.uint32))


def test_all_compressed_layers_share_their_frequencies_and_window_layers_do_not() -> None:
    config = AttentionConfig.preset("flash")
    np.testing.assert_array_equal(rope_frequencies(config, 1), rope_frequencies(config, 2))
    assert (rope_frequencies(config, 0)[1:] != rope_frequencies(config, 1)[1:]).all()


def test_yarn_keeps_the_fastest_pair_and_stretches_the_slowest() -> None:
    config = AttentionConfig.preset("flash")
    plain = np.float32(1) / np.float32(config.compress_rope_theta) ** (np.arange(0, 64, 2) / 64)
    ratio = plain / rope_frequencies(config, 1)
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(config.rope_factor)
    assert (np.diff(ratio) > -1e-5).all()


@given(st.lists(st.integers(0, 1_048_575), min_size=1, max_size=8))
def test_tables_are_cos_and_sin_to_the_last_bit_or_the_one_beside_it(positions: list[int]) -> None:
    freqs = rope_frequencies(AttentionConfig.preset("flash"), 0)
    angle = (np.array(positions, np.float32)[:, None] * freqs).astype(np.float64)
    expected = np.stack([np.cos(angle), np.sin(angle)], -1)
    error = np.abs(rope_table(freqs, np.array(positions)) - expected)
    assert (error <= np.spacing(np.abs(expected).astype(np.float32))).all()


def test_only_the_last_channels_turn() -> None:
    x = random_bf16(3, 32)
    table = rope_table(rope_frequencies(AttentionConfig.preset("tiny"), 0), np.array([5, 6, 7]))
    y = rotate(x, table)
    np.testing.assert_array_equal(y[:, :24], x[:, :24])
    assert (y[:, 24:] != x[:, 24:]).any(axis=-1).all()


def test_heads_turn_alike_and_pairs_are_adjacent() -> None:
    table = np.array([[[0.0, 1.0], [1.0, 0.0]]], np.float32)  # a quarter turn for pair 0, none for pair 1
    x = bf16_encode(np.array([[[9, 1, 2, 3, 4], [8, 5, 6, 7, 8]]], np.float32))
    np.testing.assert_array_equal(bf16_decode(rotate(x, table))[0], [[9, -2, 1, 3, 4], [8, -6, 5, 7, 8]])
    np.testing.assert_array_equal(bf16_decode(rotate(x, table, inverse=True))[0], [[9, 2, -1, 3, 4], [8, 6, -5, 7, 8]])
    np.testing.assert_array_equal(rotate(x[:, 0], table), rotate(x, table)[:, 0])


def test_products_are_rounded_to_f32_before_their_sum() -> None:
    cos, sin = np.float32(0.1), np.float32(0.1)
    x = bf16_encode(np.float32([[3.0, 3.0]]))
    y = rotate(x, np.array([[[cos, sin]]], np.float32))
    assert bf16_decode(y)[0, 0] == 0.0  # a fused product would leave the rounding error of the other


@given(st.integers(0, 1_000_000), st.integers(0, 2**32 - 1))
def test_turning_back_gives_the_input_up_to_bf16_rounding(position: int, seed: int) -> None:
    x = random_bf16(1, 2, 32, seed=seed)
    table = rope_table(rope_frequencies(AttentionConfig.preset("tiny"), 1), np.array([position]))
    back = bf16_decode(rotate(rotate(x, table), table, inverse=True))
    np.testing.assert_allclose(back, bf16_decode(x), atol=0.03)


def test_a_product_of_rotated_vectors_depends_on_the_distance_only() -> None:
    freqs = rope_frequencies(AttentionConfig.preset("tiny"), 1)
    q, k = random_bf16(1, 8, seed=1), random_bf16(1, 8, seed=2)

    def product(at: int) -> float:
        turned = [bf16_decode(rotate(v, rope_table(freqs, np.array([p])))) for v, p in ((q, at + 11), (k, at))]
        return float(np.vdot(*turned))

    assert product(0) == pytest.approx(product(50_000), abs=0.1)
    assert product(0) == pytest.approx(product(7), abs=0.1)
