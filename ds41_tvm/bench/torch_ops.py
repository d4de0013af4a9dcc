"""The official V4.1 elementwise arithmetic in torch: norm, rotary embedding, fake quantisation, candidates.

Everything takes and gives torch tensors on the CPU; "bf16" is ``torch.bfloat16``. Importing this module needs
the extra ``torch``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ds41_tvm.errors import UsageError

if TYPE_CHECKING:
    from ds41_tvm.config import AttentionConfig

try:
    import torch
    from torch import Tensor
except ImportError as error:  # pragma: no cover - exercised in a subprocess
    raise UsageError(
        "torch is not installed; the torch comparison needs the extra 'torch': pip install 'ds41-tvm[torch]'"
    ) from error

__all__ = [
    "NEG_INF",
    "Tensor",
    "candidate_blocks",
    "fake_quant_index",
    "fake_quant_latent",
    "fake_quant_window",
    "rms_norm",
    "rope",
    "rope_tables",
    "torch",
]

NEG_INF = float("-inf")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``bf16(weight * x / sqrt(mean(x^2) + eps))`` over the last axis, everything inside in float32."""
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).bfloat16()


def rope_tables(config: AttentionConfig, yarn: bool) -> Tensor:
    """cos and sin of ``position * frequency``: float32 ``[max_seq_len, rope_head_dim / 2, 2]``.

    ``yarn`` selects ``compress_rope_theta`` with YaRN (official ``precompute_freqs_cis``), else it is plain
    ``rope_theta``.
    """
    dim = config.rope_head_dim
    base = config.compress_rope_theta if yarn else config.rope_theta
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn and config.original_seq_len > 0:

        def turn_dim(turns: float) -> float:
            return dim * math.log(config.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(turn_dim(config.beta_fast)), 0)
        high = max(min(math.ceil(turn_dim(config.beta_slow)), dim - 1), low + 0.001)
        smooth = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        freqs = freqs / config.rope_factor * (1 - smooth) + freqs * smooth
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), freqs)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rope(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """``x`` with the adjacent pairs of its last channels rotated, in float32, rounded to the type of ``x``.

    ``x`` ``[b, s, d]`` or ``[b, s, heads, d]``; ``table`` ``[s, rope_head_dim / 2, 2]``: the tokens' rows.
    """
    width = 2 * table.size(-2)
    cos, sin = table.unbind(-1)
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


def _power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """``2^ceil(log2(amax / largest))``, the exponent read from the float and not from a logarithm."""
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def _round_e2m1(y: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign, ties to the even code; ``y`` is float32."""
    y = y.clamp(-6.0, 6.0)
    size = y.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(y / step) * step


def fake_quant_window(x: Tensor) -> Tensor:
    """Window rows: e4m3 in blocks of 32 with power-of-two scales, back in bf16."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448.0)
    codes = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).bfloat16()


def fake_quant_latent(x: Tensor) -> Tensor:
    """Latents: e2m1 in blocks of 16 with e4m3 scales, back in bf16."""
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / 6.0).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    return (_round_e2m1(blocks / scale) * scale).flatten(-2).bfloat16()


def fake_quant_index(x: Tensor) -> Tensor:
    """Index queries and keys: e2m1 in blocks of 32 with power-of-two scales, back in bf16."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126), 6.0)
    return (_round_e2m1(blocks / scale) * scale).flatten(-2).bfloat16()


def candidate_blocks(score: Tensor, visible: Tensor, topk_blocks: int, block_size: int) -> Tensor:
    """Which positions lie in a query's candidate blocks: bool, the shape of ``score`` ``[b, s, t]``.

    A block scores its best visible position (``score`` holds -inf elsewhere); the block of the newest visible
    position (``visible`` ``[s, 1]`` counts them) always stays; blocks with nothing visible never do.
    """
    width = score.size(-1)
    padded = torch.nn.functional.pad(score, (0, -width % block_size), value=NEG_INF)
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest = (visible - 1).div(block_size, rounding_mode="floor")
    best = best.masked_fill(torch.arange(best.size(-1)) == newest, math.inf)
    top = best.topk(min(topk_blocks, best.size(-1)), dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, top.indices, top.values > NEG_INF)
    return kept.repeat_interleave(block_size, dim=-1)[..., :width]
