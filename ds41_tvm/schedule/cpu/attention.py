"""Sparse attention for CPUs: rows decoded once per query and shared by its heads, two register-tiled products.

Its own program, because the plain kernel decodes a row inside every dot product. Layouts: decoded rows ``[row,
channel]``, queries ``[channel, head]``, scores ``[row, head]``. A vector holds 16 heads in the first product and in
the softmax, 16 channels in the second, so no sum runs across a vector and every sum is taken in ascending order:
channels in the scores, rows in the softmax and the output. `split` cuts the heads of a query into that many parallel
tasks, for steps with fewer queries than threads; heads do not touch each other, so the bits stay the same.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.attention import LOWEST, window_row
from ds41_tvm.kernels.expr import e4m3_code_to_f32, exp
from ds41_tvm.numerics.tir import bf16_to_f32, e2m1_to_f32, e4m3_to_f32, e8m0_to_f32, f32_to_bf16

ROWS = 6  # rows of a score tile: 6 x 64 accumulators are 24 of 32 vector registers
HEADS = 4  # heads of an output tile: 4 x 64 accumulators


def sparse_attention_cpu(
    heads: int, dim: int, window: int, ring_rows: int, block_rows: int, k: int, split: int
) -> PrimFunc:
    """As `kernels.attention.sparse_attention`; `split` divides `heads`."""
    if k:
        return _with_latents(heads, dim, window, ring_rows, block_rows, k, split)
    return _window(heads, dim, window, ring_rows, split)


def _tiles(heads: int, dim: int) -> tuple[int, int, int]:
    """Heads padded to whole vectors, heads per score tile, channels per output tile."""
    padded = -(-heads // 16) * 16
    return padded, next(t for t in (64, 32, 16) if padded % t == 0), 64 if dim % 64 == 0 else 32


@T.macro
def _decode_window(rows, j, source, row, dim):
    for b in range(dim // 32):
        for i in T.vectorized(32):
            rows[j, b * 32 + i] = e4m3_code_to_f32(T.Cast("uint16", source[row, b * 32 + i])) * e8m0_to_f32(
                source[row, dim + b]
            )


@T.macro
def _decode_latent(rows, j, source, row, dim):
    for b in range(dim // 32):
        for i in T.vectorized(16):
            rows[j, b * 32 + i] = e2m1_to_f32(source[row, b * 16 + i]) * e4m3_to_f32(source[row, dim // 2 + 2 * b])
        for i in T.vectorized(16):
            rows[j, b * 32 + 16 + i] = e2m1_to_f32(T.shift_right(source[row, b * 16 + i], T.uint8(4))) * e4m3_to_f32(
                source[row, dim // 2 + 2 * b + 1]
            )


@T.macro
def _scores(rows, query, score, tile, count, dim, padded, wide):
    """score[r, h] = dim^-0.5 * sum_d rows[r, d] * query[d, h], a tile of ROWS x `wide` at a time."""
    for r, c in T.grid((count + T.int64(ROWS - 1)) // T.int64(ROWS), padded // wide):
        for i in T.unroll(ROWS):
            for lane in T.vectorized(wide):
                tile[i, lane] = T.float32(0)
        for d in range(dim):
            for i in T.unroll(ROWS):
                for lane in T.vectorized(wide):
                    tile[i, lane] = tile[i, lane] + rows[r * T.int64(ROWS) + i, d] * query[d, c * wide + lane]
        for i in T.unroll(ROWS):
            for lane in T.vectorized(wide):
                score[r * T.int64(ROWS) + i, c * wide + lane] = tile[i, lane] * T.float32(dim**-0.5)


@T.macro
def _softmax(score, sink, first_head, top, total, count, padded, heads):
    """score becomes e^(score - top); total its sum plus the sink's term. 16 heads at a time."""
    for c in range(padded // 16):
        for lane in T.vectorized(16):
            top[lane] = T.float32(LOWEST)
        for r in range(count):
            for lane in T.vectorized(16):
                top[lane] = T.max(top[lane], score[r, c * 16 + lane])
        for lane in T.vectorized(16):
            total[c * 16 + lane] = T.float32(0)
        for r in range(count):
            for lane in T.vectorized(16):
                score[r, c * 16 + lane] = exp(score[r, c * 16 + lane] - top[lane])
            for lane in T.vectorized(16):
                total[c * 16 + lane] = total[c * 16 + lane] + score[r, c * 16 + lane]
        for lane in range(16):
            if c * 16 + lane < heads:
                total[c * 16 + lane] = total[c * 16 + lane] + exp(sink[first_head + c * 16 + lane] - top[lane])


@T.macro
def _output(rows, score, total, tile, Out, vt, first_head, count, dim, heads, wide):
    """Out[h, d] = bf16(sum_r score[r, h] * rows[r, d] / total[h]), a tile of HEADS x `wide` at a time."""
    for d, g in T.grid(dim // wide, (heads + HEADS - 1) // HEADS):
        for i in T.unroll(HEADS):
            for lane in T.vectorized(wide):
                tile[i, lane] = T.float32(0)
        for r in range(count):
            for i in T.unroll(HEADS):
                for lane in T.vectorized(wide):
                    tile[i, lane] = tile[i, lane] + score[r, g * HEADS + i] * rows[r, d * wide + lane]
        for i in T.unroll(HEADS):
            if g * HEADS + i < heads:
                for lane in T.vectorized(wide):
                    Out[vt, first_head + g * HEADS + i, d * wide + lane] = f32_to_bf16(
                        tile[i, lane] / total[g * HEADS + i]
                    )


@T.macro
def _attend(
    Q, Out, sink, vt, first_head, rows, query, score, top, total, tile, out_tile, count, dim, heads, padded, hw, dw
):
    for d in range(dim):
        for h in range(padded):
            query[d, h] = T.if_then_else(
                h < heads, bf16_to_f32(Q[vt, first_head + T.min(h, heads - 1), d]), T.float32(0)
            )
    _scores(rows, query, score, tile, count, dim, padded, hw)
    _softmax(score, sink, first_head, top, total, count, padded, heads)
    _output(rows, score, total, out_tile, Out, vt, first_head, count, dim, heads, dw)


def _window(all_heads: int, dim: int, window: int, ring_rows: int, split: int) -> PrimFunc:
    row_bytes, heads = dim + dim // 32, all_heads // split
    padded, hw, dw = _tiles(heads, dim)
    capacity = window + ROWS

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, fresh: T.handle, ring: T.handle, sink: T.Buffer((all_heads,), "float32"), position: T.handle,
        sequence: T.handle, start: T.handle, row: T.handle, slot: T.handle, o: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs = T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, all_heads, dim), "uint16")
        F = T.match_buffer(fresh, (n, row_bytes), "uint8")
        R = T.match_buffer(ring, (p, row_bytes), "uint8")
        P = T.match_buffer(position, (n,), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        first = T.match_buffer(start, (seqs,), "int32")
        base = T.match_buffer(row, (seqs,), "int32")
        place = T.match_buffer(slot, (seqs,), "int32")
        Out = T.match_buffer(o, (n, all_heads, dim), "uint16")
        for task in T.parallel(n * T.int64(split)):
            with T.sblock("attend"):
                v = T.axis.spatial(n * T.int64(split), task)
                T.reads(Q[0:n, 0:all_heads, 0:dim], F[0:n, 0:row_bytes], R[0:p, 0:row_bytes], sink[0:all_heads], P[0:n],
                        N[0:n], first[0:seqs], base[0:seqs], place[0:seqs])  # fmt: skip
                T.writes(Out[0:n, 0:all_heads, 0:dim])
                rows = T.sblock_alloc_buffer((capacity, dim), "float32")
                query = T.sblock_alloc_buffer((dim, padded), "float32")
                score = T.sblock_alloc_buffer((capacity, padded), "float32")
                total = T.sblock_alloc_buffer((padded,), "float32")
                top = T.sblock_alloc_buffer((16,), "float32", scope="local")
                tile = T.sblock_alloc_buffer((ROWS, hw), "float32", scope="local")
                out_tile = T.sblock_alloc_buffer((HEADS, dw), "float32", scope="local")
                count = T.sblock_alloc_buffer((1,), "int64", scope="local")
                at = T.sblock_alloc_buffer((1,), "int64", scope="local")
                vt: T.let = v // T.int64(split)
                head: T.let = T.Cast("int32", v % T.int64(split)) * heads
                count[0] = T.Cast("int64", T.min(P[vt] + 1, window))
                for j in range(count[0]):
                    at[0] = window_row(
                        P[vt] + 1 - T.Cast("int32", count[0] - j), first[N[vt]], base[N[vt]], place[N[vt]], ring_rows
                    )
                    if at[0] >= T.int64(0):
                        _decode_window(rows, j, F, at[0], dim)
                    else:
                        _decode_window(rows, j, R, T.int64(-1) - at[0], dim)
                _attend(Q, Out, sink, vt, head, rows, query, score, top, total, tile, out_tile, count[0], dim, heads,
                        padded, hw, dw)  # fmt: skip

    return main


def _with_latents(
    all_heads: int, dim: int, window: int, ring_rows: int, block_rows: int, k: int, split: int
) -> PrimFunc:
    row_bytes, latent_bytes, heads = dim + dim // 32, dim // 2 + dim // 16, all_heads // split
    padded, hw, dw = _tiles(heads, dim)
    capacity = window + k + ROWS

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, fresh: T.handle, ring: T.handle, sink: T.Buffer((all_heads,), "float32"), position: T.handle,
        sequence: T.handle, start: T.handle, row: T.handle, slot: T.handle, latents: T.handle, table: T.handle,
        selected: T.handle, o: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, stored = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, all_heads, dim), "uint16")
        F = T.match_buffer(fresh, (n, row_bytes), "uint8")
        R = T.match_buffer(ring, (p, row_bytes), "uint8")
        P = T.match_buffer(position, (n,), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        first = T.match_buffer(start, (seqs,), "int32")
        base = T.match_buffer(row, (seqs,), "int32")
        place = T.match_buffer(slot, (seqs,), "int32")
        L = T.match_buffer(latents, (stored, latent_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        C = T.match_buffer(selected, (n, k), "int32")
        Out = T.match_buffer(o, (n, all_heads, dim), "uint16")
        for task in T.parallel(n * T.int64(split)):
            with T.sblock("attend"):
                v = T.axis.spatial(n * T.int64(split), task)
                T.reads(Q[0:n, 0:all_heads, 0:dim], F[0:n, 0:row_bytes], R[0:p, 0:row_bytes], sink[0:all_heads], P[0:n],
                        N[0:n], first[0:seqs], base[0:seqs], place[0:seqs], L[0:stored, 0:latent_bytes],
                        B[0:seqs, 0:blocks], C[0:n, 0:k])  # fmt: skip
                T.writes(Out[0:n, 0:all_heads, 0:dim])
                rows = T.sblock_alloc_buffer((capacity, dim), "float32")
                query = T.sblock_alloc_buffer((dim, padded), "float32")
                score = T.sblock_alloc_buffer((capacity, padded), "float32")
                total = T.sblock_alloc_buffer((padded,), "float32")
                top = T.sblock_alloc_buffer((16,), "float32", scope="local")
                tile = T.sblock_alloc_buffer((ROWS, hw), "float32", scope="local")
                out_tile = T.sblock_alloc_buffer((HEADS, dw), "float32", scope="local")
                count = T.sblock_alloc_buffer((1,), "int64", scope="local")
                at = T.sblock_alloc_buffer((1,), "int64", scope="local")
                vt: T.let = v // T.int64(split)
                head: T.let = T.Cast("int32", v % T.int64(split)) * heads
                count[0] = T.Cast("int64", T.min(P[vt] + 1, window))
                for j in range(count[0]):
                    at[0] = window_row(
                        P[vt] + 1 - T.Cast("int32", count[0] - j), first[N[vt]], base[N[vt]], place[N[vt]], ring_rows
                    )
                    if at[0] >= T.int64(0):
                        _decode_window(rows, j, F, at[0], dim)
                    else:
                        _decode_window(rows, j, R, T.int64(-1) - at[0], dim)
                for j in range(k):
                    if C[vt, j] >= 0:
                        at[0] = T.Cast("int64", B[N[vt], C[vt, j] // block_rows]) * T.int64(block_rows) + T.Cast(
                            "int64", C[vt, j] % block_rows
                        )
                        _decode_latent(rows, count[0], L, at[0], dim)
                        count[0] = count[0] + T.int64(1)
                _attend(Q, Out, sink, vt, head, rows, query, score, top, total, tile, out_tile, count[0], dim, heads,
                        padded, hw, dw)  # fmt: skip

    return main
