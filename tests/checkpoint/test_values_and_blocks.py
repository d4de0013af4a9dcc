"""The rule of the golden values, and the 32x32-block conversions."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.checkpoint import dequantize_block, golden_value, quantize_block, random_input
from ds41_tvm.checkpoint.blocks import e4m3_encode_scaled, finite_bf16, nan_free_e4m3, quantize_bf16
from ds41_tvm.checkpoint.values import golden_rows
from ds41_tvm.errors import NonFiniteWeight, NumericsError
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode, e4m3_decode, e4m3_encode, e8m0_decode

GOLDEN = Path(__file__).parents[1] / "golden"


def one_by_one(seed: str, name: str, count: int, factor: float, offset: float) -> list[float]:
    """The rule in Python's own integers."""
    mask = 2**64 - 1
    state = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    values = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        values.append(offset + (((z >> 40) / 2**24) * 2 - 1) * factor)
    return values


@pytest.mark.parametrize(
    ("name", "shape", "factor", "offset"),
    [
        ("layers.3.attn.wq_a.weight", (7, 12), math.sqrt(3 / 12), 0.0),
        ("layers.3.attn.attn_sink", (8,), 0.5, 0.0),
        ("layers.3.attn.q_norm.weight", (9,), 0.1, 1.0),
        ("layers.3.attn.indexer.k_norm.weight", (9,), 0.1, 1.0),
        ("x.3.14", (2, 3, 4), 1.5, 0.0),
        ("layers.0.attn.wkv.weight", (3, 40_000), math.sqrt(3 / 40_000), 0.0),
    ],
)
def test_golden_value(name: str, shape: tuple[int, ...], factor: float, offset: float) -> None:
    expected = np.array(one_by_one("seed", name, math.prod(shape), factor, offset)).astype(np.float32)
    seen = golden_value("seed", name, shape)
    assert seen.dtype == np.float32
    assert np.array_equal(seen, expected.reshape(shape))


@given(first=st.integers(0, 100_000), count=st.integers(0, 100_000))
@settings(max_examples=20, deadline=None)
def test_any_part_is_the_part_of_the_whole(first: int, count: int) -> None:
    whole = golden_rows("s", "layers.0.attn.wkv.weight", (400, 512), 0, 204_800)
    part = golden_rows("s", "layers.0.attn.wkv.weight", (400, 512), first, count)
    assert np.array_equal(part, whole[first : first + count])


def test_seed_and_name_matter() -> None:
    values = [golden_value(s, n, (64,)).tobytes() for s in ("a", "b") for n in ("x.0.0", "x.0.1", "x.1.0")]
    assert len(set(values)) == 6


def test_random_input_is_the_golden_input() -> None:
    x = random_input("tiny-a", 2, 1, 1, 3, 64)
    assert x.shape == (1, 3, 64)
    assert np.array_equal(x, bf16_encode(golden_value("tiny-a", "x.2.1", (1, 3, 64))))
    assert np.abs(bf16_decode(x)).max() <= 1.5


# ---- blocks


def block_scale(amax: float) -> float:
    """2^ceil(log2(amax / 448)) by search, for positive amax."""
    k = -126
    while 448 * 2.0**k < amax:
        k += 1
    return 2.0**k


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 100),
    exponent=st.integers(-100, 100),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_quantize_block_by_its_definition(rows: int, columns: int, exponent: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, columns)) * 2.0**exponent).astype(np.float32)
    codes, scales = quantize_block(values)
    assert codes.shape == (rows, columns)
    assert scales.shape == (-(-rows // 32), -(-columns // 32))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            scale = block_scale(float(np.abs(values[here]).max()))
            assert e8m0_decode(scales[i, j]) == scale
            assert np.array_equal(codes[here], e4m3_encode(values[here] / np.float32(scale)))


@given(rows=st.integers(1, 70), columns=st.integers(1, 100), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_dequantize_block_by_its_definition(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = rng.integers(0, 247, (-(-rows // 32), -(-columns // 32)), np.uint8)
    expected = np.empty((rows, columns), np.float32)
    for r in range(rows):
        for c in range(columns):
            expected[r, c] = e4m3_decode(codes[r, c]) * e8m0_decode(scales[r // 32, c // 32])
    assert np.array_equal(dequantize_block(codes, scales), bf16_encode(expected))


def test_dequantizing_is_exact_and_quantising_again_gives_the_same_values() -> None:
    rng = np.random.default_rng(5)
    codes, scales = quantize_block(rng.standard_normal((96, 64)).astype(np.float32))
    bf16 = dequantize_block(codes, scales)
    exact = e4m3_decode(codes).astype(np.float64) * np.kron(e8m0_decode(scales).astype(np.float64), np.ones((32, 32)))
    assert np.array_equal(bf16_decode(bf16).astype(np.float64), exact)
    assert np.array_equal(dequantize_block(*quantize_bf16(bf16)), bf16)


def test_scale_at_the_edges() -> None:
    """448 * 2^k still has scale 2^k; the next float has the next scale; zeros have scale 1."""
    for amax, code in (
        (448.0, 127),
        (np.nextafter(np.float32(448), np.float32(449)), 128),
        (1.75, 119),
        (0.0, 127),
    ):
        values = np.zeros((32, 32), np.float32)
        values[3, 5] = -amax
        assert quantize_block(values)[1][0, 0] == code
    tiny = np.full((32, 32), 1e-40, np.float32)  # a subnormal: the scale stays a normal number
    codes, scales = quantize_block(tiny)
    assert scales[0, 0] == 1
    assert np.array_equal(codes, e4m3_encode(tiny * np.float32(2.0**126)))


def test_fast_e4m3_encoder_is_the_exact_one() -> None:
    values = e4m3_decode(np.arange(127, dtype=np.uint8))
    middles = (values[1:] + values[:-1]) / np.float32(2)
    near = [np.nextafter(middles, np.float32(end)) for end in (0, 500)]
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([values, middles, *near, bits[np.abs(bits) <= 448], np.array([1e-45, 0.0], np.float32)])
    x = np.concatenate([x, -x]).astype(np.float32)
    assert np.array_equal(e4m3_encode_scaled(x), e4m3_encode(x))


def test_blocks_refuse() -> None:
    good = np.zeros((32, 64), np.uint8)
    with pytest.raises(NumericsError, match=r"scale: shape \(1, 1\); expected \(1, 2\)"):
        dequantize_block(good, np.zeros((1, 1), np.uint8))
    with pytest.raises(NumericsError, match="weight: uint16"):
        dequantize_block(good.astype(np.uint16), np.zeros((1, 2), np.uint8))
    with pytest.raises(NumericsError, match="values: float64"):
        quantize_block(np.zeros((32, 32)))  # type: ignore[arg-type]
    with pytest.raises(NumericsError, match="values: list"):
        quantize_block([[1.0]])  # type: ignore[arg-type]
    with pytest.raises(NonFiniteWeight, match="NaN or beyond"):
        dequantize_block(good, np.array([[127, 255]], np.uint8))
    with pytest.raises(NonFiniteWeight, match="NaN or beyond"):
        dequantize_block(np.full((32, 32), 0x7E, np.uint8), np.array([[247]], np.uint8))
    for bad in (np.nan, np.inf, -np.inf):
        values = np.ones((32, 32), np.float32)
        values[31, 31] = bad
        with pytest.raises(NonFiniteWeight, match="NaN or infinite"):
            quantize_block(values)


def test_scans_find_the_one_bad_value() -> None:
    size = 600_000  # several bands
    for place in (0, 299_999, size - 1):
        codes = np.full(size, 0xFE, np.uint8)
        assert nan_free_e4m3(codes)
        codes[place] = 0xFF
        assert not nan_free_e4m3(codes)
        bits = np.full(size, 0xFF7F, np.uint16)
        assert finite_bf16(bits)
        bits[place] = 0xFF80
        assert not finite_bf16(bits)
