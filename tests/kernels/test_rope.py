"""Rotation, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.rope import rope_frequencies, rope_table, rotate


@pytest.mark.parametrize(("heads", "dim", "rope_dim"), [(3, 32, 6), (1, 64, 16), (2, 32, 32), (5, 32, 2)])
@pytest.mark.parametrize("inverse", [0, 1])
def test_bits_are_the_references(call: Any, compiled: Any, heads: int, dim: int, rope_dim: int, inverse: int) -> None:
    rng = np.random.default_rng(dim + heads)
    config = AttentionConfig.preset("tiny").to_dict() | {"rope_head_dim": rope_dim}
    frequencies = rope_frequencies(AttentionConfig.from_dict(config), 1)
    table = rope_table(frequencies, np.concatenate([np.arange(150), [2**20 - 1, 1_500_000]]))
    x = bf16_encode((3 * rng.normal(size=(len(table), heads, dim))).astype(np.float32))
    x[4], x[5, 0, ::2] = 0x8000, 0
    # Pairs that nearly cancel: what is left shows whether both products were rounded before the sum.
    first, second = x[60:, :, dim - rope_dim :: 2], x[60:, :, dim - rope_dim + 1 :: 2]
    cos, sin = table[60:, None, :, 0], table[60:, None, :, 1]
    second[:40] = bf16_encode(bf16_decode(first[:40]) * cos[:40] / sin[:40])
    first[40:] = bf16_encode(-bf16_decode(second[40:]) * cos[40:] / sin[40:])
    got = call(
        compiled("rope", heads=heads, dim=dim, rope_dim=rope_dim, inverse=inverse), [x, table], x.shape, np.uint16
    )
    np.testing.assert_array_equal(got, rotate(x, table, inverse=bool(inverse)))


def test_recorded_tables_turn_recorded_numbers(call: Any, compiled: Any, numerics: Any) -> None:
    """The released sizes' table; products in float32 before the sum, as float64 shows."""
    table = numerics["rope_flash_yarn"]
    x = numerics["quant_in"][:18].reshape(18, 1, 64)
    pairs = (x.astype(np.uint32) << 16).view(np.float32).reshape(18, 32, 2)
    cos, sin = table[..., 0], table[..., 1]
    # Each product rounded to float32, then their sum: float64 holds both exactly enough to round once more.
    a = (pairs[..., 0] * cos).astype(np.float64) - (pairs[..., 1] * sin).astype(np.float64)
    b = (pairs[..., 0] * sin).astype(np.float64) + (pairs[..., 1] * cos).astype(np.float64)
    with np.errstate(over="ignore"):  # some of the recorded numbers are the largest that there are
        expected = bf16_encode(np.stack([a, b], -1).astype(np.float32).reshape(18, 1, 64))
    got = call(compiled("rope", heads=1, dim=64, rope_dim=64, inverse=0), [x, table], x.shape, np.uint16)
    number = np.isfinite((expected.astype(np.uint32) << 16).view(np.float32))
    np.testing.assert_array_equal(got[number], expected[number])
