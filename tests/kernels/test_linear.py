"""Linear layers of every weight format and shape against exact sums, alone and among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode, dequantize_weight
from ds41_tvm.packing import pack_linear
from ds41_tvm.program import Linear, Program
from ds41_tvm.target import parse_target

# n, k, groups, weight, out, summed in f64. Tiles of 64, 32, 16, 2 and 1 columns; odd k; whole and part fp8 blocks.
SHAPES = [
    (128, 320, 2, "bf16", "bf16", False),
    (48, 96, 1, "bf16", "bf16", True),
    (10, 7, 1, "bf16", "bf16", False),
    (21, 50, 3, "bf16", "bf16", True),
    (32, 256, 1, "bf16", "f32", True),
    (96, 64, 1, "fp8", "bf16", True),
    (48, 288, 1, "fp8", "bf16", False),
    (32, 66, 1, "f32", "f32", True),
]
TOKENS = 19  # more than a row tile, no multiple of one
GARBAGE = 0xFFFF


def layer(target: str, n: int, k: int, groups: int, weight: str, out: str, careful: bool) -> Linear:
    """As `Program` chooses the tile and the form for a target."""
    program = Program(config=AttentionConfig.preset("tiny"), layers=(0,), target=parse_target(target))
    return program._linear("wq_a" if careful else "wkv", n, k, groups, weight=weight, result=out)


def operands(n: int, k: int, groups: int, weight: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Any, np.ndarray]:
    """x bits [TOKENS, groups * k], the stored weight, its scales, and its values in float64."""
    rng = np.random.default_rng(seed)
    x = bf16_encode(rng.normal(size=(TOKENS, groups * k)).astype(np.float32))
    x[3] = 0
    if weight == "f32":
        w = rng.normal(size=(n, k)).astype(np.float32)
        return x, w, None, w.astype(np.float64)
    if weight == "bf16":
        w = bf16_encode(rng.normal(size=(n, k)).astype(np.float32))
        return x, w, None, bf16_decode(w).astype(np.float64)
    codes = rng.integers(0, 256, size=(n, k), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN weights: loading refuses them
    scales = rng.integers(120, 134, size=(-(-n // 32), -(-k // 32)), dtype=np.uint8)
    return x, codes, scales, dequantize_weight(codes, scales).astype(np.float64)


def run(call: Any, compile_as: Any, form: str, linear: Linear, rows: int, x: np.ndarray, packed: Any) -> np.ndarray:
    """Tiles of `rows` tokens; the rows that pad the last tile hold garbage."""
    tiles = -(-len(x) // rows)
    padded = np.full((tiles * rows, x.shape[1]), GARBAGE, np.uint16)
    padded[: len(x)] = x
    function = compile_as(form, "linear", **(dict(linear.kernels()[1].params) | {"rows": rows}))
    dtype = np.float32 if linear.out == "f32" else np.uint16
    out = call(function, [padded.reshape(tiles, rows, -1), *packed], (tiles, rows, linear.n), dtype)
    return out.reshape(-1, linear.n)[: len(x)]


def assert_rounded(got: np.ndarray, x: np.ndarray, w: np.ndarray, groups: int, careful: bool) -> None:
    """The exact sum, off by float32 accumulation, then rounded once: any other rounding point is outside."""
    values = bf16_decode(x).astype(np.float64).reshape(len(x), groups, -1)
    weights = w.reshape(groups, -1, w.shape[1])
    exact = np.einsum("tgk,gnk->tgn", values, weights).reshape(len(x), -1)
    size = np.einsum("tgk,gnk->tgn", abs(values), abs(weights)).reshape(len(x), -1)
    allowed = size * (2.0**-22 if careful else 2.0**-20)
    if got.dtype == np.uint16:
        got = bf16_decode(got)
        _, exponent = np.frexp(np.maximum(abs(exact), 1e-30))
        allowed = allowed + np.ldexp(1.0, exponent - 9)  # half a bf16 step
    wrong = ~(abs(got.astype(np.float64) - exact) <= allowed)  # NaN is wrong too
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}"


@pytest.mark.parametrize(("n", "k", "groups", "weight", "out", "careful"), SHAPES)
def test_every_format(
    call: Any, compile_as: Any, forms: list[str], n: int, k: int, groups: int, weight: str, out: str, careful: bool
) -> None:
    """The same tokens one by one and in tiles give the same bits, and those are the rounded sums."""
    x, stored, scales, values = operands(n, k, groups, weight)
    for form in forms:
        linear = layer("cpu" if form == "plain" else form, n, k, groups, weight, out, careful)
        packed = pack_linear(linear, stored, scales)
        rows_of = sorted(linear.kernels()) if form != "plain" else [6]
        results = [run(call, compile_as, form, linear, rows, x, packed) for rows in rows_of]
        for got in results:
            assert got.tobytes() == results[0].tobytes(), (form, linear)
        assert_rounded(results[0], x, values, groups, careful)


def test_one_row_of_garbage_stays_alone(call: Any, compile_as: Any, forms: list[str]) -> None:
    x, stored, _, _ = operands(48, 96, 1, "bf16")
    bad = x.copy()
    bad[5] = GARBAGE
    bad[11, 40] = 0x7F80
    rest = [t for t in range(TOKENS) if t not in (5, 11)]
    for form in forms:
        linear = layer("cpu" if form == "plain" else form, 48, 96, 1, "bf16", "bf16", False)
        packed = pack_linear(linear, stored)
        rows = max(linear.kernels())
        good, got = (run(call, compile_as, form, linear, rows, v, packed) for v in (x, bad))
        np.testing.assert_array_equal(got[rest], good[rest])
        assert not np.isfinite(bf16_decode(got[5])).any(), form


def test_extreme_scales_of_fp8_blocks(call: Any, compile_as: Any, forms: list[str]) -> None:
    """Scales from 2^-60 to 2^60 next to each other: the decoded weights are exact, so are lone products."""
    n, k = 64, 96
    rng = np.random.default_rng(1)
    _, codes, _, _ = operands(n, k, 1, "fp8")
    scales = rng.integers(67, 187, size=(2, 3), dtype=np.uint8)
    values = dequantize_weight(codes, scales)
    x = np.zeros((TOKENS, k), np.uint16)
    for t in range(TOKENS):
        x[t, (5 * t) % k] = 0x3F80  # one
    expected = bf16_encode(bf16_decode(x) @ values.T)
    for form in forms:
        linear = layer("cpu" if form == "plain" else form, n, k, 1, "fp8", "bf16", False)
        packed = pack_linear(linear, codes, scales)
        one, got = (run(call, compile_as, form, linear, rows, x, packed) for rows in sorted(linear.kernels()))
        assert one.tobytes() == got.tobytes(), form
        # -0 from a product of zero and a negative weight becomes +0 in the sum.
        np.testing.assert_array_equal(bf16_decode(got), bf16_decode(expected), err_msg=form)
