"""Rotary position embedding on the last ``rope_head_dim`` channels, adjacent pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import F32, U16, bf16_decode, bf16_encode

if TYPE_CHECKING:
    from ds41_tvm.config import AttentionConfig

F64 = NDArray[np.float64]

# pi / 2 in three parts of 33, 33 and 53 bits: n * part is exact for the first two while |n| < 2^20.
_HALF_PI = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
# The polynomials of sinf and cosf in ARM's optimized-routines, which glibc uses: float64, error below 2^-34.
_COS = (
    "0x1p+0",
    "-0x1.ffffffd0c621cp-2",
    "0x1.55553e1068f19p-5",
    "-0x1.6c087e89a359dp-10",
    "0x1.99343027bf8c3p-16",
)
_SIN = ("0x1p+0", "-0x1.555545995a603p-3", "0x1.1107605230bc4p-7", "-0x1.994eb3774cf24p-13")


def rope_frequencies(config: AttentionConfig, ratio: int) -> F32:
    """Angle per position of each pair: float32 [rope_head_dim / 2] (official ``precompute_freqs_cis``).

    f_i = base^(-2i / rope_head_dim). Ratio 0: base ``rope_theta``, no more. Ratio > 0: base
    ``compress_rope_theta`` and YaRN, f = f / rope_factor * (1 - s) + f * s, where s falls linearly from 1 to
    0 between the pairs that make ``beta_fast`` and ``beta_slow`` turns over ``original_seq_len`` positions;
    no YaRN where that is 0. Each operation is rounded to float32.
    """
    dim = config.rope_head_dim
    base = float(config.compress_rope_theta if ratio > 0 else config.rope_theta)
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # The float64 power rounds to torch's float32 power; NumPy's own float32 power is less exact.
    power = np.array([base ** float(e) for e in exponent], np.float32)
    freqs: F32 = np.float32(1) / power
    if ratio > 0 and config.original_seq_len > 0:
        smooth = _smooth(dim, base, config.original_seq_len, config.beta_fast, config.beta_slow)
        freqs = freqs / np.float32(config.rope_factor) * (np.float32(1) - smooth) + freqs * smooth
    return freqs


def _smooth(dim: int, base: float, length: int, beta_fast: float, beta_slow: float) -> F32:
    """1 - ramp: 1 for the fast pairs that keep their frequency, 0 for the slow ones that are stretched."""

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with_turns(beta_fast)), 0)
    high: float = min(math.ceil(pair_with_turns(beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # as the official code does: no division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    out: F32 = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    return out


def rope_table(freqs: F32, positions: NDArray[Any]) -> F32:
    """(cos, sin) of float32(position * frequency): float32 [n, rope_head_dim / 2, 2] for positions [n].

    Computed by additions and multiplications of float64 alone, so every machine gives the same bits. Up to
    position 1 600 000 they are those of glibc's ``cosf`` and ``sinf``, from which torch's ``polar`` takes its
    values.
    """
    return rope_tables([(freqs, positions)])[0]


def rope_tables(wanted: Sequence[tuple[F32, NDArray[Any]]]) -> list[F32]:
    """`rope_table` of each (frequencies, positions), in one pass: for few positions the calls are what costs."""
    angles = [np.asarray(positions).astype(np.float32)[:, None] * freqs for freqs, positions in wanted]
    table = np.stack(_cos_sin(np.concatenate([angle.reshape(-1) for angle in angles])), axis=-1)
    ends = np.cumsum([angle.size for angle in angles])
    parts = np.split(table, ends[:-1])
    return [part.reshape(*angle.shape, 2) for part, angle in zip(parts, angles, strict=True)]


def _cos_sin(angle: F32) -> tuple[F32, F32]:
    x = angle.astype(np.float64)
    quadrant = np.rint(x * (2 / math.pi))
    for part in _HALF_PI:
        x = x - quadrant * part
    square = x * x
    cos, sin = _polynomial(_COS, square), x * _polynomial(_SIN, square)
    turn = quadrant.astype(np.int64) & 3
    return (
        np.choose(turn, [cos, -sin, -cos, sin]).astype(np.float32),
        np.choose(turn, [sin, cos, -sin, -cos]).astype(np.float32),
    )


def _polynomial(coefficients: tuple[str, ...], x: F64) -> F64:
    out: F64 = np.zeros_like(x)
    for c in reversed(coefficients):
        out = out * x + float.fromhex(c)
    return out


def rotate(x: U16, table: F32, inverse: bool = False) -> U16:
    """(a, b) -> (bf16(a c - b s), bf16(a s + b c)) for adjacent pairs of the last channels.

    c, s = cos and sin of `table`, s negated if `inverse`.

    x bf16 bits [n, D] or [n, heads, D]; table float32 [n, rope_head_dim / 2, 2]; the other channels are kept.
    Each product is rounded to float32 before the sum (official ``apply_rotary_emb``, a complex product).
    """
    pairs = table.shape[-2]
    heads_axis = (1,) * (x.ndim - 2)
    cos = table[..., 0].reshape(len(table), *heads_axis, pairs)
    sin = table[..., 1].reshape(len(table), *heads_axis, pairs)
    if inverse:
        sin = -sin
    tail = bf16_decode(x[..., x.shape[-1] - 2 * pairs :])
    a, b = tail[..., 0::2], tail[..., 1::2]
    with np.errstate(invalid="ignore", over="ignore"):
        turned = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(tail.shape)
    return np.concatenate([x[..., : x.shape[-1] - 2 * pairs], bf16_encode(turned)], axis=-1)
