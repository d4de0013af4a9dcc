"""The TensorIR conversions, compiled for the CPU, scalar and vector, against the NumPy codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.script import tirx as T
from tvm.target import Target

from ds41_tvm.numerics import formats, tir

TARGET = Target({"kind": "llvm"})
ALL_BF16 = np.arange(65536, dtype=np.uint16)
ALL_BYTES = np.arange(256, dtype=np.uint8)


def apply(function: Callable[..., Any], out_dtype: str, *inputs: np.ndarray, vector: bool = True) -> np.ndarray:
    """Compile `function` elementwise over one or two arrays and run it."""
    size = inputs[0].size
    first, second = inputs[0], inputs[-1]
    unary = len(inputs) == 1

    @T.prim_func(s_tir=True)
    def elementwise(
        x: T.Buffer((size,), str(first.dtype), align=1),
        y: T.Buffer((size,), str(second.dtype), align=1),
        z: T.Buffer((size,), out_dtype, align=1),
    ):
        for i in range(size):
            with T.sblock("out"):
                vi = T.axis.spatial(size, i)
                if unary:
                    z[vi] = function(x[vi])
                else:
                    z[vi] = function(x[vi], y[vi])

    schedule = Schedule(elementwise)
    if vector:
        (loop,) = schedule.get_loops(schedule.get_sblock("out"))
        schedule.vectorize(schedule.split(loop, [None, 16])[1])
    out = np.zeros(size, out_dtype)
    tvm.compile(schedule.mod, target=TARGET)["main"](first.copy(), second.copy(), out)
    return out


def f32_sweep() -> np.ndarray:
    """Dense f32 values, and every midpoint of each format with its two neighbours."""
    dense = np.arange(0, 1 << 32, 4099 << 2, dtype=np.uint64).astype(np.uint32)
    codes = np.concatenate([formats.e4m3_decode(ALL_BYTES[:127]), formats.e2m1_decode(ALL_BYTES[:8])])
    codes = np.unique(codes)
    middle = ((codes[1:] + codes[:-1]) / 2).view(np.uint32)
    bf16_ties = (ALL_BF16.astype(np.uint32) << 16) | np.uint32(0x8000)
    middle = np.concatenate([middle, codes.view(np.uint32), bf16_ties, np.array([0x7F800001, 0xFF800001], np.uint32)])
    around = np.concatenate([middle, middle + np.uint32(1), middle - np.uint32(1)])
    sweep = np.concatenate([dense, around, around ^ np.uint32(1 << 31)])
    return np.resize(sweep, -(-sweep.size // 16) * 16).view(np.float32)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, except that one NaN is as good as another."""
    if expected.dtype == np.float32:
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(got), nan)
        np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("bf16_to_f32", ALL_BF16),
        ("e4m3_to_f32", ALL_BYTES),
        ("e2m1_to_f32", ALL_BYTES[:16]),
        ("e8m0_to_f32", ALL_BYTES),
    ],
)
def test_decoders_on_every_code(name: str, codes: np.ndarray, vector: bool) -> None:
    expected = getattr(formats, name.replace("_to_f32", "_decode"))(codes)
    same(apply(getattr(tir, name), "float32", codes, vector=vector), expected)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("bf16", "uint16"), ("e4m3", "uint8"), ("e2m1", "uint8")])
def test_encoders_on_a_dense_sweep_with_all_ties(name: str, dtype: str, vector: bool) -> None:
    x = f32_sweep()
    got = apply(getattr(tir, f"f32_to_{name}"), dtype, x, vector=vector)
    same(got, getattr(formats, f"{name}_encode")(x))


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", "uint8"), ("e2m1", "uint8")])
def test_encoders_on_every_bf16(name: str, dtype: str) -> None:
    x = formats.bf16_decode(ALL_BF16)
    same(apply(getattr(tir, f"f32_to_{name}"), dtype, x), getattr(formats, f"{name}_encode")(x))


def test_round_bf16() -> None:
    x = f32_sweep()
    same(apply(tir.round_bf16, "float32", x), formats.bf16_decode(formats.bf16_encode(x)))


def test_twice_e2m1_is_an_integer() -> None:
    expected = (2 * formats.e2m1_decode(ALL_BYTES[:16])).astype(np.int32)
    same(apply(tir.e2m1_to_twice, "int32", ALL_BYTES[:16]), expected)
    same(apply(tir.e2m1_to_twice, "int32", ALL_BYTES), np.tile(expected, 16))


def test_e8m0_inverse_on_every_scale_that_occurs() -> None:
    codes = np.arange(256, dtype=np.uint8)
    used = slice(1, 254)
    same(
        apply(tir.e8m0_inverse, "float32", codes)[used],
        np.ldexp(np.float32(1), 127 - codes.astype(np.int32))[used],
    )


@pytest.mark.parametrize("name", ["e8m0_scale_window", "e8m0_scale_index", "e4m3_scale_latent"])
def test_scales_for_every_amax(name: str) -> None:
    amax = ALL_BF16[:32768]
    same(apply(getattr(tir, name), "uint8", amax), getattr(formats, name)(amax))


def test_nibble_helpers() -> None:
    codes = np.arange(32, dtype=np.uint8) % 16
    packed = apply(tir.join_nibbles, "uint8", codes[:16], codes[16:])
    same(packed, formats.pack_nibbles(codes))
    same(apply(tir.low_nibble, "uint8", packed), codes[:16])
    same(apply(tir.high_nibble, "uint8", packed), codes[16:])


@pytest.mark.parametrize(
    ("kind", "encode", "scales"),
    [
        ("window", formats.e4m3_encode, range(105, 248)),
        ("index", formats.e2m1_encode, range(1, 254)),
        ("latent", formats.e2m1_encode, range(1, 127)),
    ],
)
def test_element_codes_for_every_scale(kind: str, encode: Callable[..., np.ndarray], scales: range) -> None:
    """The one-element encoders against float division, for all bf16 values around each scale's range."""
    decode_scale = formats.e4m3_decode if kind == "latent" else formats.e8m0_decode
    mantissas = np.arange(128, dtype=np.uint16)
    for scale in scales:
        centre = int(np.frexp(decode_scale(np.uint8(scale)))[1]) + 126
        fields = np.clip(np.arange(centre - 4, centre + 12), 0, 254).astype(np.uint16)
        x = ((fields[:, None] << 7) | mantissas).reshape(-1).astype(np.uint16)
        x = np.concatenate([x, x | 0x8000]).astype(np.uint16)
        codes = np.full(x.shape, scale, np.uint8)
        if scale == scales[0]:
            compiled = compile_pair(getattr(tir, f"{kind}_code"), x.size)
        out = np.zeros(x.shape, np.uint8)
        compiled(x, codes, out)
        np.testing.assert_array_equal(
            out, encode(formats.bf16_decode(x) / decode_scale(codes)), err_msg=f"scale {scale}"
        )


def compile_pair(function: Callable[..., Any], size: int) -> Any:
    @T.prim_func(s_tir=True)
    def elementwise(
        x: T.Buffer((size,), "uint16", align=1),
        s: T.Buffer((size,), "uint8", align=1),
        z: T.Buffer((size,), "uint8", align=1),
    ):
        for i in range(size):
            with T.sblock("out"):
                vi = T.axis.spatial(size, i)
                z[vi] = function(x[vi], s[vi])

    schedule = Schedule(elementwise)
    (loop,) = schedule.get_loops(schedule.get_sblock("out"))
    schedule.vectorize(schedule.split(loop, [None, 16])[1])
    return tvm.compile(schedule.mod, target=TARGET)["main"]


@pytest.mark.parametrize("kind", ["window", "latent", "index"])
def test_elements_of_bad_blocks_are_zero_codes_and_nan_values(kind: str) -> None:
    nan_scale = 0x7F if kind == "latent" else 255
    x = np.resize(np.array([0x3F80, 0x7F80, 0x7FC0, 0xFFC1], np.uint16), 16)
    scales = np.full(16, nan_scale, np.uint8)
    codes = apply(getattr(tir, f"{kind}_code"), "uint8", x, scales)
    assert not codes.any()
    assert np.isnan(apply(getattr(tir, f"{kind}_value"), "float32", codes, scales)).all()


@pytest.mark.parametrize("kind", ["window", "latent", "index"])
def test_values_are_the_dequantised_rows(kind: str) -> None:
    x = formats.bf16_encode(np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32) * np.float32(30))
    codes, scales = getattr(formats, f"quantize_{kind}")(x)
    flat = codes if kind == "window" else formats.unpack_nibbles(codes)
    per_element = np.repeat(scales, 64 // scales.shape[-1], axis=-1)
    value = apply(getattr(tir, f"{kind}_value"), "float32", flat.reshape(-1), per_element.reshape(-1))
    np.testing.assert_array_equal(
        formats.bf16_encode(value), getattr(formats, f"dequantize_{kind}")(codes, scales).reshape(-1)
    )
