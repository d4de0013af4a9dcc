"""Index scores on tensor cores, bit for bit as `kernels.indexer.index_scores`.

Twice an e2m1 value is a small integer, and a product of 32 channels, one block of scales, is one int8 step, exact. What
follows is in f32 in the order of the contract: blocks of channels ascending, then heads ascending.

A warp scores 16 positions, whose keys it keeps decoded in registers for the queries of the block that share a sequence;
the queries are decoded once for the block. A packed word of a row, eight nibbles of a block, is the two registers of a
lane: in which order channels meet inner indices does not matter, as long as keys and queries agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.numerics.tir import bf16_to_f32, e8m0_to_f32, f32_bits, f32_to_bf16, round_bf16
from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.common import fma
from ds41_tvm.schedule.cuda.mma import exchange_shape, form_of, meet, multiply_s8

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
    def queries(self) -> int:
        """Queries of a block; candidates are their own for each query."""
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
def _stage_queries(s, Q, W, queries, q_scale, weight, words, first, n, vx):
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
        task: T.let = o * THREADS + vx
        if task < s.queries * s.padded * s.scales:
            q: T.let = task // (s.padded * s.scales)
            head: T.let = task % (s.padded * s.scales) // s.scales
            q_scale[task] = T.float32(0)
            if head < s.heads and first + q < n:
                q_scale[task] = e8m0_to_f32(Q[first + q, head, s.dim // 2 + task % s.scales]) * T.float32(0.25)
    for o in range(-(-s.queries * s.padded // THREADS)):
        task: T.let = o * THREADS + vx
        if task < s.queries * s.padded:
            weight[task] = T.float32(0)
            if task % s.padded < s.heads and first + task // s.padded < n:
                weight[task] = bf16_to_f32(W[first + task // s.padded, task % s.padded])


@T.macro
def _load_keys(s, K, keys, k_scale, words, row, h, lane):
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
def _score(s, q, queries, q_scale, weight, keys, k_scale, products, total, words, c, dot, exchange, vx):
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
            words[0] = f32_bits(
                round_bf16(_relu(dot[i]) * weight[q * s.padded + j * 8 + vx % 4 * 2 + i % 2])
            )
            memory.store_words(
                s.mma, words, 0, 1, products, (vx // 32, j * 8 + vx % 4 * 2 + i % 2), i // 2 * 8 + vx % 32 // 4
            )
    meet(s.mma)
    total[0] = T.float32(0)
    for h in range(s.heads):
        total[0] = total[0] + products[vx // 32, h, vx % 16]
    meet(s.mma)


def _position(s: Sizes, C: Any, V: Any, t: Any, column: Any, count: Any) -> Any:
    """Position of a column of candidates, -1 if it is not visible or none."""
    last = T.min(column, count * s.candidate_block - 1)
    block = C[t, last // s.candidate_block]
    position = T.Cast("int64", block) * T.int64(s.candidate_block) + last % s.candidate_block
    seen = T.bitwise_and(block >= 0, position < T.Cast("int64", V[t]))
    return T.Select(seen, position, T.int64(-1))


@T.macro
def _buffers_and_scores(s, Q, W, K, B, N, V, C, S, n, width, count, vb, vg, vx):
    queries = T.sblock_alloc_buffer((s.queries * s.padded * s.scales * 8,), "uint32", scope=s.shared)
    q_scale = T.sblock_alloc_buffer((s.queries * s.padded * s.scales,), "float32", scope=s.shared)
    weight = T.sblock_alloc_buffer((s.queries * s.padded,), "float32", scope=s.shared)
    products = T.sblock_alloc_buffer((WARPS, s.padded, PRODUCTS), "float32", scope=s.shared)
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, WARPS), "uint32", scope="shared")
    words = T.sblock_alloc_buffer((1,), "uint32", scope="local")
    keys = T.sblock_alloc_buffer((s.scales * 4,), "uint32", scope="local")
    k_scale = T.sblock_alloc_buffer((s.scales * 2,), "float32", scope="local")
    total = T.sblock_alloc_buffer((1,), "float32", scope="local")
    c = T.sblock_alloc_buffer((4,), "int32", scope="local")
    dot = T.sblock_alloc_buffer((4,), "float32", scope="local")
    held = T.sblock_alloc_buffer((1,), "int32", scope="local")  # sequence whose keys are in registers
    at = T.sblock_alloc_buffer((2,), "int64", scope="local")
    first: T.let = vg * s.queries
    column: T.let = vb * POSITIONS + vx // 32 * 16
    _stage_queries(s, Q, W, queries, q_scale, weight, words, first, n, vx)
    T.tvm_storage_sync("shared")
    held[0] = -1
    for q in range(s.queries):
        if first + q < n:
            if C is None:
                if vb * POSITIONS < T.Cast("int64", V[first + q]):
                    if held[0] != N[first + q]:
                        held[0] = N[first + q]
                        for h in s.each(2):
                            # Past the last column the tile repeats it; what lies past the visible ones is not stored.
                            at[0] = T.min(column + h * 8 + vx % 32 // 4, width - 1)
                            at[1] = T.Cast("int64", B[held[0], at[0] // s.block_rows]) * T.int64(s.block_rows) + (
                                at[0] % s.block_rows
                            )
                            _load_keys(s, K, keys, k_scale, words, at[1], h, vx % 32)
                    _score(s, q, queries, q_scale, weight, keys, k_scale, products, total, words, c, dot, exchange, vx)
                if vx % 32 < 16 and column + vx % 16 < width:
                    S[first + q, column + vx % 16] = T.Select(
                        column + vx % 16 < T.Cast("int64", V[first + q]), f32_to_bf16(total[0]), T.uint16(MASKED)
                    )
            else:
                if C[first, vb * POSITIONS // s.candidate_block] >= 0:
                    for h in s.each(2):
                        at[0] = _position(s, C, V, first, column + h * 8 + vx % 32 // 4, count)
                        at[0] = T.max(at[0], T.int64(0))
                        at[1] = T.Cast("int64", B[N[first], at[0] // s.block_rows]) * T.int64(s.block_rows) + (
                            at[0] % s.block_rows
                        )
                        _load_keys(s, K, keys, k_scale, words, at[1], h, vx % 32)
                    _score(s, q, queries, q_scale, weight, keys, k_scale, products, total, words, c, dot, exchange, vx)
                if vx % 32 < 16 and column + vx % 16 < count * s.candidate_block:
                    at[0] = _position(s, C, V, first, column + vx % 16, count)
                    if s.spread == 1:
                        if at[0] >= T.int64(0):
                            S[first, at[0]] = f32_to_bf16(total[0])
                    else:
                        S[first, column + vx % 16] = T.Select(
                            at[0] >= T.int64(0), f32_to_bf16(total[0]), T.uint16(MASKED)
                        )


def index_scores_mma(s: Sizes) -> PrimFunc:
    """The program for `s`; `dim` a multiple of 32."""
    return _candidates(s) if s.candidate_block else _dense(s)


def _dense(s: Sizes) -> PrimFunc:
    heads, row_bytes = s.heads, s.row_bytes

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle, s_: T.handle
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        S = T.match_buffer(s_, (n, width), "uint16")
        for bx in T.thread_binding((width + (POSITIONS - 1)) // POSITIONS, "blockIdx.x"):
            for by in T.thread_binding((n + (s.queries - 1)) // s.queries, "blockIdx.y"):
                for tx in T.thread_binding(THREADS, "threadIdx.x"):
                    with T.sblock("scores"):
                        vb, vg, vx = T.axis.remap("SSS", [bx, by, tx])
                        T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes],
                                B[0:seqs, 0:blocks], N[0:n], V[0:n])  # fmt: skip
                        T.writes(S[0:n, 0:width])
                        _buffers_and_scores(s, Q, W, K, B, N, V, None, S, n, width, None, vb, vg, vx)

    return main


def _candidates(s: Sizes) -> PrimFunc:
    heads, row_bytes = s.heads, s.row_bytes

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle,
        candidates: T.handle, s_: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width, count = T.int64(), T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        C = T.match_buffer(candidates, (n, count), "int32")
        S = T.match_buffer(s_, (n, width), "uint16")
        if s.spread == 1:
            for bx in T.thread_binding((width + (THREADS - 1)) // THREADS, "blockIdx.x"):
                for by in T.thread_binding(n, "blockIdx.y"):
                    for tx in T.thread_binding(THREADS, "threadIdx.x"):
                        with T.sblock("mask"):
                            vb, vg, vx = T.axis.remap("SSS", [bx, by, tx])
                            T.reads()
                            T.writes(S[vg, 0:width])
                            if vb * THREADS + vx < width:
                                S[vg, vb * THREADS + vx] = T.uint16(MASKED)
        for bx in T.thread_binding((count * s.candidate_block + (POSITIONS - 1)) // POSITIONS, "blockIdx.x"):
            for by in T.thread_binding(n, "blockIdx.y"):
                for tx in T.thread_binding(THREADS, "threadIdx.x"):
                    with T.sblock("scores"):
                        vb, vg, vx = T.axis.remap("SSS", [bx, by, tx])
                        T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes],
                                B[0:seqs, 0:blocks], N[0:n], V[0:n], C[0:n, 0:count])  # fmt: skip
                        T.writes(S[0:n, 0:width])
                        _buffers_and_scores(s, Q, W, K, B, N, V, C, S, n, width, count, vb, vg, vx)

    return main


def _rule(op: str, p: dict[str, Any], kind: str) -> PrimFunc | None:
    if op != "index_scores" or p["dim"] % 32:
        return None
    return index_scores_mma(Sizes(**p, mma=form_of(kind)))


RULES = (("index-scores-mma", _rule),)
