"""One tile of index scores: decoded queries and keys, products, and the sums over heads. See `indexer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ds41_tvm.numerics.tir import bf16_to_f32, e8m0_to_f32, f32_bits, f32_to_bf16, round_bf16
from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.common import fma
from ds41_tvm.schedule.cuda.mma import meet, multiply_s8

WARPS = 8
THREADS = WARPS * 32
POSITIONS = WARPS * 16  # of a block
QUERY_BYTES = 32 << 10  # of decoded queries in shared memory
PRODUCTS = 20  # floats between heads where a warp's products lie: their lanes meet different banks
# 2^23 + 2^13: an integer added to its bits is added to its value. (Seven digits: OpenCL's text has no more.)
MAGIC, MAGIC_BITS = 8396800.0, 0x4B002000


@dataclass(frozen=True)
class Sizes:
    """Parameters of `kernels.indexer.index_scores`, and `mma`."""

    heads: int
    dim: int
    block_rows: int
    candidate_block: int
    spread: int
    mma: str
    queries: int = 0  # of a block, 0 for `most_queries`

    def __post_init__(self) -> None:
        if not self.queries:
            object.__setattr__(self, "queries", self.most_queries)

    @property
    def scales(self) -> int:
        """Blocks of 32 channels."""
        return self.dim // 32

    @property
    def row_bytes(self) -> int:
        return self.dim // 2 + self.scales

    @property
    def head_tiles(self) -> int:
        return -(-self.heads // 8)

    @property
    def padded(self) -> int:
        return self.head_tiles * 8

    @property
    def most_queries(self) -> int:
        """Queries that a block has room for, up to 8; candidates are their own for each query."""
        return 1 if self.candidate_block else max(1, min(8, QUERY_BYTES // (self.padded * self.dim)))

    @property
    def shared(self) -> str:
        return "shared.dyn" if self.mma == "ptx" else "shared"

    @property
    def each(self) -> Any:
        """Loops over registers: unrolled on a GPU; a processor gets less to compile."""
        return T.unroll if self.mma == "ptx" else T.serial


def _word(s: Sizes, source: Any, row: Any, i: Any) -> Any:
    """uint32 word i of the codes of a packed row."""
    out = T.uint32(0)
    for b in range(4):
        out = T.bitwise_or(out, T.shift_left(T.Cast("uint32", source[(*row, i * 4 + b)]), T.uint32(8 * b)))
    return out


@T.macro
def _read_word(s, words, source, row, i):
    """words[0] = word i of a packed row, whose bytes need not lie on a boundary of words."""
    if s.mma == "ptx" and s.row_bytes % 4 == 0:
        memory.load_words(s.mma, words, 0, 1, source, row, i * 4)
    else:
        words[0] = _word(s, source, row, i)


@T.macro
def stage_queries(s, Q, W, queries, q_scale, weight, words, first, n, vx):
    """Decode the block's queries: queries[q, tile, block, lane, half], q_scale and weight by head; padding is zero."""
    for o in range(-(-s.queries * s.padded * s.scales * 4 // THREADS)):
        task: T.let = o * THREADS + vx
        if task < s.queries * s.padded * s.scales * 4:
            q: T.let = task // (s.padded * s.scales * 4)
            rest: T.let = task % (s.padded * s.scales * 4)
            head: T.let = rest // (s.scales * 32) * 8 + rest % 32 // 4
            block: T.let = rest // 32 % s.scales
            words[0] = T.uint32(0)
            if head < s.heads and first + q < n:
                _read_word(s, words, Q, (first + q, head), block * 4 + rest % 4)
            for h in range(2):
                queries[task * 2 + h] = memory.e2m1_twice(s.mma, words[0], h)
    for o in range(-(-s.queries * s.padded * s.scales // THREADS)):
        place: T.let = o * THREADS + vx
        if place < s.queries * s.padded * s.scales:
            owner: T.let = place // (s.padded * s.scales)
            column: T.let = place % (s.padded * s.scales) // s.scales
            q_scale[place] = T.float32(0)
            if column < s.heads and first + owner < n:
                q_scale[place] = e8m0_to_f32(Q[first + owner, column, s.dim // 2 + place % s.scales]) * T.float32(0.25)
    for o in range(-(-s.queries * s.padded // THREADS)):
        slot: T.let = o * THREADS + vx
        if slot < s.queries * s.padded:
            weight[slot] = T.float32(0)
            if slot % s.padded < s.heads and first + slot // s.padded < n:
                weight[slot] = bf16_to_f32(W[first + slot // s.padded, slot % s.padded])


@T.macro
def load_keys(s, K, keys, k_scale, words, row, h, lane):
    """Registers of key row `row`, which is row g (h = 0) or g + 8 (h = 1) of the warp's tile."""
    for b in s.each(s.scales):
        _read_word(s, words, K, (row,), b * 4 + lane % 4)
        keys[b * 4 + h] = memory.e2m1_twice(s.mma, words[0], 0)
        keys[b * 4 + 2 + h] = memory.e2m1_twice(s.mma, words[0], 1)
        k_scale[b * 2 + h] = e8m0_to_f32(K[row, s.dim // 2 + b])


def _relu(x: Any) -> Any:
    """bf16(relu(bf16(x))) as f32; negative or NaN: 0."""
    bits = f32_to_bf16(x)
    return bf16_to_f32(T.Select(bits > T.uint16(0x7F80), T.uint16(0), bits))


@T.macro
def score(s, q, queries, q_scale, weight, keys, k_scale, products, total, words, c, dot, exchange, vx):
    """total[0] of lanes 0..15: the score of the warp's position `lane` and query q of the block."""
    for j in s.each(s.head_tiles):
        for i in s.each(4):
            dot[i] = T.float32(0)
        for b in s.each(s.scales):
            multiply_s8(
                s.mma, c, keys[b * 4], keys[b * 4 + 1], keys[b * 4 + 2], keys[b * 4 + 3],
                queries[(((q * s.head_tiles + j) * s.scales + b) * 32 + vx % 32) * 2],
                queries[(((q * s.head_tiles + j) * s.scales + b) * 32 + vx % 32) * 2 + 1], exchange, vx,
            )  # fmt: skip
            for i in s.each(4):
                # The product is exact, so it may be fused with the addition.
                dot[i] = fma(
                    T.reinterpret("float32", c[i] + T.int32(MAGIC_BITS)) - T.float32(MAGIC),
                    q_scale[(q * s.padded + j * 8 + vx % 4 * 2 + i % 2) * s.scales + b] * k_scale[b * 2 + i // 2],
                    dot[i],
                )
        for i in s.each(4):
            words[0] = f32_bits(round_bf16(_relu(dot[i]) * weight[q * s.padded + j * 8 + vx % 4 * 2 + i % 2]))
            memory.store_words(
                s.mma, words, 0, 1, products, (vx // 32, j * 8 + vx % 4 * 2 + i % 2), i // 2 * 8 + vx % 32 // 4
            )
    meet(s.mma)
    total[0] = T.float32(0)
    for h in range(s.heads):
        total[0] = total[0] + products[vx // 32, h, vx % 16]
    meet(s.mma)
