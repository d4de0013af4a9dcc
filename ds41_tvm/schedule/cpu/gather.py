"""The frame of attention programs for CPUs: gather and decode the rows of a query once, then let all its heads use
them.

A task is one query, or a part of its heads where `split` > 1: heads do not touch each other, so the bits stay the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.attention import window_row
from ds41_tvm.kernels.expr import e4m3_code_to_f32
from ds41_tvm.numerics.tir import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32
from ds41_tvm.schedule.cpu.common import prefetch

AHEAD = 8  # latents by which a prefetch runs ahead: they lie anywhere in memory
STRIDE = 16  # see `spread`


class Sizes(NamedTuple):
    """Static sizes of `kernels.attention.sparse_attention`, and into how many tasks the heads are cut."""

    heads: int
    dim: int
    window: int
    ring_rows: int
    block_rows: int
    k: int
    split: int

    @property
    def task_heads(self) -> int:
        """Heads of one task."""
        return self.heads // self.split

    @property
    def padded(self) -> int:
        """Heads of one task, padded to whole vectors of 16."""
        return -(-self.task_heads // 16) * 16


def _bf16(value: Any) -> Any:
    """Bits of an f32 that is a bf16 value, as every cached element is."""
    return T.Cast("uint16", T.shift_right(T.reinterpret("uint32", value), T.uint32(16)))


@T.macro
def decode_window(rows, j, source, row, dim, panel):
    """Row j of `rows` = row `row` of the packed window rows `source`."""
    for b in range(dim // 32):
        for i in T.vectorized(32):
            rows[b * 32 // panel, j, b * 32 % panel + i] = _bf16(
                e4m3_code_to_f32(T.Cast("uint16", source[row, b * 32 + i])) * e8m0_to_f32(source[row, dim + b])
            )


@T.macro
def _decode_latent(rows, j, source, row, dim, panel):
    """Row j of `rows` = row `row` of the packed latents `source`, by arithmetic."""
    for b in range(dim // 32):
        for i in T.vectorized(16):
            rows[b * 32 // panel, j, b * 32 % panel + i] = _bf16(
                e2m1_to_f32(source[row, b * 16 + i]) * e4m3_to_f32(source[row, dim // 2 + 2 * b])
            )
        for i in T.vectorized(16):
            rows[b * 32 // panel, j, b * 32 % panel + 16 + i] = _bf16(
                e2m1_to_f32(T.shift_right(source[row, b * 16 + i], T.uint8(4)))
                * e4m3_to_f32(source[row, dim // 2 + 2 * b + 1])
            )


def _shuffle(vectors: list[Any], indices: list[int]) -> Any:
    return tirx.Shuffle(vectors, [tirx.IntImm("int32", i) for i in indices])


def _upper_halves(first: Any, second: Any) -> Any:
    """The bf16 bits of two float32x16 of bf16 values, uint16x32."""
    return _shuffle([T.reinterpret("uint16x32", part) for part in (first, second)], list(range(1, 64, 2)))


def _places(codes: Any) -> Any:
    """16 bytes of two codes each -> places in a table of 2 x 16: lower codes in the first half, upper in the second."""
    wide = T.Cast("uint16x16", codes)
    upper = T.bitwise_or(T.shift_right(wide, T.broadcast(T.uint16(4), 16)), T.broadcast(T.uint16(16), 16))
    return _shuffle([T.bitwise_and(wide, T.broadcast(T.uint16(15), 16)), upper], list(range(32)))


@T.macro
def _look_up_latent(rows, j, source, row, dim, panel):
    """As `_decode_latent`, 32 values by one permute of words (x86 ``avx512bw``)."""
    scale = T.sblock_alloc_buffer((dim // 16,), "float32")
    value = T.sblock_alloc_buffer((2, 16), "float32", scope="local")  # of all codes, by each of two scales
    for i in T.vectorized(dim // 16):
        scale[i] = e4m3_to_f32(source[row, dim // 2 + i])
    for b in range(dim // 32):
        for part in T.unroll(2):
            for code in T.vectorized(16):
                value[part, code] = e2m1_to_f32(T.Cast("uint8", code)) * scale[2 * b + part]
        rows[b * 32 // panel, j, T.ramp(b * 32 % panel, 1, 32)] = T.call_llvm_pure_intrin(
            "uint16x32",
            "llvm.x86.avx512.permvar.hi.512",
            _upper_halves(value[0, T.ramp(0, 1, 16)], value[1, T.ramp(0, 1, 16)]),
            _places(source[row, T.ramp(b * 16, 1, 16)]),
        )


def spread(task: Any, n: Any) -> Any:
    """The query of a task: 0, 16, 32, ..., then 1, 17, 33, ...

    Later queries of a prompt see more rows, and threads take tasks in contiguous shares, which would have unlike work
    if tasks were queries in order.
    """
    stride = T.int64(STRIDE)
    short, longer = n // stride, n % stride  # the first `longer` classes have one query more than `short`
    beyond = task - longer * (short + T.int64(1))
    # A select evaluates both sides: a divisor must not be zero.
    return T.Select(
        beyond < T.int64(0),
        task % (short + T.int64(1)) * stride + task // (short + T.int64(1)),
        beyond % T.max(short, T.int64(1)) * stride + longer + beyond // T.max(short, T.int64(1)),
    )


@T.macro
def _prefetch_latent(L, B, C, N, vt, j, k, block_rows, latent_bytes):
    """Asks for the row of selection `j`, or of the last one; an absent one asks for any row."""
    index: T.let = T.max(C[vt, T.min(j, k - 1)], 0)
    at: T.let = T.Cast("int64", B[N[vt], index // block_rows]) * T.int64(block_rows) + T.Cast(
        "int64", index % block_rows
    )
    for line in T.unroll((latent_bytes + 63) // 64):
        T.evaluate(prefetch(L.access_ptr("r", offset=at * T.int64(latent_bytes) + line * 64)))


def gathered_attention(
    sizes: Sizes, panel: int, permutes: bool, spare_rows: int, finish: Any, constants: Any
) -> PrimFunc:
    """`kernels.attention.sparse_attention` with the rows of a query as bf16 bits in a buffer ``[dim / panel, window +
    k + spare_rows, panel]``: `panel` channels of all rows lie together. `permutes`: the target has ``avx512bw``.

    The macro ``finish(Q, Out, sink, query, first head, rows, count, constants)`` computes and writes the task's heads
    from the first `count` rows; `constants` is handed to it.
    """
    if sizes.k:
        return _with_latents(
            sizes, panel, _look_up_latent if permutes else _decode_latent, spare_rows, finish, constants
        )
    return _window(sizes, panel, spare_rows, finish, constants)


@T.macro
def _gather_window(rows, at, count, F, R, P, N, first, base, place, vt, dim, window, ring_rows, panel):
    count[0] = T.Cast("int64", T.min(P[vt] + 1, window))
    for j in range(count[0]):
        at[0] = window_row(
            P[vt] + 1 - T.Cast("int32", count[0] - j), first[N[vt]], base[N[vt]], place[N[vt]], ring_rows
        )
        if at[0] >= T.int64(0):
            decode_window(rows, j, F, at[0], dim, panel)
        else:
            decode_window(rows, j, R, T.int64(-1) - at[0], dim, panel)


def _window(sizes: Sizes, panel: int, spare_rows: int, finish: Any, constants: Any) -> PrimFunc:
    all_heads, dim, window, ring_rows, _, _, split = sizes
    row_bytes = dim + dim // 32

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
                rows = T.sblock_alloc_buffer((dim // panel, window + spare_rows, panel), "uint16")
                count = T.sblock_alloc_buffer((1,), "int64", scope="local")
                at = T.sblock_alloc_buffer((1,), "int64", scope="local")
                vt: T.let = spread(v // T.int64(split), n)
                head: T.let = T.Cast("int32", v % T.int64(split)) * (all_heads // split)
                _gather_window(rows, at, count, F, R, P, N, first, base, place, vt, dim, window, ring_rows, panel)
                finish(Q, Out, sink, vt, head, rows, count[0], constants)

    return main


def _with_latents(
    sizes: Sizes, panel: int, decode_latent: Any, spare_rows: int, finish: Any, constants: Any
) -> PrimFunc:
    all_heads, dim, window, ring_rows, block_rows, k, split = sizes
    row_bytes, latent_bytes = dim + dim // 32, dim // 2 + dim // 16

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
                rows = T.sblock_alloc_buffer((dim // panel, window + k + spare_rows, panel), "uint16")
                count = T.sblock_alloc_buffer((1,), "int64", scope="local")
                at = T.sblock_alloc_buffer((1,), "int64", scope="local")
                vt: T.let = spread(v // T.int64(split), n)
                head: T.let = T.Cast("int32", v % T.int64(split)) * (all_heads // split)
                _gather_window(rows, at, count, F, R, P, N, first, base, place, vt, dim, window, ring_rows, panel)
                for j in range(k):
                    _prefetch_latent(L, B, C, N, vt, j + AHEAD, k, block_rows, latent_bytes)
                    if C[vt, j] >= 0:
                        at[0] = T.Cast("int64", B[N[vt], C[vt, j] // block_rows]) * T.int64(block_rows) + T.Cast(
                            "int64", C[vt, j] % block_rows
                        )
                        decode_latent(rows, count[0], L, at[0], dim, panel)
                        count[0] = count[0] + T.int64(1)
                finish(Q, Out, sink, vt, head, rows, count[0], constants)

    return main
