"""Which rows a query attends to, and how they come into shared memory as bf16 values.

A tile of packed rows is copied without waiting while the tile before is used; then each value is decoded once for all
heads.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ds41_tvm.kernels.attention import window_row
from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.attention_sizes import INVALID, ROWS, THREADS


@T.macro
def place_window(s, place, tiles, P, N, first, base, slots, vt, vx):
    """place[j] = row j of the window as `window_row` gives it; tiles[0] = tiles of them."""
    for i in range(-(-s.window_slots // THREADS)):
        if i * THREADS + vx < s.window_slots:
            place[i * THREADS + vx] = T.Select(
                i * THREADS + vx < T.min(P[vt] + 1, s.window),
                T.Cast(
                    "int32",
                    window_row(
                        T.max(P[vt] + 1 - s.window, 0) + i * THREADS + vx, first[N[vt]], base[N[vt]], slots[N[vt]],
                        s.ring_rows,
                    ),
                ),
                T.int32(INVALID),
            )  # fmt: skip
    if vx == 0:
        tiles[0] = (T.min(P[vt] + 1, s.window) + (ROWS - 1)) // ROWS
        tiles[1] = 0


@T.macro
def place_latents(s, place, tiles, N, B, C, vt, vx):
    """place[window_slots + j] = row of selected latent j; tiles[1] = tiles of them. A barrier must lie before."""
    for i in range(-(-(s.slots - s.window_slots) // THREADS)):
        if i * THREADS + vx < s.slots - s.window_slots:
            place[s.window_slots + i * THREADS + vx] = T.int32(INVALID)
        if i * THREADS + vx < s.k:
            if C[vt, i * THREADS + vx] >= 0:
                place[s.window_slots + i * THREADS + vx] = (
                    B[N[vt], C[vt, i * THREADS + vx] // s.block_rows] * s.block_rows
                    + C[vt, i * THREADS + vx] % s.block_rows
                )
                # The last one, as -1 follows it.
                if C[vt, T.min(i * THREADS + vx + 1, s.k - 1)] < 0 or i * THREADS + vx + 1 == s.k:
                    tiles[1] = (i * THREADS + vx) // ROWS + 1


def _piece_bytes(row_bytes: int) -> int:
    """Bytes of one copy: what divides a row, up to 16; 0 if rows are not even words."""
    return next((b for b in (16, 8, 4) if row_bytes % b == 0), 0)


def _bytes_word(source: Any, row: Any, i: Any, row_bytes: int) -> Any:
    """uint32 word i of a row of bytes of any length."""
    out = T.uint32(0)
    for b in range(4):
        byte = T.if_then_else(i * 4 + b < row_bytes, source[row, T.min(i * 4 + b, row_bytes - 1)], T.uint8(0))
        out = T.bitwise_or(out, T.shift_left(T.Cast("uint32", byte), T.uint32(8 * b)))
    return out


@T.macro
def _copy_row(s, raw, at, source, row, row_bytes, task):
    """Piece `task` of a row."""
    if _piece_bytes(row_bytes) > 0:
        memory.copy(
            s.mma, raw, (at * s.raw_words + task * (_piece_bytes(row_bytes) // 4),), _piece_bytes(row_bytes), source,
            (row,), task * _piece_bytes(row_bytes),
        )  # fmt: skip
    else:
        raw[at * s.raw_words + task] = _bytes_word(source, row, task, row_bytes)


def _pieces(row_bytes: int) -> int:
    return -(-row_bytes // (_piece_bytes(row_bytes) or 4))


@T.macro
def start_window(s, raw, place, tile, stage, F, R, vx):
    """Start to copy the packed rows of a tile of the window into the rows of a stage of `raw`."""
    for i in range(-(-ROWS * _pieces(s.window_bytes) // THREADS)):
        task: T.let = i * THREADS + vx
        if task < ROWS * _pieces(s.window_bytes):
            at: T.let = T.Cast("int64", place[tile * ROWS + task // _pieces(s.window_bytes)])
            if at >= T.int64(0):
                _copy_row(
                    s,
                    raw,
                    stage * ROWS + task // _pieces(s.window_bytes),
                    F,
                    at,
                    s.window_bytes,
                    task % _pieces(s.window_bytes),
                )
            if at < T.int64(0) and at > T.int64(INVALID):
                _copy_row(
                    s, raw, stage * ROWS + task // _pieces(s.window_bytes), R, T.int64(-1) - at, s.window_bytes,
                    task % _pieces(s.window_bytes),
                )  # fmt: skip


@T.macro
def start_latents(s, raw, place, tile, stage, L, vx):
    """Start to copy the packed rows of a tile of latents into the rows of a stage of `raw`."""
    for i in range(-(-ROWS * _pieces(s.latent_bytes) // THREADS)):
        task: T.let = i * THREADS + vx
        if task < ROWS * _pieces(s.latent_bytes):
            at: T.let = T.Cast("int64", place[s.window_slots + tile * ROWS + task // _pieces(s.latent_bytes)])
            if at >= T.int64(0):
                _copy_row(
                    s,
                    raw,
                    stage * ROWS + task // _pieces(s.latent_bytes),
                    L,
                    at,
                    s.latent_bytes,
                    task % _pieces(s.latent_bytes),
                )


def _byte(raw: Any, at: Any, index: Any) -> Any:
    """Byte `index` from word `at` on."""
    return T.bitwise_and(T.shift_right(raw[at + index // 4], T.Cast("uint32", index % 4 * 8)), T.uint32(0xFF))


def _or_zero(place: Any, value: Any) -> Any:
    """Zero in slots without a row: whatever lies there must not meet a weight of zero as NaN."""
    return T.Select(place > T.int32(INVALID), value, T.uint32(0))


@T.macro
def decode_window(s, raw, place, tile, stage, words, factors, values, part, vx):
    """values = channels of slice `part` of a tile's rows, which lie in a stage of `raw`, as bf16 pairs; a lane takes
    eight channels at a time.
    """
    for i in range(-(-ROWS * s.channels // 8 // THREADS)):
        task: T.let = i * THREADS + vx
        if task < ROWS * s.channels // 8:
            row: T.let = task // (s.channels // 8)
            piece: T.let = part * (s.channels // 8) + task % (s.channels // 8)
            at: T.let = (stage * ROWS + row) * s.raw_words
            factors[0] = memory.e8m0_factors(_byte(raw, at, s.dim + piece // 4))[0]
            factors[1] = memory.e8m0_factors(_byte(raw, at, s.dim + piece // 4))[1]
            for v in s.each(4):
                words[v] = _or_zero(
                    place[tile * ROWS + row],
                    memory.scale_pair(
                        s.mma, memory.e4m3_pair(s.mma, raw[at + piece * 2 + v // 2], v % 2), factors[0], factors[1]
                    ),
                )
            memory.store_words(s.mma, words, 0, 4, values, (), s.piece(row, task % (s.channels // 8)))


@T.macro
def decode_latents(s, raw, place, tile, stage, words, factors, values, part, vx):
    """As `decode_window`; eight bytes hold eight channels and those 16 further on."""
    for i in range(-(-ROWS * s.channels // 16 // THREADS)):
        task: T.let = i * THREADS + vx
        if task < ROWS * s.channels // 16:
            row: T.let = task // (s.channels // 16)
            own: T.let = task % (s.channels // 16)
            eight: T.let = part * (s.channels // 16) + own
            at: T.let = (stage * ROWS + row) * s.raw_words
            for h in s.each(2):
                factors[0] = memory.e4m3_scale_pair(_byte(raw, at, s.dim // 2 + eight // 2 * 2 + h))
                for v in s.each(4):
                    words[v] = _or_zero(
                        place[s.window_slots + tile * ROWS + row],
                        memory.scale_pair(
                            s.mma,
                            memory.e2m1_pair(
                                s.mma, T.shift_right(raw[at + eight * 2 + v // 2], T.Cast("uint32", h) * T.uint32(4)),
                                v % 2,
                            ),
                            T.uint32(memory.E2M1_FACTOR), factors[0],
                        ),
                    )  # fmt: skip
                memory.store_words(s.mma, words, 0, 4, values, (), s.piece(row, own // 2 * 4 + own % 2 + h * 2))


# ---- a tile of either kind: `window` is the number of tiles of the window, which come first


@T.macro
def start(s, raw, place, tile, window, F, R, L, vx):
    """Start to copy the packed rows of a tile into its stage."""
    if s.k == 0:
        start_window(s, raw, place, tile, tile % s.stages, F, R, vx)
    else:
        if tile < window:
            start_window(s, raw, place, tile, tile % s.stages, F, R, vx)
        else:
            start_latents(s, raw, place, tile - window, tile % s.stages, L, vx)


@T.macro
def start_first(s, raw, place, count, F, R, L, vx):
    """Start to copy as many tiles as there are stages, each a group of copies; a missing one is an empty group."""
    for p in s.each(s.stages):
        if p < count[1]:
            start(s, raw, place, p, count[0], F, R, L, vx)
        memory.commit(s.mma)


@T.macro
def start_next(s, raw, place, tile, count, F, R, L, vx):
    """Start to copy the tile that takes the stage of `tile`, which has been decoded."""
    if tile + s.stages < count[1]:
        start(s, raw, place, tile + s.stages, count[0], F, R, L, vx)
    memory.commit(s.mma)


@T.macro
def decode(s, raw, place, tile, window, words, factors, values, part, vx):
    """values = channels of slice `part` of the tile's rows."""
    if s.k == 0:
        decode_window(s, raw, place, tile, tile % s.stages, words, factors, values, part, vx)
    else:
        if tile < window:
            decode_window(s, raw, place, tile, tile % s.stages, words, factors, values, part, vx)
        else:
            decode_latents(s, raw, place, tile - window, tile % s.stages, words, factors, values, part, vx)


@T.macro
def place_all(s, place, tiles, count, P, N, first, base, slots, B, C, vt, vx):
    """Places of all rows; count = tiles of the window, tiles."""
    place_window(s, place, tiles, P, N, first, base, slots, vt, vx)
    T.tvm_storage_sync("shared")
    if s.k > 0:
        place_latents(s, place, tiles, N, B, C, vt, vx)
        T.tvm_storage_sync("shared")
    count[0] = tiles[0]
    count[1] = tiles[0] + tiles[1]


def first_slot(s: Any, tile: Any, window: Any) -> Any:
    """Where the places of a tile begin."""
    return T.Select(tile < window, tile * ROWS, s.window_slots + (tile - window) * ROWS)
