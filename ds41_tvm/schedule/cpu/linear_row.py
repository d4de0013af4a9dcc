"""Linear layers for one row with fused multiply-adds: weights are streamed once, at the speed of memory.

Its own program, because two things cannot be scheduled into the plain kernel: prefetches that run ahead of the reads,
and fp8 weights decoded by table (`e4m3`) before they are used. Sums are taken in the order of the plain kernel: per
column, a chunk's products in ascending order with one rounding each, then the chunk's sum joins the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import e4m3_code_to_f32
from ds41_tvm.kernels.linear import chunk_of
from ds41_tvm.numerics.tir import bf16_to_f32, e8m0_to_f32
from ds41_tvm.schedule.cpu import e4m3
from ds41_tvm.schedule.cpu.common import prefetch
from ds41_tvm.schedule.linear_sizes import LinearSizes

STEP, PAIRS = 32, 16  # inner indices that share a block scale


@dataclass(frozen=True)
class Sizes(LinearSizes):
    """Static sizes of `kernels.linear.linear` for one row, and the knob `lead`: bytes that prefetches run ahead."""

    tables: bool
    lead: int

    @property
    def chunk(self) -> int:
        return chunk_of(self.k, self.weight, self.total)

    @property
    def lines(self) -> int:
        """Cache lines of a step's weights, each to be prefetched."""
        return -(-PAIRS * self.tile * self.word_bytes // 64) if self.lead else 0


def takes(k: int, weight: str, total: str, rows: int) -> bool:
    """Whether `linear_row` has a program: steps of 32 inner indices are whole chunks, or chunks whole steps."""
    if rows != 1 or weight == "f32" or k % STEP:
        return False
    chunk = chunk_of(k, weight, total)
    return chunk % STEP == 0 or STEP % chunk == 0


def _low(word: Any) -> Any:
    """The bf16 value in the low half of a uint32, as f32."""
    return T.reinterpret("float32", T.shift_left(word, T.uint32(16)))


def _high(word: Any) -> Any:
    return T.reinterpret("float32", T.bitwise_and(word, T.uint32(0xFFFF0000)))


@T.macro
def _add_products(part, x, at, count, tile, even, odd):
    """part[j] += x[at + 2i] * even(i, j), then += x[at + 2i + 1] * odd(i, j), for i below `count`."""
    for i in T.unroll(count):
        for j in T.vectorized(tile):
            part[j] = part[j] + x[at + 2 * i] * even(i, j)
        for j in T.vectorized(tile):
            part[j] = part[j] + x[at + 2 * i + 1] * odd(i, j)


@T.macro
def _decode(pairs, w, column, step, code, tile):
    """pairs[i] = the scaled bf16 values of inner indices 32 step + 2i and + 1."""
    low0: T.let = e4m3.table(code)[0]
    low1: T.let = e4m3.table(code)[1]
    high0: T.let = e4m3.table(code)[2]
    high1: T.let = e4m3.table(code)[3]
    for i in T.unroll(PAIRS):
        pairs[i, T.ramp(0, 1, tile)] = e4m3.decode(
            T.reinterpret("uint8x64", w[column, step * PAIRS + i, T.ramp(0, 1, tile)]), low0, low1, high0, high1
        )


@T.macro
def _add_fp8(part, x, w, scale, column, step, first, count, pairs, sizes):
    """`_add_products` of the pairs first..first + count - 1 of block `step`."""
    code: T.let = scale[column * sizes.tile // 32, step]
    if sizes.tables and sizes.tile == 32 and e4m3.in_range(code):
        if first == 0:
            _decode(pairs, w, column, step, code, sizes.tile)
        _add_products(
            part, x, step * STEP + 2 * first, count, sizes.tile,
            lambda i, j: _low(pairs[first + i, j]), lambda i, j: _high(pairs[first + i, j]),
        )  # fmt: skip
    else:
        factor: T.let = e8m0_to_f32(code)
        _add_products(
            part, x, step * STEP + 2 * first, count, sizes.tile,
            lambda i, j: e4m3_code_to_f32(w[column, step * PAIRS + first + i, j] & T.uint16(0xFF)) * factor,
            lambda i, j: e4m3_code_to_f32(T.shift_right(w[column, step * PAIRS + first + i, j], T.uint16(8))) * factor,
        )  # fmt: skip


@T.macro
def _add_step(part, x, w, scale, column, step, first, count, pairs, sizes):
    if sizes.weight == "fp8":
        _add_fp8(part, x, w, scale, column, step, first, count, pairs, sizes)
    else:
        _add_products(
            part, x, step * STEP + 2 * first, count, sizes.tile,
            lambda i, j: _low(w[column, step * PAIRS + first + i, j]),
            lambda i, j: _high(w[column, step * PAIRS + first + i, j]),
        )  # fmt: skip


@T.macro
def _fetch_ahead(w, column, step, sizes):
    """Prefetch what lies `lead` bytes behind this step's weights."""
    for line in T.unroll(sizes.lines):
        T.evaluate(
            prefetch(
                w.access_ptr(
                    "r",
                    offset=(column * (sizes.k // 2) + step * PAIRS) * sizes.tile
                    + (line * 64 + sizes.lead) // sizes.word_bytes,
                )
            )
        )


@T.macro
def _zero(part, tile):
    for j in T.vectorized(tile):
        part[j] = T.float32(0)


@T.macro
def _join(sums, part, sizes):
    for j in T.vectorized(sizes.tile):
        sums[j] = sums[j] + T.Cast(sizes.total_type, part[j])


@T.macro
def _row(X, w, scale, Y, m, sizes):
    for jo in T.parallel(sizes.n // sizes.tile):
        with T.sblock("column_tile"):
            vj = T.axis.spatial(sizes.n // sizes.tile, jo)
            T.reads(X[0:m, 0, 0 : sizes.groups * sizes.k], w[vj, 0 : sizes.k // 2, 0 : sizes.tile])
            T.writes(Y[0:m, 0, vj * sizes.tile : vj * sizes.tile + sizes.tile])
            x = T.sblock_alloc_buffer((sizes.k,), "float32")
            part = T.sblock_alloc_buffer((sizes.tile,), "float32", scope="local")
            sums = T.sblock_alloc_buffer((sizes.tile,), sizes.total_type, scope="local")
            pairs = T.sblock_alloc_buffer((PAIRS, sizes.tile), "uint32")
            for b in range(m):
                for block in range(sizes.k // STEP):
                    for i in T.vectorized(STEP):
                        x[block * STEP + i] = bf16_to_f32(
                            X[b, 0, vj * sizes.tile // (sizes.n // sizes.groups) * sizes.k + block * STEP + i]
                        )
                for j in T.vectorized(sizes.tile):
                    sums[j] = T.Cast(sizes.total_type, T.float32(0))
                for chunk in range(sizes.k // max(sizes.chunk, STEP)):
                    if sizes.chunk >= STEP:
                        _zero(part, sizes.tile)
                        for s in range(sizes.chunk // STEP):
                            step: T.let = chunk * (sizes.chunk // STEP) + s
                            _fetch_ahead(w, vj, step, sizes)
                            _add_step(part, x, w, scale, vj, step, 0, PAIRS, pairs, sizes)
                        _join(sums, part, sizes)
                    else:
                        _fetch_ahead(w, vj, chunk, sizes)
                        for s in T.unroll(STEP // sizes.chunk):
                            _zero(part, sizes.tile)
                            _add_step(
                                part, x, w, scale, vj, chunk, s * (sizes.chunk // 2), sizes.chunk // 2, pairs, sizes
                            )
                            _join(sums, part, sizes)
                for j in T.vectorized(sizes.tile):
                    Y[b, 0, vj * sizes.tile + j] = sizes.store(T.Cast("float32", sums[j]))


def linear_row(
    n: int, k: int, groups: int, weight: str, out: str, total: str, tile: int, tables: bool, *, lead: int = 1024
) -> PrimFunc:
    """As `kernels.linear.linear` for ``rows`` 1, where `takes` says so. `tables`: the target has ``avx512vbmi``."""
    sizes = Sizes(n, k, groups, weight, out, total, tile, tables, lead)
    width = groups * k
    if weight == "fp8":

        @T.prim_func(s_tir=True)
        def scaled(
            x: T.handle,
            w: T.Buffer((n // tile, k // 2, tile), "uint16"),
            scale: T.Buffer(((n + 31) // 32, k // 32), "uint8"),
            y: T.handle,
        ):
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            m = T.int64()
            X = T.match_buffer(x, (m, 1, width), "uint16")
            Y = T.match_buffer(y, (m, 1, n), sizes.out_type)
            _row(X, w, scale, Y, m, sizes)

        return scaled

    @T.prim_func(s_tir=True)
    def plain(x: T.handle, w: T.Buffer((n // tile, k // 2, tile), "uint32"), y: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        X = T.match_buffer(x, (m, 1, width), "uint16")
        Y = T.match_buffer(y, (m, 1, n), sizes.out_type)
        _row(X, w, w, Y, m, sizes)

    return plain
