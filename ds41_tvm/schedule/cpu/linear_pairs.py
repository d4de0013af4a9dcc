"""What linear layers on pairs of bf16 values share: AMX tiles and dot products take the same packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ds41_tvm.kernels.expr import e4m3_code_to_f32
from ds41_tvm.numerics.tir import e8m0_to_f32
from ds41_tvm.schedule.cpu import e4m3
from ds41_tvm.schedule.linear_sizes import LinearSizes

STEP = 32  # inner indices that share a block scale, and that a tile instruction takes
PAIRS = STEP // 2
# Inner indices summed on their own before they join the total, by its type: see `kernels.linear` for why.
CHUNK = {"f32": 512, "f64": 128}


TASKS = 64  # that a layer is cut into at least, where one row takes several tiles in a task


def together_options(n: int, tile: int, groups: int) -> tuple[int, ...]:
    """How many tiles of columns one row may take in step, the default first: the most that leaves enough tasks."""
    fitting = [t for t in (4, 2, 1) if n // groups // tile % t == 0]
    default = next(t for t in fitting if t == 1 or n // tile // t >= TASKS)
    return (default, *(t for t in fitting if t != default))


@dataclass(frozen=True)
class PairSizes(LinearSizes):
    """Static sizes of `kernels.linear.linear`, and the knobs."""

    rows: int
    # One row reads every weight once: bytes by which prefetches run ahead of it. With tiles 512 to 4096 measured within
    # 5 % of each other and none a quarter slower; with dot products none was the fastest.
    lead: int
    task_kib: int  # bf16 weights of a task of many rows: they are to stay in the second-level cache
    panel: int  # row tiles laid out at a time: bounds the memory of the layout
    together: int = 1  # tiles of columns that one row takes in step; they divide those of a group

    @property
    def lines(self) -> int:
        """Cache lines to prefetch in a step."""
        return PAIRS * self.tile * self.word_bytes // 64 if self.lead else 0

    @property
    def chunks(self) -> tuple[int, int]:
        """(chunks, steps of each): as few as keep a chunk within `CHUNK` inner indices and divide k."""
        steps = next(s for s in range(CHUNK[self.total] // STEP, 0, -1) if (self.k // STEP) % s == 0)
        return self.k // STEP // steps, steps

    def column(self, i: Any) -> Any:
        """Which column of a tile is number i in the order in which they are summed: the cheapest to decode."""
        return e4m3.by_halves(i) if self.weight == "fp8" and self.tile == 32 else i

    @property
    def columns(self) -> int:
        """Column tiles of a task of many rows."""
        tiles = self.n // self.tile
        fits = (c for c in range(tiles, 0, -1) if tiles % c == 0 and c * self.tile * self.k * 2 <= self.task_kib << 10)
        return next(fits, 1)


def scaled_pair(codes: Any, scale: Any) -> Any:
    """Two e4m3 codes in a uint16 and their e8m0 scale -> two bf16 values in a uint32; exact, four significant bits."""
    s = e8m0_to_f32(scale)
    low = T.reinterpret("uint32", e4m3_code_to_f32(codes & T.uint16(0xFF)) * s)
    high = T.reinterpret("uint32", e4m3_code_to_f32(T.shift_right(codes, T.uint16(8))) * s)
    return T.bitwise_or(T.shift_right(low, T.uint32(16)), T.bitwise_and(high, T.uint32(0xFFFF0000)))


@T.macro
def _decode_pairs(pairs, at, row, w, column, ko, tile, low0, low1, high0, high1, halves):
    for i in T.unroll(PAIRS):
        codes: T.let = T.reinterpret("uint8x64", w[column, ko * PAIRS + i, T.ramp(0, 1, tile)])
        if halves:
            pairs[at, row + i, T.ramp(0, 1, 16)] = e4m3.decode_half(0, codes, low0, low1, high0, high1)
            pairs[at, row + i, T.ramp(16, 1, 16)] = e4m3.decode_half(1, codes, low0, low1, high0, high1)
        else:
            pairs[at, row + i, T.ramp(0, 1, tile)] = e4m3.decode(codes, low0, low1, high0, high1)


@T.macro
def decode_step(pairs, at, row, w, scale, column, ko, tile, halves=False):
    """pairs[at, row + i] = the scaled bf16 values of inner indices 32 ko + 2i and + 1 of tile `column`; exact.

    `halves`: the columns of a tile of 32 come in the order of `e4m3.by_halves`, which is cheaper.
    """
    code: T.let = scale[column * tile // 32, ko]
    if tile == 32 and e4m3.in_range(code):
        low0: T.let = e4m3.table(code)[0]
        low1: T.let = e4m3.table(code)[1]
        high0: T.let = e4m3.table(code)[2]
        high1: T.let = e4m3.table(code)[3]
        _decode_pairs(pairs, at, row, w, column, ko, tile, low0, low1, high0, high1, halves)
    else:
        for i in range(PAIRS):
            for j in T.vectorized(tile):
                pairs[at, row + i, j] = scaled_pair(w[column, ko * PAIRS + i, e4m3.by_halves(j) if halves else j], code)
