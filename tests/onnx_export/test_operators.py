"""Norm, rotation, linear layers, pooling: the reference's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics import formats as f
from ds41_tvm.onnx_export import compressor, linear, norm, output, rope
from ds41_tvm.reference import compressor as ref_compressor
from ds41_tvm.reference import linear as ref_linear
from ds41_tvm.reference import norm as ref_norm
from ds41_tvm.reference import output as ref_output
from ds41_tvm.reference import rope as ref_rope

Run = Callable[..., Any]


def values(seed: int, *shape: int, scale: float = 1) -> np.ndarray:
    """bf16 bits of normal numbers."""
    return f.bf16_encode((np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32))


def weight(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("scale", [1, 1e-12, 1e-19, 1e19])
def test_norm(ort: Run, scale: float) -> None:
    x, w = values(1, 200, 96, scale=scale), values(2, 96)
    got = ort(norm.rms_norm(1e-20), f.bf16_decode(x), f.bf16_decode(w))
    np.testing.assert_array_equal(f.bf16_encode(got), ref_norm.rms_norm(x, w, 1e-20))


def test_rotation_table(run: Run, numerics: dict[str, np.ndarray]) -> None:
    freqs = ref_rope.rope_frequencies(AttentionConfig.preset("flash"), 1)
    positions = np.concatenate([numerics["rope_pos"], np.arange(0, 1048576, 4001)]).astype(np.int64)
    cos, sin = run(rope.rope_table, positions, freqs)
    table = np.stack([cos, sin], axis=-1)
    np.testing.assert_array_equal(table.view(np.uint32), ref_rope.rope_table(freqs, positions).view(np.uint32))
    recorded = numerics["rope_flash_yarn"]
    np.testing.assert_array_equal(table[: len(recorded)].view(np.uint32), recorded.view(np.uint32))


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation(run: Run, inverse: bool) -> None:
    x = values(3, 40, 3, 32)
    freqs = ref_rope.rope_frequencies(AttentionConfig.preset("tiny"), 2)
    table = ref_rope.rope_table(freqs, np.arange(40))
    expected = ref_rope.rotate(x, table, inverse)
    given = (f.bf16_decode(x)[None], table[:, None, :, 0].copy(), table[:, None, :, 1].copy())
    got = run(rope.rotate(8, inverse), *given)[0]
    np.testing.assert_array_equal(f.bf16_encode(got), expected)


def test_a_bf16_weight_and_an_f32_weight(ort: Run) -> None:
    # Whole numbers: the sums are exact, whatever their order.
    rng = np.random.default_rng(4)
    x, w = (f.bf16_encode(rng.integers(-9, 9, shape).astype(np.float32)) for shape in ((7, 64), (48, 64)))
    expected = ref_linear.linear(x, w)
    for function in (linear.linear, linear.linear_wide):
        for form in (weight(w), f.bf16_decode(w)):
            np.testing.assert_array_equal(f.bf16_encode(ort(function, f.bf16_decode(x)[None], form)[0]), expected)


def test_a_wide_sum_is_rounded_once(ort: Run) -> None:
    x, w = values(11, 20, 3000), values(12, 64, 3000)
    got = f.bf16_encode(ort(linear.linear_wide, f.bf16_decode(x)[None], weight(w))[0])
    np.testing.assert_array_equal(got, ref_linear.linear(x, w))


@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (33, 32), (96, 96)])
def test_fp8(ort: Run, rows: int, columns: int) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 126, (rows, columns)).astype(np.uint8) | (rng.integers(0, 2, (rows, columns)) << 7).astype(
        np.uint8
    )
    scales = rng.integers(110, 130, (-(-rows // 32), -(-columns // 32))).astype(np.uint8)
    dequantised = ort(linear.dequantize_weight(rows, columns), codes, scales)
    np.testing.assert_array_equal(dequantised, f.dequantize_weight(codes, scales))
    x = values(6, 9, columns)
    expected = f.bf16_decode(ref_linear.linear_fp8(x, codes, scales))
    got = ort(linear.linear_fp8(rows, columns), f.bf16_decode(x)[None], codes, scales)[0]
    assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)
    got = ort(linear.linear_fp8(rows, columns, wide=True), f.bf16_decode(x)[None], codes, scales)[0]
    np.testing.assert_array_equal(got, expected)


def test_grouped_output(ort: Run) -> None:
    rng = np.random.default_rng(7)
    o, w = (f.bf16_encode(rng.integers(-9, 9, shape).astype(np.float32)) for shape in ((5, 8, 32), (4 * 6, 64)))
    got = ort(output.output_groups(4, 6, 64), f.bf16_decode(o)[None], weight(w))[0]
    np.testing.assert_array_equal(f.bf16_encode(got), ref_output.output_groups(o, w, 4))


@pytest.mark.parametrize(("ratio", "tokens"), [(2, 0), (2, 1), (2, 7), (3, 9), (4, 11)])
def test_groups(run: Run, ratio: int, tokens: int) -> None:
    members = np.random.default_rng(8).standard_normal((2, tokens, 2, 32)).astype(np.float32)
    kv, gate, rest = run(compressor.split_groups(ratio), members)
    done = tokens // ratio * ratio
    np.testing.assert_array_equal(kv, members[:, :done, 0].reshape(2, -1, ratio, 32))
    np.testing.assert_array_equal(gate, members[:, :done, 1].reshape(2, -1, ratio, 32))
    np.testing.assert_array_equal(rest, members[:, done:])
    got = run(compressor.pool_groups(ratio), kv, gate)
    expected = f.bf16_decode(np.stack([ref_compressor.pool_groups(a, b) for a, b in zip(kv, gate, strict=True)]))
    # The exponentials of the engines differ in their last bits, which may move a bf16 rounding.
    np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=1e-6)
