"""Weights and inputs that follow from their names: the rule under which the golden values were recorded.

    salt  = first 8 bytes, little-endian, of SHA-256("{seed}/{name}")
    z_i   = SplitMix64 output i of the generator whose state starts at salt
    u_i   = ((z_i >> 40) / 2^24) * 2 - 1                    float64, in [-1, 1)
    value = u * 0.5            names ending ``attn_sink``
            1 + u * 0.1        names ending ``norm.weight``
            u * 1.5            inputs (``x.{layer}.{step}``)
            u * sqrt(3 / in)   every other weight; ``in`` is its last dimension

in float64, rounded to float32; row-major. Any part can be computed by itself, since state i is salt + i *
gamma.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..numerics.formats import bf16_encode

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_CHUNK = 1 << 15  # uint64 and float64 temporaries of one chunk stay in the level-2 cache


@lru_cache(maxsize=1)
def _steps() -> NDArray[np.uint64]:
    """gamma * (1 ... _CHUNK) mod 2^64."""
    return np.arange(1, _CHUNK + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def _salt(seed: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def _factor(name: str, last: int) -> tuple[float, float]:
    """(a, b) of value = a + u * b."""
    if name.startswith("x."):
        return 0.0, 1.5
    if name.endswith("attn_sink"):
        return 0.0, 0.5
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    return 0.0, math.sqrt(3 / last)


def golden_rows(seed: str, name: str, shape: tuple[int, ...], first: int, count: int) -> NDArray[np.float32]:
    """Values ``first ... first + count`` (row-major) of the tensor ``name``: float32 [count]."""
    salt, (offset, factor) = _salt(seed, name), _factor(name, shape[-1])
    out = np.empty(count, np.float32)
    for done in range(0, count, _CHUNK):
        size = min(_CHUNK, count - done)
        z = _steps()[:size] + np.uint64((salt + (first + done) * _GAMMA) & _MASK)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z >>= np.uint64(40)  # the last step, z ^= z >> 31, changes only bits below 33: left out
        u = z.astype(np.float64)
        u *= 2.0**-23
        u -= 1.0
        u *= factor
        if offset:
            u += offset
        out[done : done + size] = u
    return out


def golden_value(seed: str, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The tensor ``name`` under ``seed``: float32 ``shape``, not yet rounded to its storage type."""
    return golden_rows(seed, name, shape, 0, math.prod(shape)).reshape(shape)


def random_input(seed: str, layer: int, step: int, batch: int, tokens: int, dim: int) -> NDArray[np.uint16]:
    """Input ``x.{layer}.{step}`` of the golden cases: uint16 (bf16 bits) [batch, tokens, dim]."""
    return bf16_encode(golden_value(seed, f"x.{layer}.{step}", (batch, tokens, dim)))
