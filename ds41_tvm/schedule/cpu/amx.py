"""AMX tile instructions as TensorIR statements: eight registers of 16 rows x 64 bytes.

``C[16 x 16] f32 += A[16 x 32] bf16 * B[32 x 16] bf16``: A by rows, B as pairs of inner indices, ``[16 pairs, 16
columns]`` of uint32. Products are exact, sums f32; subnormal values count as zero.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

STEP = 32  # inner indices per product
PAIRS = STEP // 2
SIDE = 16  # rows and columns of an f32 tile


def op(name: str, *args: Any) -> Any:
    """Call of the x86 intrinsic `name`."""
    return T.call_llvm_intrin("void", "llvm.x86." + name, *args)


def _configuration(index: Any, rows: int, full_from: int) -> Any:
    """Byte `index` of a configuration: palette 1, eight tiles 64 bytes wide; from tile `full_from` on 16 rows, else
    `rows`.
    """
    is_width = (index >= 16) & (index < 32) & (index % 2 == 0)
    is_rows = (index >= 48) & (index < 56)
    count = T.Select(index - 48 >= full_from, T.uint8(SIDE), T.uint8(rows))
    return T.Select(index == 0, T.uint8(1), T.Select(is_width, T.uint8(64), T.Select(is_rows, count, T.uint8(0))))


@T.macro
def configure(setup, rows, full_from):
    """Switch the tiles on: those below `full_from` have `rows` rows, the others 16. `setup`: 64 bytes of scratch."""
    for i in range(64):
        setup[i] = _configuration(i, rows, full_from)
    T.evaluate(op("ldtilecfg", setup.access_ptr("r")))


@T.macro
def clear(count):
    """Zero the tiles 0..count - 1."""
    for c in T.unroll(count):
        T.evaluate(op("tilezero", T.uint8(c)))


def load(tile: int | Any, buffer: Any, offset: Any, stride_bytes: int) -> Any:
    """Tile `tile` = rows from element `offset` of `buffer`, `stride_bytes` apart."""
    return op("tileloadd64", T.uint8(tile), buffer.access_ptr("r", offset=offset), T.int64(stride_bytes))


def store(tile: int | Any, buffer: Any, offset: Any, stride_bytes: int) -> Any:
    """Rows from element `offset` of `buffer` = tile `tile`."""
    return op("tilestored64", T.uint8(tile), buffer.access_ptr("w", offset=offset), T.int64(stride_bytes))


def multiply(c: int | Any, a: int | Any, b: int | Any) -> Any:
    """Tile c += tile a * tile b."""
    return op("tdpbf16ps", T.uint8(c), T.uint8(a), T.uint8(b))
