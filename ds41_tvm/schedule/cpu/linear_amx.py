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

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cpu import amx
from ds41_tvm.schedule.cpu.common import prefetch
from ds41_tvm.schedule.cpu.linear_pairs import PAIRS, STEP, PairSizes, decode_step

SIDE = amx.SIDE


def linear_amx(
    n: int, k: int, groups: int, weight: str, out: str, total: str, tile: int, rows: int,
    *, lead: int = 1024, task_kib: int = 1024, panel: int = 32,
) -> PrimFunc:  # fmt: skip
    """As `kernels.linear.linear`, for rows 1 or 16, k a multiple of 32, one or two whole tiles of columns."""
    sizes = PairSizes(n, k, groups, weight, out, total, tile, rows, lead, task_kib, panel)
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
            pairs = T.sblock_alloc_buffer((1, PAIRS, sizes.tile), "uint32")
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
                            decode_step(pairs, 0, 0, w, scale, vj, ko, sizes.tile)
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
                    pairs = T.sblock_alloc_buffer((sizes.columns, sizes.k // 2, sizes.tile), "uint32")
                    for c, ko in T.grid(sizes.columns, sizes.k // STEP):
                        decode_step(pairs, c, ko * PAIRS, w, scale, vj * sizes.columns + c, ko, sizes.tile)
                    _row_tiles(layout, pairs, 0, part, sums, Y, m, vp, vj, sizes)
                else:
                    _row_tiles(
                        layout, w, vj * (sizes.columns * (sizes.k // 2) * sizes.tile), part, sums, Y, m, vp, vj, sizes
                    )
                T.evaluate(amx.op("tilerelease"))
