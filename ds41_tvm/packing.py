"""Weights in the layouts that the kernels read: columns of a tile side by side, inner indices downwards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.program import Linear

ALIGNMENT = 64  # what compiled code assumes of every buffer, and does not check


def aligned(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An uninitialised C-contiguous array whose data start at a multiple of `ALIGNMENT` bytes."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    offset = -address(raw) % ALIGNMENT
    out: NDArray[Any] = raw[offset : offset + size].view(dtype).reshape(shape)
    return out


def address(array: NDArray[Any]) -> int:
    """Where the first element lies; faster than ``array.ctypes.data``, which makes an object first."""
    where: int = array.__array_interface__["data"][0]
    return where


def aligned_copy(array: NDArray[Any]) -> NDArray[Any]:
    """`array` itself if a kernel can take it (aligned, contiguous, writable as DLPack demands), else a copy."""
    if array.flags.c_contiguous and array.flags.writeable and address(array) % ALIGNMENT == 0:
        return array
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


def pack_linear(linear: Linear, weight: NDArray[Any], scale: NDArray[Any] | None = None) -> tuple[NDArray[Any], ...]:
    """``[n, k]`` -> ``[n / tile, words, tile]``, a word holding inner indices 2i and 2i + 1 (f32: one index).

    bf16 bits (uint16) give uint32 words, e4m3 codes (uint8) uint16 words and their e8m0 scales ``[n/32, k/32]``, f32
    its own values; an odd k is padded with a zero. `weight` must already have the format that `linear` names.
    """
    n, k = weight.shape
    tiles = n // linear.tile
    if linear.weight == "f32":
        out = aligned((tiles, k, linear.tile), np.float32)
        out[...] = weight.reshape(tiles, linear.tile, k).transpose(0, 2, 1)
        return (out,)
    if k % 2:
        weight = np.pad(weight, ((0, 0), (0, 1)))
    word = {"bf16": np.uint32, "fp8": np.uint16}[linear.weight]
    pairs = np.ascontiguousarray(weight).view(word)
    out = aligned((tiles, pairs.shape[1], linear.tile), word)
    for t in range(tiles):  # one tile at a time: both sides stay in the cache
        out[t] = pairs[t * linear.tile : (t + 1) * linear.tile].T
    if linear.weight == "bf16":
        return (out,)
    assert scale is not None  # the caller looks the scale up beside every fp8 weight
    packed_scale = aligned(scale.shape, np.uint8)
    packed_scale[...] = scale
    return out, packed_scale
