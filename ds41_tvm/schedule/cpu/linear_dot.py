"""Linear layers by dot products of bf16 pairs (x86 ``avx512bf16``): twice the products of a fused multiply-add.

Its own program, because the instruction cannot be reached by scheduling the plain kernel. Same signature and packed
layout as `kernels.linear`: a uint32 pair of bf16 weights is what the instruction wants. Sums are f32, inner indices in
ascending order within a chunk (`linear_pairs.CHUNK`), chunks joined in ascending order; one row and many rows add
alike, so a token's bits do not depend on `rows`.

One row streams the weights once, at the speed of memory; prefetches are off by default, as the processors that have
these instructions and no tile registers fetch ahead better alone (measured: 28 against 15 GB/s). Many rows are bound by
the instruction: `rows` x 32 sums stay in registers, activations are first laid out so that a step's lie together, and a
task's weights stay in the second-level cache while all rows pass by.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cpu import e4m3
from ds41_tvm.schedule.cpu.common import prefetch
from ds41_tvm.schedule.cpu.dot import IMPORT, LANES, SOURCE, dot
from ds41_tvm.schedule.cpu.linear_pairs import PAIRS, STEP, PairSizes, decode_step, scaled_pair, together_options

WRITTEN_OUT = 4  # pairs of a step of many rows in a row: enough to hide the loop, few enough to compile quickly


def linear_dot(
    n: int, k: int, groups: int, weight: str, out: str, total: str, tile: int, rows: int,
    *, lead: int = 0, together: int = 0, task_kib: int = 512, panel: int = 64,
) -> PrimFunc:  # fmt: skip
    """As `kernels.linear.linear`, for k a multiple of 32 and tiles of 16 or 32 columns; `together` 0 is the default."""
    tiles = together or together_options(n, tile, groups)[0]
    sizes = PairSizes(n, k, groups, weight, out, total, tile, rows, lead, task_kib, panel, tiles)
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


def _pairs_of(X: Any, tile: Any, row: Any, first: Any) -> Any:
    """Elements first..first + 31 of a row of bf16 values as 16 pairs."""
    return T.reinterpret("uint32x16", X[tile, row, T.ramp(first, 1, STEP)])


@T.macro
def _add(part, i, j, x, pairs):
    """Vector j of part[i] += the products of one pair of activations with those of 16 columns."""
    part[i, T.ramp(j * LANES, 1, LANES)] = dot(part[i, T.ramp(j * LANES, 1, LANES)], T.broadcast(x, LANES), pairs)


@T.macro
def _zero(part, rows, tile):
    for i in T.unroll(rows):
        for j in T.vectorized(tile):
            part[i, j] = T.float32(0)


@T.macro
def _join(part, sums, rows, first, tile, total):
    """sums (+)= part."""
    for i in T.unroll(rows):
        for j in T.vectorized(tile):
            sums[i, j] = T.if_then_else(first, T.Cast(total, T.float32(0)), sums[i, j]) + T.Cast(total, part[i, j])


# ---- one row


@T.macro
def _row_step(part, c, x, at, w, column, tile):
    """part[c] += the products of 16 pairs: `x` and rows of tile `column` of bf16 weights, both from `at` on."""
    for i in T.unroll(PAIRS):
        for j in T.unroll(tile // LANES):
            _add(part, c, j, x[at + i], w[column, at + i, T.ramp(j * LANES, 1, LANES)])


@T.macro
def _scaled_row_step(part, c, x, at, w, scale, column, ko, pairs, sizes):
    """As `_row_step` for fp8 weights; `part` has the columns in the order of `sizes.column`."""
    code: T.let = scale[column * sizes.tile // 32, ko]
    if sizes.tile == 32 and e4m3.in_range(code):
        low0: T.let = e4m3.table(code)[0]
        low1: T.let = e4m3.table(code)[1]
        high0: T.let = e4m3.table(code)[2]
        high1: T.let = e4m3.table(code)[3]
        for i in T.unroll(PAIRS):
            codes: T.let = T.reinterpret("uint8x64", w[column, at + i, T.ramp(0, 1, sizes.tile)])
            _add(part, c, 0, x[at + i], e4m3.decode_half(0, codes, low0, low1, high0, high1))
            _add(part, c, 1, x[at + i], e4m3.decode_half(1, codes, low0, low1, high0, high1))
    else:
        for i in range(PAIRS):
            for j in T.vectorized(sizes.tile):
                pairs[j] = scaled_pair(w[column, at + i, sizes.column(j)], code)
            for j in T.unroll(sizes.tile // LANES):
                _add(part, c, j, x[at + i], pairs[T.ramp(j * LANES, 1, LANES)])


@T.macro
def _fetch_ahead(w, column, ko, sizes):
    """Prefetches a step's weights, `lead` bytes further on."""
    for line in T.unroll(sizes.lines):
        ahead: T.let = (line * 64 + sizes.lead) // sizes.word_bytes
        T.evaluate(prefetch(w.access_ptr("r", offset=(column * (sizes.k // 2) + ko * PAIRS) * sizes.tile + ahead)))


@T.macro
def _one_row(X, w, scale, Y, m, sizes):
    """A task takes `together` tiles of columns in step: a sum waits for the one before it, other tiles fill the time.

    Columns of fp8 weights are summed in the order in which they are cheapest to decode, and stored in their own.
    """
    for jo in T.parallel(sizes.n // sizes.tile // sizes.together):
        with T.sblock("column_tiles"):
            vj = T.axis.spatial(sizes.n // sizes.tile // sizes.together, jo)
            T.reads(
                X[0:m, 0, 0 : sizes.groups * sizes.k],
                w[vj * sizes.together : vj * sizes.together + sizes.together, 0 : sizes.k // 2, 0 : sizes.tile],
            )
            T.writes(Y[0:m, 0, vj * sizes.together * sizes.tile : (vj + 1) * sizes.together * sizes.tile])
            x = T.sblock_alloc_buffer((sizes.k // 2,), "uint32")
            part = T.sblock_alloc_buffer((sizes.together, sizes.tile), "float32", scope="local")
            sums = T.sblock_alloc_buffer((sizes.together, sizes.tile), sizes.total_type, scope="local")
            pairs = T.sblock_alloc_buffer((sizes.tile,), "uint32", scope="local")
            first: T.let = vj * sizes.together
            with T.attr(T.int32(0), IMPORT, SOURCE):
                for b in range(m):
                    for ki in range(sizes.k // STEP):
                        x[T.ramp(ki * PAIRS, 1, PAIRS)] = _pairs_of(
                            X, b, 0, first * sizes.tile // (sizes.n // sizes.groups) * sizes.k + ki * STEP
                        )
                    for chunk in range(sizes.chunks[0]):
                        _zero(part, sizes.together, sizes.tile)
                        for step in range(sizes.chunks[1]):
                            ko: T.let = chunk * sizes.chunks[1] + step
                            for c in T.unroll(sizes.together):
                                _fetch_ahead(w, first + c, ko, sizes)
                                if sizes.weight == "fp8":
                                    _scaled_row_step(part, c, x, ko * PAIRS, w, scale, first + c, ko, pairs, sizes)
                                else:
                                    _row_step(part, c, x, ko * PAIRS, w, first + c, sizes.tile)
                        _join(part, sums, sizes.together, chunk == 0, sizes.tile, sizes.total_type)
                    for c in T.unroll(sizes.together):
                        for j in T.vectorized(sizes.tile):
                            Y[b, 0, (first + c) * sizes.tile + sizes.column(j)] = sizes.store(
                                T.Cast("float32", sums[c, j])
                            )


# ---- many rows


@T.macro
def _fetch_step(w, column, step, sizes):
    """Asks for a step's weights of a column tile, into the second-level cache; beyond the last one nothing happens."""
    for line in T.unroll(PAIRS * sizes.tile * sizes.word_bytes // 64):
        T.evaluate(
            prefetch(
                w.access_ptr(
                    "r",
                    offset=(column * (sizes.k // 2) + step * PAIRS) * sizes.tile + line * 64 // sizes.word_bytes,
                ),
                keep=2,
            )
        )


@T.macro
def _multiply(layout, weights, at, first, part, b, step, sizes):
    """part[r] += row r of tile b in the layout's step `step` times the weights from ``weights[at, first]`` on."""
    for io in range(PAIRS // WRITTEN_OUT):
        for ii in T.unroll(WRITTEN_OUT):
            for r in T.unroll(sizes.rows):
                for j in T.unroll(sizes.tile // LANES):
                    _add(
                        part, r, j, layout[b, step, r, io * WRITTEN_OUT + ii],
                        weights[at, first + io * WRITTEN_OUT + ii, T.ramp(j * LANES, 1, LANES)],
                    )  # fmt: skip


@T.macro
def _tile(layout, w, pairs, part, sums, b, column, chunk, group, fetches, sizes):
    """A chunk's products of row tile b, added to its sums; `fetches`: ask for the next chunk's weights meanwhile."""
    _zero(part, sizes.rows, sizes.tile)
    for step in range(sizes.chunks[1]):
        ko: T.let = chunk * sizes.chunks[1] + step
        if fetches:
            _fetch_step(w, column, ko + sizes.chunks[1], sizes)
        if sizes.weight == "fp8":
            _multiply(layout, pairs, 0, step * PAIRS, part, b, group + ko, sizes)
        else:
            _multiply(layout, w, column, ko * PAIRS, part, b, group + ko, sizes)
    for r in T.unroll(sizes.rows):
        for j in T.vectorized(sizes.tile):
            sums[b, r, j] = T.if_then_else(chunk == 0, T.Cast(sizes.total_type, T.float32(0)), sums[b, r, j]) + T.Cast(
                sizes.total_type, part[r, j]
            )


@T.macro
def _columns(layout, w, scale, part, sums, pairs, Y, m, vp, vj, sizes):
    """The task's columns for all row tiles of the panel.

    A chunk's weights of one column tile stay in the first-level cache while all row tiles pass by; the first of these
    asks for the next chunk, so that memory is read while products are made.
    """
    tiles: T.let = T.min(m - vp * sizes.panel, T.int64(sizes.panel))
    for c, chunk in T.grid(sizes.columns, sizes.chunks[0]):
        column: T.let = vj * sizes.columns + c
        group: T.let = column * sizes.tile // (sizes.n // sizes.groups) * (sizes.k // STEP)
        if sizes.weight == "fp8":
            for step in range(sizes.chunks[1]):
                ko: T.let = chunk * sizes.chunks[1] + step
                decode_step(pairs, 0, step * PAIRS, w, scale, column, ko, sizes.tile, sizes.tile == 32)
        _tile(layout, w, pairs, part, sums, 0, column, chunk, group, True, sizes)
        for b in range(tiles - T.int64(1)):
            _tile(layout, w, pairs, part, sums, b + T.int64(1), column, chunk, group, False, sizes)
        if chunk == sizes.chunks[0] - 1:
            for b, r in T.grid(tiles, sizes.rows):
                for j in T.vectorized(sizes.tile):
                    Y[vp * sizes.panel + b, r, column * sizes.tile + sizes.column(j)] = sizes.store(
                        T.Cast("float32", sums[b, r, j])
                    )


@T.macro
def _many_rows(X, w, scale, Y, m, sizes):
    layout = T.sblock_alloc_buffer((sizes.panel, sizes.groups * sizes.k // STEP, sizes.rows, PAIRS), "uint32")
    for panel in range((m + sizes.panel - 1) // sizes.panel):
        for tile in T.parallel(T.min(m - panel * sizes.panel, T.int64(sizes.panel))):
            with T.sblock("lay_out"):
                vp, vt = T.axis.remap("SS", [panel, tile])
                T.reads(X[vp * sizes.panel + vt, 0 : sizes.rows, 0 : sizes.groups * sizes.k])
                T.writes(layout[vt, 0 : sizes.groups * sizes.k // STEP, 0 : sizes.rows, 0:PAIRS])
                for ko, i in T.grid(sizes.groups * sizes.k // STEP, sizes.rows):
                    layout[vt, ko, i, T.ramp(0, 1, PAIRS)] = _pairs_of(X, vp * sizes.panel + vt, i, ko * STEP)
        for task in T.parallel(sizes.n // sizes.tile // sizes.columns):
            with T.sblock("columns"):
                vp, vj = T.axis.remap("SS", [panel, task])
                T.reads(
                    layout[0 : sizes.panel, 0 : sizes.groups * sizes.k // STEP, 0 : sizes.rows, 0:PAIRS],
                    w[0 : sizes.n // sizes.tile, 0 : sizes.k // 2, 0 : sizes.tile],
                )
                T.writes(Y[0:m, 0 : sizes.rows, 0 : sizes.n])
                part = T.sblock_alloc_buffer((sizes.rows, sizes.tile), "float32", scope="local")
                sums = T.sblock_alloc_buffer((sizes.panel, sizes.rows, sizes.tile), sizes.total_type)
                pairs = T.sblock_alloc_buffer((1, sizes.chunks[1] * PAIRS, sizes.tile), "uint32")
                with T.attr(T.int32(0), IMPORT, SOURCE):
                    _columns(layout, w, scale, part, sums, pairs, Y, m, vp, vj, sizes)
