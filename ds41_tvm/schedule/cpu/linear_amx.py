"""Linear layers on AMX tiles (x86 ``amx-bf16``): 16 rows x 16 columns x 32 inner indices per instruction.

Its own program, because a tile register cannot be reached by scheduling the plain kernel. Same signature and packed
layout as `kernels.linear`: a uint32 pair of bf16 weights is what the tile instruction wants. Sums are f32, taken over
32 inner indices at a time; one row and many rows add them in the same order, so a token's bits do not depend on `rows`.
Subnormal products count as zero, as the hardware defines.

One row streams the weights once, at the speed of memory. Many rows are bound by the tile instructions: activations are
first laid out tile by tile, two row tiles share a load of weights, and a task's weights stay in the second-level cache
while all rows pass by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import e4m3_code_to_f32
from ds41_tvm.numerics.tir import e8m0_to_f32
from ds41_tvm.schedule.cpu import amx, e4m3
from ds41_tvm.schedule.cpu.common import prefetch
from ds41_tvm.schedule.linear_sizes import LinearSizes

STEP, PAIRS, SIDE = amx.STEP, amx.PAIRS, amx.SIDE
# Inner indices summed in a tile before they join the total, by type of the total: see `kernels.linear` for why.
CHUNK = {"f32": 512, "f64": 128}


@dataclass(frozen=True)
class Sizes(LinearSizes):
    """Static sizes of `kernels.linear.linear`, and the knobs."""

    rows: int
    # One row reads every weight once: bytes by which prefetches run ahead of it (measured: 512 to 4096 are within 5 %,
    # none is a quarter slower).
    lead: int
    task_kib: int  # bf16 weights of a task of many rows: they are to stay in the second-level cache
    panel: int  # row tiles laid out at a time: bounds the memory of the layout

    @property
    def lines(self) -> int:
        """Cache lines to prefetch in a step."""
        return PAIRS * self.tile * self.word_bytes // 64 if self.lead else 0

    @property
    def chunks(self) -> tuple[int, int]:
        """(chunks, steps of each): as few as keep a chunk within `CHUNK` inner indices and divide k."""
        steps = next(s for s in range(CHUNK[self.total] // STEP, 0, -1) if (self.k // STEP) % s == 0)
        return self.k // STEP // steps, steps

    @property
    def columns(self) -> int:
        """Column tiles of a task of many rows."""
        tiles = self.n // self.tile
        fits = (c for c in range(tiles, 0, -1) if tiles % c == 0 and c * self.tile * self.k * 2 <= self.task_kib << 10)
        return next(fits, 1)


def linear_amx(
    n: int, k: int, groups: int, weight: str, out: str, total: str, tile: int, rows: int,
    *, lead: int = 1024, task_kib: int = 1024, panel: int = 32,
) -> PrimFunc:  # fmt: skip
    """As `kernels.linear.linear`, for rows 1 or 16, k a multiple of 32, one or two whole tiles of columns."""
    sizes = Sizes(n, k, groups, weight, out, total, tile, rows, lead, task_kib, panel)
    body = _one_row if rows == 1 else _many_rows
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
            X = T.match_buffer(x, (m, rows, width), "uint16")
            Y = T.match_buffer(y, (m, rows, n), sizes.out_type)
            body(X, w, scale, Y, m, sizes)

        return scaled

    @T.prim_func(s_tir=True)
    def plain(x: T.handle, w: T.Buffer((n // tile, k // 2, tile), "uint32"), y: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        X = T.match_buffer(x, (m, rows, width), "uint16")
        Y = T.match_buffer(y, (m, rows, n), sizes.out_type)
        body(X, w, w, Y, m, sizes)

    return plain


# ---- what both share


def _pair(codes: Any, scale: Any) -> Any:
    """Two e4m3 codes in a uint16 and their e8m0 scale -> two bf16 values in a uint32; exact, four significant bits."""
    s = e8m0_to_f32(scale)
    low = T.reinterpret("uint32", e4m3_code_to_f32(codes & T.uint16(0xFF)) * s)
    high = T.reinterpret("uint32", e4m3_code_to_f32(T.shift_right(codes, T.uint16(8))) * s)
    return T.bitwise_or(T.shift_right(low, T.uint32(16)), T.bitwise_and(high, T.uint32(0xFFFF0000)))


@T.macro
def _decode_step(pairs, row, w, scale, column, ko, tile):
    """pairs[row + i] = the bf16 pairs of inner indices 32 ko + 2i and + 1 in column tile `column`, scaled; exact."""
    code: T.let = scale[column * tile // 32, ko]
    if tile == 32 and e4m3.in_range(code):
        low0: T.let = e4m3.table(code)[0]
        low1: T.let = e4m3.table(code)[1]
        high0: T.let = e4m3.table(code)[2]
        high1: T.let = e4m3.table(code)[3]
        for i in T.unroll(PAIRS):
            pairs[row + i, T.ramp(0, 1, tile)] = e4m3.decode(
                T.reinterpret("uint8x64", w[column, ko * PAIRS + i, T.ramp(0, 1, tile)]), low0, low1, high0, high1
            )
    else:
        for i in range(PAIRS):
            for j in T.vectorized(tile):
                pairs[row + i, j] = _pair(w[column, ko * PAIRS + i, j], code)


@T.macro
def _add(part, sums, rows, first, tile, total):
    """sums (+)= part."""
    for i in range(rows):
        for j in T.vectorized(tile):
            sums[i, j] = T.if_then_else(first, T.Cast(total, T.float32(0)), sums[i, j]) + T.Cast(total, part[i, j])


# ---- one row: accumulators 0..1 (one per 16 columns), activations 4, weights 6..7


@T.macro
def _multiply_row(weights, first, tile):
    for c in T.unroll(tile // SIDE):
        T.evaluate(amx.load(6 + c, weights, first + c * SIDE, tile * 4))
    for c in T.unroll(tile // SIDE):
        T.evaluate(amx.multiply(c, 4, 6 + c))


@T.macro
def _one_row(X, w, scale, Y, m, sizes):
    for jo in T.parallel(sizes.n // sizes.tile):
        with T.sblock("column_tile"):
            vj = T.axis.spatial(sizes.n // sizes.tile, jo)
            T.reads(X[0:m, 0, 0 : sizes.groups * sizes.k], w[vj, 0 : sizes.k // 2, 0 : sizes.tile])
            T.writes(Y[0:m, 0, vj * sizes.tile : vj * sizes.tile + sizes.tile])
            setup = T.sblock_alloc_buffer((64,), "uint8", scope="local")
            part = T.sblock_alloc_buffer((1, sizes.tile), "float32", scope="local")
            sums = T.sblock_alloc_buffer((1, sizes.tile), sizes.total_type, scope="local")
            pairs = T.sblock_alloc_buffer((PAIRS, sizes.tile), "uint32")
            amx.configure(setup, 1, 6)
            for b in range(m):
                for chunk in range(sizes.chunks[0]):
                    amx.clear(sizes.tile // SIDE)
                    for step in range(sizes.chunks[1]):
                        ko: T.let = chunk * sizes.chunks[1] + step
                        first: T.let = (vj * (sizes.k // 2) + ko * PAIRS) * sizes.tile
                        for line in T.unroll(sizes.lines):
                            ahead: T.let = (line * 64 + sizes.lead) // sizes.word_bytes
                            T.evaluate(prefetch(w.access_ptr("r", offset=first + ahead)))
                        group: T.let = vj * sizes.tile // (sizes.n // sizes.groups)
                        x0: T.let = b * (sizes.groups * sizes.k) + group * sizes.k + ko * STEP
                        T.evaluate(amx.load(4, X, x0, 64))
                        if sizes.weight == "fp8":
                            _decode_step(pairs, 0, w, scale, vj, ko, sizes.tile)
                            _multiply_row(pairs, 0, sizes.tile)
                        else:
                            _multiply_row(w, first, sizes.tile)
                    for c in T.unroll(sizes.tile // SIDE):
                        T.evaluate(amx.store(c, part, c * SIDE, sizes.tile * 4))
                    _add(part, sums, 1, chunk == 0, sizes.tile, sizes.total_type)
                for j in T.vectorized(sizes.tile):
                    Y[b, 0, vj * sizes.tile + j] = sizes.store(T.Cast("float32", sums[0, j]))
            T.evaluate(amx.op("tilerelease"))


# ---- many rows: accumulators 2i + c (row tile i, columns c), activations 4..5, weights 6..7


@T.macro
def _row_tiles(layout, weights, first, part, sums, Y, m, vp, vj, sizes):
    """The task's columns for all row tiles of the panel, two at a time; an odd last one is multiplied twice."""
    tiles: T.let = T.min(m - vp * sizes.panel, T.int64(sizes.panel))
    for b, c in T.grid((tiles + T.int64(1)) // 2, sizes.columns):
        column: T.let = vj * sizes.columns + c
        group: T.let = column * sizes.tile // (sizes.n // sizes.groups) * (sizes.k // STEP)
        x0: T.let = (b * 2 * (sizes.groups * sizes.k // STEP) + group) * (SIDE * STEP)
        x1: T.let = (T.min(b * 2 + 1, tiles - 1) * (sizes.groups * sizes.k // STEP) + group) * (SIDE * STEP)
        w0: T.let = first + c * (sizes.k // 2) * sizes.tile
        for chunk in range(sizes.chunks[0]):
            amx.clear(4)
            for step in range(sizes.chunks[1]):
                ko: T.let = chunk * sizes.chunks[1] + step
                for j in T.unroll(sizes.tile // SIDE):
                    T.evaluate(amx.load(6 + j, weights, w0 + ko * (PAIRS * sizes.tile) + j * SIDE, sizes.tile * 4))
                T.evaluate(amx.load(4, layout, x0 + ko * (SIDE * STEP), STEP * 2))
                for j in T.unroll(sizes.tile // SIDE):
                    T.evaluate(amx.multiply(j, 4, 6 + j))
                T.evaluate(amx.load(5, layout, x1 + ko * (SIDE * STEP), STEP * 2))
                for j in T.unroll(sizes.tile // SIDE):
                    T.evaluate(amx.multiply(2 + j, 5, 6 + j))
            for i in T.unroll(2):
                for j in T.unroll(sizes.tile // SIDE):
                    T.evaluate(amx.store(2 * i + j, part, i * (SIDE * sizes.tile) + j * SIDE, sizes.tile * 4))
            _add(part, sums, 2 * SIDE, chunk == 0, sizes.tile, sizes.total_type)
        for i in range(2 * SIDE):
            if b * 2 + i // SIDE < tiles:
                for j in T.vectorized(sizes.tile):
                    Y[vp * sizes.panel + b * 2 + i // SIDE, i % SIDE, column * sizes.tile + j] = sizes.store(
                        T.Cast("float32", sums[i, j])
                    )


@T.macro
def _many_rows(X, w, scale, Y, m, sizes):
    layout = T.sblock_alloc_buffer((sizes.panel, sizes.groups * sizes.k // STEP, SIDE, STEP), "uint16")
    for panel in range((m + sizes.panel - 1) // sizes.panel):
        for tile in T.parallel(T.min(m - panel * sizes.panel, T.int64(sizes.panel))):
            with T.sblock("lay_out"):
                vp, vt = T.axis.remap("SS", [panel, tile])
                T.reads(X[vp * sizes.panel + vt, 0:SIDE, 0 : sizes.groups * sizes.k])
                T.writes(layout[vt, 0 : sizes.groups * sizes.k // STEP, 0:SIDE, 0:STEP])
                for ko, i in T.grid(sizes.groups * sizes.k // STEP, SIDE):
                    for j in T.vectorized(STEP):
                        layout[vt, ko, i, j] = X[vp * sizes.panel + vt, i, ko * STEP + j]
        for task in T.parallel(sizes.n // sizes.tile // sizes.columns):
            with T.sblock("columns"):
                vp, vj = T.axis.remap("SS", [panel, task])
                T.reads(
                    layout[0 : sizes.panel, 0 : sizes.groups * sizes.k // STEP, 0:SIDE, 0:STEP],
                    w[0 : sizes.n // sizes.tile, 0 : sizes.k // 2, 0 : sizes.tile],
                )
                T.writes(Y[0:m, 0:SIDE, 0 : sizes.n])
                setup = T.sblock_alloc_buffer((64,), "uint8", scope="local")
                part = T.sblock_alloc_buffer((2 * SIDE, sizes.tile), "float32", scope="local")
                sums = T.sblock_alloc_buffer((2 * SIDE, sizes.tile), sizes.total_type, scope="local")
                amx.configure(setup, SIDE, 0)
                if sizes.weight == "fp8":
                    pairs = T.sblock_alloc_buffer((sizes.columns * sizes.k // 2, sizes.tile), "uint32")
                    for c, ko in T.grid(sizes.columns, sizes.k // STEP):
                        _decode_step(
                            pairs, c * (sizes.k // 2) + ko * PAIRS, w, scale, vj * sizes.columns + c, ko, sizes.tile
                        )
                    _row_tiles(layout, pairs, 0, part, sums, Y, m, vp, vj, sizes)
                else:
                    _row_tiles(
                        layout, w, vj * (sizes.columns * (sizes.k // 2) * sizes.tile), part, sums, Y, m, vp, vj, sizes
                    )
                T.evaluate(amx.op("tilerelease"))
