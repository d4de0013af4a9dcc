"""Linear layers of the tensor-core programs, in software form on a processor: fragments, layouts, orders of sums."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode, dequantize_weight
from ds41_tvm.packing import aligned, aligned_copy, pack_linear
from ds41_tvm.program import Linear, kernel
from ds41_tvm.proof.opencl import opencl_functions

# n, k, groups, weight, out, total, tile: one chunk and several, one packed tile and several, groups, part fp8 blocks.
SHAPES = [
    (128, 320, 2, "bf16", "bf16", "f32", 32),
    (48, 96, 1, "bf16", "f32", "f64", 16),
    (96, 288, 1, "fp8", "bf16", "f64", 32),
    (48, 288, 1, "fp8", "f32", "f32", 16),
]
MOST_TOKENS = 140  # a block of many rows has 128


@functools.cache
def layer(shape: tuple[Any, ...]) -> tuple[Linear, dict[int, Any]]:
    """The layer and its functions by row tile."""
    n, k, groups, weight, out, total, tile = shape
    linear = Linear(n, k, groups, weight, out, total, tile, form="cuda", rows=16, few=1)
    wanted = {
        rows: kernel("linear", n=n, k=k, groups=groups, weight=weight, out=out, total=total, tile=tile, form="cuda",
                     rows=rows)
        for rows in (1, 16)
    }  # fmt: skip
    functions = opencl_functions(wanted.values())
    return linear, {rows: functions[w.name] for rows, w in wanted.items()}


@functools.cache
def operands(shape: tuple[Any, ...]) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """x bits, the packed weight, and the weight's values ``[n, k]``."""
    n, k, groups, weight = shape[:4]
    rng = np.random.default_rng(n + k)
    x = bf16_encode(rng.normal(size=(MOST_TOKENS, groups * k)).astype(np.float32))
    if weight == "bf16":
        w = bf16_encode(rng.normal(size=(n, k)).astype(np.float32))
        return x, pack_linear(layer(shape)[0], w), bf16_decode(w).astype(np.float64)
    codes = rng.integers(0, 256, size=(n, k), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN weights: loading refuses them
    scales = rng.integers(120, 134, size=(-(-n // 32), k // 32), dtype=np.uint8)
    values = dequantize_weight(codes, scales).astype(np.float64)
    return x, pack_linear(layer(shape)[0], codes, scales), values


def run(shape: tuple[Any, ...], rows: int, x: np.ndarray, garbage: int = 0xFFFF) -> np.ndarray:
    """The layer over tiles of `rows` tokens; the rows that pad the last tile hold `garbage`."""
    linear, functions = layer(shape)
    tiles = -(-len(x) // rows)
    padded = aligned((tiles, rows, x.shape[1]), np.uint16)
    padded.reshape(tiles * rows, x.shape[1])[:] = garbage
    padded.reshape(tiles * rows, x.shape[1])[: len(x)] = x
    out = aligned((tiles, rows, linear.n), np.float32 if linear.out == "f32" else np.uint16)
    out.view(np.uint8)[:] = 0xA5
    functions[rows](padded, *(aligned_copy(w) for w in operands(shape)[1]), out)
    return out.reshape(-1, linear.n)[: len(x)]


def assert_rounded(got: np.ndarray, x: np.ndarray, w: np.ndarray, groups: int, careful: bool) -> None:
    """The exact sum, off by float32 accumulation, then rounded once."""
    values = bf16_decode(x).astype(np.float64).reshape(len(x), groups, -1)
    weights = w.reshape(groups, -1, w.shape[1])
    exact = np.einsum("tgk,gnk->tgn", values, weights).reshape(len(x), -1)
    size = np.einsum("tgk,gnk->tgn", abs(values), abs(weights)).reshape(len(x), -1)
    allowed = size * (2.0**-22 if careful else 2.0**-20)
    if got.dtype == np.uint16:
        got = bf16_decode(got)
        allowed = allowed + np.ldexp(1.0, np.frexp(np.maximum(abs(exact), 1e-30))[1] - 9)  # half a bf16 step
    wrong = ~(abs(got.astype(np.float64) - exact) <= allowed)  # NaN is wrong too
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}"


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_alone_and_among_others(shape: tuple[Any, ...]) -> None:
    """Right, and the same bits from the program for one row and from blocks of many."""
    x, _, values = operands(shape)
    many = run(shape, 16, x)
    assert_rounded(many, x, values, shape[2], shape[5] == "f64")
    alone = np.concatenate([run(shape, 1, x[:3]), run(shape, 1, x[129:131])])
    np.testing.assert_array_equal(alone, many[[0, 1, 2, 129, 130]])
    np.testing.assert_array_equal(run(shape, 16, x), many)


@settings(max_examples=6)
@given(st.sampled_from(SHAPES), st.integers(1, MOST_TOKENS), st.integers(0, 100), st.sampled_from([0, 0x7F80, 0xFFFF]))
def test_bits_do_not_depend_on_the_batch(shape: tuple[Any, ...], tokens: int, shift: int, garbage: int) -> None:
    """Any number of tokens in any place of a tile, any padding, and a neighbour of NaN."""
    x = np.roll(operands(shape)[0], -shift, axis=0)[:tokens].copy()
    expected = np.roll(run(shape, 16, operands(shape)[0]), -shift, axis=0)[:tokens]
    bad = tokens // 2
    x[bad] = 0x7FC0
    got = run(shape, 16, x, garbage)
    kept = np.arange(tokens) != bad
    np.testing.assert_array_equal(got[kept], expected[kept])
    values = got[bad] if got.dtype == np.float32 else bf16_decode(got[bad])
    assert np.isnan(values).all()


def test_every_fp8_weight_under_far_scales() -> None:
    """Lone products are exact, from 2^-60 to 2^60, subnormal codes too."""
    shape = (96, 288, 1, "fp8", "bf16", "f64", 32)
    codes = np.resize(np.arange(256, dtype=np.uint8), (96, 288))
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = np.random.default_rng(1).integers(67, 187, size=(3, 9), dtype=np.uint8)
    linear, functions = layer(shape)
    x = np.zeros((288, 288), np.uint16)
    np.fill_diagonal(x, 0x3F80)
    out = aligned((18, 16, 96), np.uint16)
    functions[16](aligned_copy(x.reshape(18, 16, 288)), *pack_linear(linear, codes, scales), out)
    expected = dequantize_weight(codes, scales).T.astype(np.float32)
    np.testing.assert_array_equal(bf16_decode(out.reshape(288, 96)), expected)


def test_no_tokens() -> None:
    assert run(SHAPES[0], 16, operands(SHAPES[0])[0][:0]).size == 0
