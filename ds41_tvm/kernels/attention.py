"""Sparse attention over window rows and selected latents, one softmax with a sink (official ``sparse_attn``)."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import exp
from ds41_tvm.numerics.tir import bf16_to_f32, f32_to_bf16, latent_value, window_value

LOWEST = -3.0e38  # below every score; finite, so that a difference of two is never NaN


def sparse_attention(heads: int, dim: int, window: int, ring_rows: int, block_rows: int, k: int) -> PrimFunc:
    """o[h] = bf16( sum_r e^(s_r - m) v_r / (sum_r e^(s_r - m) + e^(sink_h - m)) ), m = max_r s_r.

    s_r = (q_h . v_r) * dim^-0.5.

    The rows r of a query at position p are the window positions max(0, p - window + 1)..p, then its selected latents,
    in ascending order; all in f32, one rounding to bf16. A query with no row gives zeros.

    Shapes: q, o bf16 bits ``[n, heads, dim]``; fresh uint8 ``[n, window bytes]``, the step's own window rows; ring
    uint8 ``[slots * ring_rows, window bytes]``, older rows, position p of slot s at ``s * ring_rows + p %
    ring_rows``; sink f32 ``[heads]``; position, sequence int32 ``[n]``; start, row, slot int32 ``[sequences]``:
    position of a sequence's first token in this step, that token's row, its ring slot. With k > 0 also: latents uint8
    ``[p, latent bytes]``, table int32 ``[sequences, blocks]`` of latent blocks of `block_rows` rows, selected int32
    ``[n, k]`` (ascending, then -1).
    """
    return _with_latents(heads, dim, window, ring_rows, block_rows, k) if k else _window(heads, dim, window, ring_rows)


def sink_weight(sink: Any, top: Any) -> Any:
    """e^(sink - top): infinity, which takes all weight, from 88.4 on; `exp` itself only holds up to there."""
    return exp(T.min(sink - top, T.float32(89)))


# Where row j of a query's list lies and what its elements are: shared with the CPU's own program.


def window_row(position: Any, start: Any, row: Any, slot: Any, ring_rows: int) -> Any:
    """int64 row of `fresh` (>= 0), or -1 - row of `ring`, of a window position."""
    fresh = T.Cast("int64", row) + T.Cast("int64", position - start)
    old = T.Cast("int64", slot) * T.int64(ring_rows) + T.Cast("int64", T.floormod(position, ring_rows))
    return T.Select(position >= start, fresh, T.int64(-1) - old)


def window_element(fresh: Any, ring: Any, row: Any, d: Any, dim: int) -> Any:
    """f32 element d of a window row, `row` as `window_row` gives it."""
    return T.if_then_else(
        row >= T.int64(0),
        window_value(fresh[row, d], fresh[row, dim + d // 32]),
        window_value(ring[T.int64(-1) - row, d], ring[T.int64(-1) - row, dim + d // 32]),
    )


def latent_element(latents: Any, row: Any, d: Any, dim: int) -> Any:
    """f32 element d of a latent row."""
    byte = latents[row, d // 32 * 16 + d % 16]
    code = T.if_then_else(d % 32 < 16, T.bitwise_and(byte, T.uint8(15)), T.shift_right(byte, T.uint8(4)))
    return latent_value(code, latents[row, dim // 2 + d // 16])


@T.macro
def _attend(Q, Out, sink, vt, h, count, score, top, acc, element, heads, dim):
    """One head of one query over `count` rows whose elements `element(j, d)` gives."""
    top[0] = T.float32(LOWEST)
    for j in range(count):
        acc[0] = T.float32(0)
        for d in range(dim):
            acc[0] = acc[0] + bf16_to_f32(Q[vt, h, d]) * element(j, d)
        score[j] = acc[0] * T.float32(dim**-0.5)
        top[0] = T.max(top[0], score[j])
    top[1] = T.float32(0)
    for j in range(count):
        score[j] = exp(score[j] - top[0])
        top[1] = top[1] + score[j]
    top[1] = top[1] + sink_weight(sink[h], top[0])
    for d in range(dim):
        acc[0] = T.float32(0)
        for j in range(count):
            acc[0] = acc[0] + score[j] * element(j, d)
        Out[vt, h, d] = f32_to_bf16(T.Select(count > T.int64(0), acc[0] / top[1], T.float32(0)))


def _window(heads: int, dim: int, window: int, ring_rows: int) -> PrimFunc:
    row_bytes = dim + dim // 32

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, fresh: T.handle, ring: T.handle, sink: T.Buffer((heads,), "float32"), position: T.handle,
        sequence: T.handle, start: T.handle, row: T.handle, slot: T.handle, o: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        n, p, seqs = T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, dim), "uint16")
        F = T.match_buffer(fresh, (n, row_bytes), "uint8")
        R = T.match_buffer(ring, (p, row_bytes), "uint8")
        P = T.match_buffer(position, (n,), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        first = T.match_buffer(start, (seqs,), "int32")
        base = T.match_buffer(row, (seqs,), "int32")
        place = T.match_buffer(slot, (seqs,), "int32")
        Out = T.match_buffer(o, (n, heads, dim), "uint16")
        for t in range(n):
            with T.sblock("attend"):
                vt = T.axis.spatial(n, t)
                T.reads(Q[vt, 0:heads, 0:dim], F[0:n, 0:row_bytes], R[0:p, 0:row_bytes], sink[0:heads], P[vt], N[vt],
                        first[0:seqs], base[0:seqs], place[0:seqs])  # fmt: skip
                T.writes(Out[vt, 0:heads, 0:dim])
                place_of = T.sblock_alloc_buffer((window,), "int64", scope="local")
                score = T.sblock_alloc_buffer((window,), "float32", scope="local")
                count = T.sblock_alloc_buffer((1,), "int64", scope="local")
                top = T.sblock_alloc_buffer((2,), "float32", scope="local")
                acc = T.sblock_alloc_buffer((1,), "float32", scope="local")
                count[0] = T.Cast("int64", T.min(P[vt] + 1, window))
                for j in range(count[0]):
                    place_of[j] = window_row(
                        P[vt] + 1 - T.Cast("int32", count[0] - j), first[N[vt]], base[N[vt]], place[N[vt]], ring_rows
                    )
                for h in range(heads):
                    _attend(
                        Q, Out, sink, vt, h, count[0], score, top, acc,
                        lambda j, d: window_element(F, R, place_of[j], d, dim), heads, dim,
                    )  # fmt: skip

    return main


def _with_latents(heads: int, dim: int, window: int, ring_rows: int, block_rows: int, k: int) -> PrimFunc:
    row_bytes, latent_bytes = dim + dim // 32, dim // 2 + dim // 16

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, fresh: T.handle, ring: T.handle, sink: T.Buffer((heads,), "float32"), position: T.handle,
        sequence: T.handle, start: T.handle, row: T.handle, slot: T.handle, latents: T.handle, table: T.handle,
        selected: T.handle, o: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        n, p, seqs, blocks, stored = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, dim), "uint16")
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
        Out = T.match_buffer(o, (n, heads, dim), "uint16")
        for t in range(n):
            with T.sblock("attend"):
                vt = T.axis.spatial(n, t)
                T.reads(Q[vt, 0:heads, 0:dim], F[0:n, 0:row_bytes], R[0:p, 0:row_bytes], sink[0:heads], P[vt], N[vt],
                        first[0:seqs], base[0:seqs], place[0:seqs], L[0:stored, 0:latent_bytes], B[0:seqs, 0:blocks],
                        C[vt, 0:k])  # fmt: skip
                T.writes(Out[vt, 0:heads, 0:dim])
                place_of = T.sblock_alloc_buffer((window + k,), "int64", scope="local")
                score = T.sblock_alloc_buffer((window + k,), "float32", scope="local")
                # rows in all, window rows
                count = T.sblock_alloc_buffer((2,), "int64", scope="local")
                top = T.sblock_alloc_buffer((2,), "float32", scope="local")
                acc = T.sblock_alloc_buffer((1,), "float32", scope="local")
                count[1] = T.Cast("int64", T.min(P[vt] + 1, window))
                for j in range(count[1]):
                    place_of[j] = window_row(
                        P[vt] + 1 - T.Cast("int32", count[1] - j), first[N[vt]], base[N[vt]], place[N[vt]], ring_rows
                    )
                count[0] = count[1]
                for j in range(k):
                    if C[vt, j] >= 0:
                        place_of[count[0]] = T.Cast("int64", B[N[vt], C[vt, j] // block_rows]) * T.int64(
                            block_rows
                        ) + T.Cast("int64", C[vt, j] % block_rows)
                        count[0] = count[0] + T.int64(1)
                for h in range(heads):
                    _attend(
                        Q, Out, sink, vt, h, count[0], score, top, acc,
                        lambda j, d: T.if_then_else(
                            j < count[1],
                            window_element(F, R, place_of[j], d, dim),
                            latent_element(L, place_of[j], d, dim),
                        ), heads, dim,
                    )  # fmt: skip

    return main
