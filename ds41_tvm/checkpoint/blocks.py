"""e4m3 weights with one e8m0 scale per 32x32 block: exact conversion from and to bf16, in bands of rows.

Released linears are stored this way (``quantization_config``: ``fp8``, ``weight_block_size`` [32, 32],
``ue8m0``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import NonFiniteWeight, NumericsError
from ..numerics.formats import bf16_decode, bf16_encode, e4m3_decode, e8m0_decode
from .tensors import SCALE_BLOCK, scale_shape

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

BAND_VALUES = 1 << 18  # values converted at a time: the temporaries stay in the cache
ZERO_BLOCK_SCALE = 127  # 2^0; the codes of an all-zero block are zero whatever the scale


def band_rows(columns: int) -> int:
    """Rows of a band: whole blocks, about ``BAND_VALUES`` values."""
    return SCALE_BLOCK * max(1, BAND_VALUES // (SCALE_BLOCK * max(1, columns)))


def dequantize_block(weight: U8, scale: U8) -> U16:
    """bf16(f32(e4m3 code) * 2^(scale - 127)) of each 32x32 block.

    ``weight`` uint8 [R, C], ``scale`` uint8 [ceil(R/32), ceil(C/32)] -> uint16 (bf16 bits) [R, C]. e4m3 has
    fewer mantissa bits than bf16, so nothing is rounded unless the value is subnormal in bf16. Raises
    ``NumericsError`` on shapes that do not fit, ``NonFiniteWeight`` where a value is NaN or overflows bf16.
    """
    _check(weight, "weight", np.uint8)
    _check(scale, "scale", np.uint8)
    if scale.shape != scale_shape(weight.shape):
        raise NumericsError(
            f"scale: shape {scale.shape}; expected {scale_shape(weight.shape)}, one per 32x32 block of {weight.shape}"
        )
    rows, columns = weight.shape
    out = np.empty((rows, columns), np.uint16)
    step = band_rows(columns)
    for top in range(0, rows, step):
        codes = weight[top : top + step]
        factor = e8m0_decode(scale[top // SCALE_BLOCK : (top + step) // SCALE_BLOCK])
        factor = np.repeat(factor, SCALE_BLOCK, axis=1)[:, :columns]
        factor = np.repeat(factor, SCALE_BLOCK, axis=0)[: len(codes)]
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, by name
            out[top : top + step] = bf16_encode(e4m3_decode(codes) * factor)
    if not finite_bf16(out):
        raise NonFiniteWeight(
            "weight times scale: NaN or beyond bf16's range; expected finite products; the block's scale is damaged"
        )
    return out


def quantize_block(values: F32) -> tuple[U8, U8]:
    """codes = e4m3(value / 2^k), k = ceil(log2(amax / 448)) of each 32x32 block, from the bits of amax.

    ``values`` float32 [R, C] -> codes uint8 [R, C], scales uint8 (e8m0) [ceil(R/32), ceil(C/32)]. k is at
    least -126; an all-zero block has scale 1. Division by a power of two is exact; e4m3 rounds to nearest,
    ties to even. Raises ``NonFiniteWeight`` on NaN or infinity, ``NumericsError`` on another dtype or rank.
    """
    _check(values, "values", np.float32)
    rows, columns = values.shape
    grid = scale_shape(values.shape)
    codes, scales = np.empty((rows, columns), np.uint8), np.empty(grid, np.uint8)
    step = band_rows(columns)
    for top in range(0, rows, step):
        rows_here, blocks_here = (
            slice(top, top + step),
            slice(top // SCALE_BLOCK, (top + step) // SCALE_BLOCK),
        )
        codes[rows_here], scales[blocks_here] = _quantize_band(values[rows_here])
    return codes, scales


def quantize_bf16(weight: U16) -> tuple[U8, U8]:
    """``quantize_block`` of bf16 bits [R, C], without a float32 copy of the whole weight."""
    _check(weight, "weight", np.uint16)
    codes, scales = np.empty(weight.shape, np.uint8), np.empty(scale_shape(weight.shape), np.uint8)
    step = band_rows(weight.shape[1])
    for top in range(0, weight.shape[0], step):
        rows_here, blocks_here = (
            slice(top, top + step),
            slice(top // SCALE_BLOCK, (top + step) // SCALE_BLOCK),
        )
        codes[rows_here], scales[blocks_here] = _quantize_band(bf16_decode(weight[rows_here]))
    return codes, scales


def _quantize_band(band: F32) -> tuple[U8, U8]:
    rows, columns = band.shape
    up, across = scale_shape(band.shape)
    missing = (up * SCALE_BLOCK - rows, across * SCALE_BLOCK - columns)
    if any(missing):  # incomplete blocks are filled up with zeros, which leave amax as it is
        band = np.pad(band, ((0, missing[0]), (0, missing[1])))
    blocks = band.reshape(up, SCALE_BLOCK, across, SCALE_BLOCK)
    bits = np.abs(blocks).max(axis=(1, 3)).view(np.uint32).astype(np.int64)
    if (bits >= 0x7F800000).any():
        raise NonFiniteWeight("weight: NaN or infinite; expected finite values to quantise")
    # 448 = 1.75 * 2^8: for amax = m * 2^e the power is e - 8 while m <= 1.75, else e - 7
    code = np.clip((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000), 1, 254)
    code[bits == 0] = ZERO_BLOCK_SCALE
    inverse = e8m0_decode((254 - code).astype(np.uint8))  # amax < 2^128 keeps code below 248: a normal number
    codes = e4m3_encode_scaled(blocks * inverse[:, None, :, None]).reshape(band.shape)
    return codes[:rows, :columns], code.astype(np.uint8)


def e4m3_encode_scaled(x: F32) -> U8:
    """e4m3 codes of float32 values of magnitude at most 448: round to nearest even, nothing is clamped.

    Integer arithmetic on the bits, several times faster than the general ``numerics.formats.e4m3_encode``.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    bits = bits & np.uint32(0x7FFFFFFF)
    # normal e4m3 (>= 2^-6): drop 20 mantissa bits with rounding, then move the bias from 127 to 7
    odd = (bits >> np.uint32(20)) & np.uint32(1)
    code = ((bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
    small = bits < np.uint32(0x3C800000)
    # subnormal e4m3, multiples of 2^-9: after adding 2^14 the float's last bit weighs 2^-9, so the sum rounds
    shifted = bits[small].view(np.float32) + np.float32(2.0**14)
    code[small] = shifted.view(np.uint32) - np.uint32(0x46800000)
    return (code | sign).astype(np.uint8)


def finite_bf16(bits: U16) -> bool:
    """Whether no value of bf16 ``bits`` is NaN or infinite, read in bands."""
    flat = bits.reshape(-1)
    parts = (flat[i : i + BAND_VALUES] for i in range(0, flat.size, BAND_VALUES))
    return all(int((part & np.uint16(0x7FFF)).max()) < 0x7F80 for part in parts)


def nan_free_e4m3(codes: U8) -> bool:
    """Whether no e4m3 code is NaN (0x7f, 0xff), read in bands."""
    flat = codes.reshape(-1)
    parts = (flat[i : i + BAND_VALUES] for i in range(0, flat.size, BAND_VALUES))
    return all(int((part & np.uint8(0x7F)).max()) < 0x7F for part in parts)


def _check(array: object, name: str, dtype: type) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 2 or not array.size:
        seen = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise NumericsError(f"{name}: {seen}; expected a non-empty {np.dtype(dtype)} array of two axes")
