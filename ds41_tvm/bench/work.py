"""What a layer has to do in a step, counted: operations and bytes, and the least time that machine limits allow.

    floor = max(bytes / read, flops / products + integer_ops / dots)

`products` is the rate of bf16 tile products where the target has them, else of bf16 dot products, else of f32
multiply-adds; `dots` that of integer dot instructions where the target has them, else of multiply-adds. `bytes` is what
must be read from memory at least once, in the formats in which the release stores it; a layer can take longer than the
floor, never less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ds41_tvm.config import FP8_LINEARS, AttentionConfig, LayerRole
from ds41_tvm.numerics.formats import row_bytes

# Linear layers that a released fp8 checkpoint stores as e4m3 with one e8m0 scale per 32 x 32 values.
STORED_FP8 = FP8_LINEARS | {"wo_a"}


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`flops`: multiplications and additions of products; `dots`: those of index scores, on e2m1 codes; `bytes`: read
    from memory.
    """

    flops: float = 0.0
    dots: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.dots + other.dots, self.bytes + other.bytes)


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least time of some work, and what it is bound by."""

    seconds: float
    limit: Literal["read", "compute"]


def floor(work: Work, limits: Mapping[str, float]) -> Floor:
    """The least time at the machine's `limits` (per second: read bytes, fma, bf16 and amx FLOP, vnni operations)."""
    products = limits.get("amx", limits.get("bf16", limits["fma"]))
    dots = limits.get("vnni", limits["fma"])
    compute = work.flops / products + work.dots / dots
    reading = work.bytes / limits["read"]
    return Floor(reading, "read") if reading >= compute else Floor(compute, "compute")


def linear_sizes(config: AttentionConfig, role: LayerRole) -> dict[str, tuple[int, int]]:
    """Columns and inner size of a layer's linear layers, by official name."""
    c = config
    sizes = {
        "wq_a": (c.q_lora_rank, c.dim),
        "wq_b": (c.n_heads * c.head_dim, c.q_lora_rank),
        "wkv": (c.head_dim, c.dim),
        "wo_a": (c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups),
        "wo_b": (c.dim, c.o_groups * c.o_lora_rank),
    }
    if role.kind == "full":
        sizes["compressor.wkv"] = (c.head_dim, c.dim)
        if role.ratio > 1:
            sizes["compressor.wgate"] = (c.head_dim, c.dim)
        sizes["indexer.wk"] = (c.index_head_dim, c.head_dim)
    if role.kind in ("full", "reindex"):
        sizes["indexer.wq_b"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        sizes["indexer.weights_proj"] = (c.index_n_heads, c.dim)
    return sizes


def linear_layer(n: int, k: int, weight: str, rows: float) -> Work:
    """`rows` rows of `n` columns out of `k` inputs each; weights in bf16, fp8 (with their scales) or f32, read once."""
    stored = {"bf16": 2 * n * k, "fp8": n * k + math.ceil(n / 32) * math.ceil(k / 32), "f32": 4 * n * k}
    return Work(2.0 * n * k * rows, 0.0, stored[weight])


def weights(config: AttentionConfig, role: LayerRole, linear: str, tokens: int) -> Work:
    """Linear layers on `tokens` rows. Keys and latents (ratio > 1: one row a group) are counted by the group."""
    total = Work()
    for name, (n, k) in linear_sizes(config, role).items():
        rows = tokens / max(role.ratio, 1) if name == "indexer.wk" else tokens
        total += linear_layer(n, k, "fp8" if linear == "fp8" and name in STORED_FP8 else "bf16", rows)
    return total


def attention(config: AttentionConfig, window: tuple[int, int], latents: tuple[int, int] = (0, 0)) -> Work:
    """Scores and weighted sums over window rows and latents: (pairs of query and row, distinct rows in memory) each."""
    c = config
    read = window[1] * row_bytes("window", c.head_dim) + latents[1] * row_bytes("latent", c.head_dim)
    return Work(4.0 * c.n_heads * c.head_dim * (window[0] + latents[0]), 0.0, read)


def scores(config: AttentionConfig, positions: int, distinct: int) -> Work:
    """Index scores of `positions` pairs of query and key, over `distinct` keys of memory."""
    c = config
    return Work(
        0.0, 2.0 * c.index_n_heads * c.index_head_dim * positions, distinct * row_bytes("index", c.index_head_dim)
    )


def layer(config: AttentionConfig, role: LayerRole, linear: str, parts: Sequence[tuple[int, int]]) -> Work:
    """A layer of a step that feeds `count` tokens after `start` to each sequence (start, count) of `parts`.

    Rows that stay in a cache from one token of the same step to the next are counted once.
    """
    c = config
    total = weights(c, role, linear, sum(count for _, count in parts))
    for start, count in parts:
        total += attended(c, role, start, count)
        if role.kind in ("full", "reindex"):
            total += scored(c, role, start, count)
    return total


def attended(config: AttentionConfig, role: LayerRole, start: int, count: int) -> Work:
    """The attention of `count` queries from position `start` on; rows made in the same step are in no memory yet."""
    c, ends = config, range(start + 1, start + count + 1)
    window = sum(min(end, c.window_size) for end in ends), min(start, c.window_size)
    if not role.ratio:
        return attention(c, window)
    chosen = sum(min(end // role.ratio, c.index_topk) for end in ends)
    return attention(c, window, (chosen, min(chosen, start // role.ratio)))


def scored(config: AttentionConfig, role: LayerRole, start: int, count: int) -> Work:
    """The index scores of those queries: all visible positions, or those in a candidate source's blocks."""
    c, visible = config, [end // role.ratio for end in range(start + 1, start + count + 1)]
    most = c.candidate_topk_blocks * c.candidate_block_size if role.candidate_source is not None else visible[-1]
    pairs = sum(min(seen, most) for seen in visible)
    return scores(c, pairs, min(pairs, start // role.ratio))
