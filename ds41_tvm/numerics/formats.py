"""Exact NumPy codecs of the number formats that the caches, the checkpoints and the activations use.

    bf16   s1 e8 m7, carried as its uint16 bits everywhere
    e4m3   s1 e4 m3, bias 7, no infinity, largest value 448, NaN = 0x7f (OCP FP8 E4M3, "fn")
    e2m1   s1 e2 m1, bias 1: 0 0.5 1 1.5 2 3 4 6 and their negatives (OCP FP4)
    e8m0   2^(code - 127), NaN = 255 (OCP MX scale)

Every encoder rounds to nearest, ties to the even code, after clamping to the format's range; the sign is
kept, that of zero too. Infinity clamps like any other large value; NaN stays NaN where the format has one.

Scales are computed from the bits of the block's largest magnitude, never from a logarithm.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import NumericsError

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U8 = NDArray[np.uint8]
RowKind = Literal["window", "latent", "index"]

WINDOW_BLOCK = 32
LATENT_BLOCK = 16
INDEX_BLOCK = 32
WEIGHT_BLOCK = 32
E8M0_NAN = 255
E4M3_NAN = 0x7F
# Elements i and i + 16 of a run of 32 share a byte: 16 bytes decode into two whole vectors without a shuffle.
NIBBLE_RUN = 32

_BF16_INF = 0x7F80
_E4M3_VALUES = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)], np.float32
)
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E4M3_TABLE = np.concatenate([_E4M3_VALUES, [np.nan], -_E4M3_VALUES, [-np.nan]]).astype(np.float32)
_E2M1_TABLE = np.concatenate([_E2M1_VALUES, -_E2M1_VALUES])
_E8M0_TABLE = np.array([2.0 ** (e - 127) for e in range(255)] + [np.nan]).astype(np.float32)


def bf16_encode(x: F32) -> U16:
    """f32 -> bf16 bits, round to nearest even; NaN keeps its sign and upper payload and is made quiet."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    out: U16 = np.where(is_nan, (u >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)
    return out


def bf16_decode(bits: U16) -> F32:
    """bf16 bits -> f32, exact."""
    out: F32 = (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return out


def e4m3_encode(x: F32) -> U8:
    """f32 -> e4m3 code: clamp to +-448, round to nearest even, sign kept; NaN -> 0x7f | sign."""
    x = np.asarray(x, np.float32)
    code = np.where(np.isnan(x), E4M3_NAN, _nearest_code(x, _E4M3_VALUES))
    out: U8 = (code | (np.signbit(x) << 7)).astype(np.uint8)
    return out


def e4m3_decode(code: U8) -> F32:
    """e4m3 code -> f32, exact; 0x7f and 0xff -> NaN."""
    return _E4M3_TABLE[code]


def e2m1_encode(x: F32) -> U8:
    """f32 -> e2m1 code 0..15: clamp to +-6, ties to the even code.

    0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.

    The sign is bit 3 and is kept, that of zero too. The format has no NaN: NaN becomes 7 | sign; the block
    quantisers below never store such a code.
    """
    x = np.asarray(x, np.float32)
    out: U8 = (_nearest_code(x, _E2M1_VALUES) | (np.signbit(x) << 3)).astype(np.uint8)
    return out


def e2m1_decode(code: U8) -> F32:
    """e2m1 code 0..15 -> f32, exact."""
    return _E2M1_TABLE[code]


def e8m0_decode(code: U8) -> F32:
    """e8m0 code -> f32: 2^(code - 127), exact (code 0 is the subnormal 2^-127); 255 -> NaN."""
    return _E8M0_TABLE[code]


def _nearest_code(x: F32, values: F32) -> NDArray[np.intp]:
    """Index of the value nearest to |x|, ties to the even index, saturating; midpoints are exact in f32."""
    midpoints = (values[1:] + values[:-1]) / np.float32(2)
    magnitude = np.abs(x)
    below = np.searchsorted(midpoints, magnitude, side="left")
    tie = magnitude == midpoints[np.minimum(below, len(midpoints) - 1)]
    out: NDArray[np.intp] = below + (tie & (below % 2 == 1))
    return out


# ---- block scales


def e8m0_scale_window(amax_bits: U16) -> U8:
    """e8m0 code of 2^ceil(log2(max(amax, 1e-4) / 448)) from the bf16 bits of amax; 255 if not finite.

    448 = 1.75 * 2^8, so for amax = m * 2^e with 1 <= m < 2 the power is e - 8 while m <= 1.75, else e - 7.
    The f32 1e-4 lies between two bf16 values; both have the same exponent and m <= 1.75, so clamping to the
    lower is exact.
    """
    return _e8m0_scale(amax_bits, floor=0x38D1, mantissa_limit=0x60, shift=8)


def e8m0_scale_index(amax_bits: U16) -> U8:
    """e8m0 code of 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) from the bf16 bits of amax; 255 if not finite.

    As above, with 6 = 1.5 * 2^2.
    """
    return _e8m0_scale(amax_bits, floor=0x01C0, mantissa_limit=0x40, shift=2)


def _e8m0_scale(amax_bits: U16, floor: int, mantissa_limit: int, shift: int) -> U8:
    bits = np.maximum(np.asarray(amax_bits, np.uint16), floor).astype(np.int32)
    code = (bits >> 7) - shift + ((bits & 0x7F) > mantissa_limit)
    out: U8 = np.where(bits >= _BF16_INF, E8M0_NAN, code).astype(np.uint8)
    return out


def e4m3_scale_latent(amax_bits: U16) -> U8:
    """e4m3 code of max(amax, 6 * 2^-9) / 6 from the bf16 bits of amax; 0x7f if amax is infinite or NaN."""
    bad = np.asarray(amax_bits, np.uint16) >= _BF16_INF
    amax = np.maximum(bf16_decode(np.where(bad, np.uint16(0), amax_bits)), np.float32(6 * 2.0**-9))
    sixth = (amax / np.float32(6)).astype(np.float32, copy=False)
    out: U8 = np.where(bad, E4M3_NAN, e4m3_encode(sixth)).astype(np.uint8)
    return out


# ---- block quantisers


def quantize_window(x: U16) -> tuple[U8, U8]:
    """bf16 [..., D] -> e4m3 codes [..., D], e8m0 scales [..., D/32] (official ``act_quant``, block 32).

    code = e4m3(x / scale), scale = 2^ceil(log2(max(amax, 1e-4) / 448)). A block that holds a NaN or an
    infinity gets the NaN scale and zero codes. Raises NumericsError if D is no multiple of 32.
    """
    blocks, amax_bits = _split(x, WINDOW_BLOCK)
    scales = e8m0_scale_window(amax_bits)
    return _codes(blocks, e8m0_decode(scales), e4m3_encode).reshape(x.shape), scales


def dequantize_window(codes: U8, scales: U8) -> U16:
    """e4m3 codes [..., D], e8m0 scales [..., D/32] -> bf16 bits [..., D], exact."""
    return _scaled(e4m3_decode(codes), e8m0_decode(scales), WINDOW_BLOCK)


def quantize_latent(x: U16) -> tuple[U8, U8]:
    """bf16 [..., D] -> packed e2m1 [..., D/2], e4m3 scales [..., D/16] (official ``fp4_act_quant``).

    code = e2m1(x / scale), scale = e4m3(max(amax, 6 * 2^-9) / 6); the quotient is rounded to f32 first, which
    never moves it across a tie. Bad blocks as in `quantize_window`. Raises NumericsError if D is no multiple
    of 32.
    """
    blocks, amax_bits = _split(x, LATENT_BLOCK)
    scales = e4m3_scale_latent(amax_bits)
    return pack_nibbles(_codes(blocks, e4m3_decode(scales), e2m1_encode).reshape(x.shape)), scales


def dequantize_latent(packed: U8, scales: U8) -> U16:
    """Packed e2m1 [..., D/2], e4m3 scales [..., D/16] -> bf16 bits [..., D], exact."""
    return _scaled(e2m1_decode(unpack_nibbles(packed)), e4m3_decode(scales), LATENT_BLOCK)


def quantize_index(x: U16) -> tuple[U8, U8]:
    """bf16 [..., D] -> packed e2m1 [..., D/2], e8m0 scales [..., D/32] (official ``fp4_act_quant``).

    code = e2m1(x / scale), scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)). Bad blocks as in
    `quantize_window`. Raises NumericsError if D is no multiple of 32.
    """
    blocks, amax_bits = _split(x, INDEX_BLOCK)
    scales = e8m0_scale_index(amax_bits)
    return pack_nibbles(_codes(blocks, e8m0_decode(scales), e2m1_encode).reshape(x.shape)), scales


def dequantize_index(packed: U8, scales: U8) -> U16:
    """Packed e2m1 [..., D/2], e8m0 scales [..., D/32] -> bf16 bits [..., D], exact."""
    return _scaled(e2m1_decode(unpack_nibbles(packed)), e8m0_decode(scales), INDEX_BLOCK)


def dequantize_weight(codes: U8, scales: U8) -> F32:
    """e4m3 codes [out, in], e8m0 scales [ceil(out/32), ceil(in/32)] -> f32 [out, in], exact."""
    rows, columns = codes.shape
    expected = (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    if scales.shape != expected:
        raise NumericsError(
            f"scales of a {rows} x {columns} e4m3 weight have shape {tuple(scales.shape)}, expected "
            f"{expected}: one e8m0 code per {WEIGHT_BLOCK} x {WEIGHT_BLOCK} block"
        )
    full = e8m0_decode(scales).repeat(WEIGHT_BLOCK, 0)[:rows].repeat(WEIGHT_BLOCK, 1)[:, :columns]
    return e4m3_decode(codes) * full


def _split(x: U16, block: int) -> tuple[U16, U16]:
    """[..., D] -> blocks [..., D/block, block], bits of each block's largest magnitude [..., D/block]."""
    x = np.asarray(x)
    if x.dtype != np.uint16 or x.ndim == 0 or x.shape[-1] % NIBBLE_RUN:
        raise NumericsError(
            f"cannot quantise an array of dtype {x.dtype} and shape {tuple(x.shape)}: expected bf16 bits "
            f"(uint16) with a last dimension that is a multiple of {NIBBLE_RUN}"
        )
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    # Magnitudes order like their bits, NaN above infinity: the largest bits also say whether a block is bad.
    return blocks, (blocks & np.uint16(0x7FFF)).max(-1)


def _codes(blocks: U16, scale: F32, encode) -> U8:  # type: ignore[no-untyped-def]
    bad = np.isnan(scale)[..., None]
    with np.errstate(invalid="ignore"):  # infinity over the NaN scale of a bad block
        codes = encode(bf16_decode(blocks) / scale[..., None])
    out: U8 = np.where(bad, np.uint8(0), codes)
    return out


def _scaled(values: F32, scale: F32, block: int) -> U16:
    # A block that holds bf16's last values can round up to 2^128, which is infinity.
    with np.errstate(over="ignore"):
        return bf16_encode(values * np.repeat(scale, block, axis=-1))


# ---- packing


def pack_nibbles(codes: U8) -> U8:
    """e2m1 codes [..., D] -> bytes [..., D/2].

    Within each run of 32 codes, byte i = code[i] | code[i + 16] << 4, i = 0..15.
    """
    *lead, dim = codes.shape
    runs = codes.reshape(*lead, dim // NIBBLE_RUN, 2, NIBBLE_RUN // 2)
    out: U8 = (runs[..., 0, :] | (runs[..., 1, :] << np.uint8(4))).reshape(*lead, dim // 2)
    return out


def unpack_nibbles(packed: U8) -> U8:
    """Inverse of `pack_nibbles`: bytes [..., D/2] -> e2m1 codes [..., D]."""
    *lead, half = packed.shape
    runs = packed.reshape(*lead, half // (NIBBLE_RUN // 2), NIBBLE_RUN // 2)
    return np.stack([runs & np.uint8(15), runs >> np.uint8(4)], axis=-2).reshape(*lead, 2 * half)


def row_parts(kind: RowKind, dim: int) -> tuple[int, int]:
    """Bytes of codes and bytes of scales in one packed cache row of `dim` elements."""
    if dim <= 0 or dim % NIBBLE_RUN:
        raise NumericsError(
            f"a packed {kind} row of {dim} elements is impossible: the size must be a multiple of {NIBBLE_RUN}"
        )
    parts = {
        "window": (dim, dim // WINDOW_BLOCK),
        "latent": (dim // 2, dim // LATENT_BLOCK),
        "index": (dim // 2, dim // INDEX_BLOCK),
    }
    if kind not in parts:
        raise NumericsError(f"unknown kind of packed row {kind!r}: expected one of {', '.join(parts)}")
    return parts[kind]


def row_bytes(kind: RowKind, dim: int) -> int:
    """Bytes of one packed cache row: window D + D/32, latent D/2 + D/16, index key D/2 + D/32."""
    return sum(row_parts(kind, dim))


def pack_window_row(codes: U8, scales: U8) -> U8:
    """Codes [..., D] then scales [..., D/32] -> one row of bytes."""
    return np.concatenate([codes, scales], axis=-1)


def unpack_window_row(row: U8, dim: int) -> tuple[U8, U8]:
    """Inverse of `pack_window_row`."""
    return _unpack_row("window", row, dim)


def pack_latent_row(packed: U8, scales: U8) -> U8:
    """Packed codes [..., D/2] then scales [..., D/16] -> one row of bytes."""
    return np.concatenate([packed, scales], axis=-1)


def unpack_latent_row(row: U8, dim: int) -> tuple[U8, U8]:
    """Inverse of `pack_latent_row`."""
    return _unpack_row("latent", row, dim)


def pack_index_row(packed: U8, scales: U8) -> U8:
    """Packed codes [..., D/2] then scales [..., D/32] -> one row of bytes."""
    return np.concatenate([packed, scales], axis=-1)


def unpack_index_row(row: U8, dim: int) -> tuple[U8, U8]:
    """Inverse of `pack_index_row`."""
    return _unpack_row("index", row, dim)


def _unpack_row(kind: RowKind, row: U8, dim: int) -> tuple[U8, U8]:
    codes, scales = row_parts(kind, dim)
    if row.shape[-1] != codes + scales:
        raise NumericsError(
            f"a packed {kind} row of {dim} elements has {codes + scales} bytes, the array's rows have {row.shape[-1]}"
        )
    return row[..., :codes], row[..., codes:]
