"""Linear layers on AMX tiles (x86 ``amx-bf16``): 16 rows x 16 columns x 32 inner indices per instruction.

Its own program, because a tile register cannot be reached by scheduling the plain kernel. Same signature and packed
layout as `kernels.linear`: a uint32 pair of bf16 weights is what the tile instruction wants. Sums are f32, taken over
32 inner indices at a time; one row and many rows run the same instructions, so a token's bits do not depend on `rows`.
Subnormal products count as zero, as the hardware defines.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import e4m3_code_to_f32
from ds41_tvm.numerics.tir import e8m0_to_f32, f32_to_bf16
from ds41_tvm.schedule.cpu import amx

STEP, PAIRS, COLUMNS = amx.STEP, amx.PAIRS, amx.SIDE
# Inner indices summed in a tile before they join the total, by type of the total: see `kernels.linear` for why.
CHUNK = {"f32": 512, "f64": 128}
# One row reads every weight once, at the speed of memory: 1 KiB of lead keeps its reads in flight (measured: 512 bytes
# to 4 KiB are within 5 %, none is a quarter slower).
LEAD_BYTES = 1024

# Tile registers: accumulators 0..1 (one per 16 columns), activations 4, weights 6..7.
_ACTIVATION, _WEIGHT = 4, 6


def linear_amx(n: int, k: int, groups: int, weight: str, out: str, total: str, tile: int, rows: int) -> PrimFunc:
    """As `kernels.linear.linear`, for rows <= 16, k a multiple of 32, one or two whole tiles of columns."""
    if weight == "fp8":
        return _fp8(n, k, groups, out, total, tile, rows)
    return _bf16(n, k, groups, out, total, tile, rows)


def _prefetch(pointer: Any) -> Any:
    read, keep, data = 0, 3, 1
    return T.call_llvm_intrin("void", "llvm.prefetch", pointer, T.int32(read), T.int32(keep), T.int32(data))


@T.macro
def _multiply(X, x_offset, x_stride, W, w_offset, tile, halves):
    """Accumulators += 32 inner indices of X (from element x_offset) times the same of W (from word w_offset)."""
    T.evaluate(amx.load(_ACTIVATION, X, x_offset, x_stride * 2))
    for c in T.unroll(halves):
        T.evaluate(amx.load(_WEIGHT + c, W, w_offset + c * COLUMNS, tile * 4))
    for c in T.unroll(halves):
        T.evaluate(amx.multiply(c, _ACTIVATION, _WEIGHT + c))


@T.macro
def _add(part, sums, tile, halves, rows, first, total):
    """sums (+)= accumulators."""
    for c in T.unroll(halves):
        T.evaluate(amx.store(c, part, c * COLUMNS, tile * 4))
    for i in range(rows):
        for j in T.vectorized(tile):
            sums[i, j] = T.if_then_else(first, T.Cast(total, T.float32(0)), sums[i, j]) + T.Cast(total, part[i, j])


@T.macro
def _write(sums, Y, b, column, tile, rows, store):
    """Y[b, i, column + j] = store(sums)."""
    for i in range(rows):
        for j in T.vectorized(tile):
            Y[b, i, column + j] = store(T.Cast("float32", sums[i, j]))


def _chunks(k: int, longest: int) -> tuple[int, int]:
    """(chunks, steps of each): as few as keep a chunk within `longest` inner indices and divide k."""
    steps = next(s for s in range(longest // STEP, 0, -1) if (k // STEP) % s == 0)
    return k // STEP // steps, steps


def _bf16(n: int, k: int, groups: int, out: str, total: str, tile: int, rows: int) -> PrimFunc:
    per_group, halves = n // groups, tile // COLUMNS
    out_type = "float32" if out == "f32" else "uint16"
    total_type = {"f32": "float32", "f64": "float64"}[total]
    chunks, steps = _chunks(k, CHUNK[total])
    store = (lambda v: v) if out == "f32" else f32_to_bf16
    lines = PAIRS * tile * 4 // 64 if rows == 1 else 0

    @T.prim_func(s_tir=True)
    def main(x: T.handle, w: T.Buffer((n // tile, k // 2, tile), "uint32"), y: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        X = T.match_buffer(x, (m, rows, groups * k), "uint16")
        Y = T.match_buffer(y, (m, rows, n), out_type)
        for jo in T.parallel(n // tile):
            with T.sblock("column_tile"):
                vj = T.axis.spatial(n // tile, jo)
                T.reads(X[0:m, 0:rows, 0 : groups * k], w[vj, 0 : k // 2, 0:tile])
                T.writes(Y[0:m, 0:rows, vj * tile : vj * tile + tile])
                setup = T.sblock_alloc_buffer((64,), "uint8", scope="local")
                part = T.sblock_alloc_buffer((rows, tile), "float32", scope="local")
                sums = T.sblock_alloc_buffer((rows, tile), total_type, scope="local")
                amx.configure(setup, rows, _WEIGHT)
                for b in range(m):
                    for chunk in range(chunks):
                        amx.clear(halves)
                        for step in range(steps):
                            ko: T.let = chunk * steps + step
                            for line in T.unroll(lines):
                                T.evaluate(
                                    _prefetch(
                                        w.access_ptr(
                                            "r",
                                            offset=(vj * (k // 2) + ko * PAIRS) * tile + line * 16 + LEAD_BYTES // 4,
                                        )
                                    )
                                )
                            _multiply(
                                X, b * (rows * groups * k) + (vj * tile // per_group) * k + ko * STEP, groups * k,
                                w, (vj * (k // 2) + ko * PAIRS) * tile, tile, halves,
                            )  # fmt: skip
                        _add(part, sums, tile, halves, rows, chunk == 0, total_type)
                    _write(sums, Y, b, vj * tile, tile, rows, store)
                T.evaluate(amx.op("tilerelease"))

    return main


def _fp8(n: int, k: int, groups: int, out: str, total: str, tile: int, rows: int) -> PrimFunc:
    """Weights become bf16 pairs first: one step at a time for one row, the whole column tile once for many rows."""
    per_group, halves = n // groups, tile // COLUMNS
    out_type = "float32" if out == "f32" else "uint16"
    total_type = {"f32": "float32", "f64": "float64"}[total]
    chunks, steps = _chunks(k, CHUNK[total])
    store = (lambda v: v) if out == "f32" else f32_to_bf16
    lines = PAIRS * tile * 2 // 64 if rows == 1 else 0
    ahead = 1 if rows == 1 else k // STEP  # steps decoded at a time

    @T.prim_func(s_tir=True)
    def main(
        x: T.handle,
        w: T.Buffer((n // tile, k // 2, tile), "uint16"),
        scale: T.Buffer(((n + 31) // 32, k // 32), "uint8"),
        y: T.handle,
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        X = T.match_buffer(x, (m, rows, groups * k), "uint16")
        Y = T.match_buffer(y, (m, rows, n), out_type)
        for jo in T.parallel(n // tile):
            with T.sblock("column_tile"):
                vj = T.axis.spatial(n // tile, jo)
                T.reads(
                    X[0:m, 0:rows, 0 : groups * k], w[vj, 0 : k // 2, 0:tile], scale[0 : (n + 31) // 32, 0 : k // 32]
                )
                T.writes(Y[0:m, 0:rows, vj * tile : vj * tile + tile])
                setup = T.sblock_alloc_buffer((64,), "uint8", scope="local")
                part = T.sblock_alloc_buffer((rows, tile), "float32", scope="local")
                sums = T.sblock_alloc_buffer((rows, tile), total_type, scope="local")
                pairs = T.sblock_alloc_buffer((ahead * PAIRS, tile), "uint32")
                amx.configure(setup, rows, _WEIGHT)
                if ahead > 1:
                    for kk in range(k // 2):
                        for j in T.vectorized(tile):
                            pairs[kk, j] = _pair(w[vj, kk, j], scale[vj * tile // 32, kk // PAIRS])
                for b in range(m):
                    for chunk in range(chunks):
                        amx.clear(halves)
                        for step in range(steps):
                            ko: T.let = chunk * steps + step
                            for line in T.unroll(lines):
                                T.evaluate(
                                    _prefetch(
                                        w.access_ptr(
                                            "r",
                                            offset=(vj * (k // 2) + ko * PAIRS) * tile + line * 32 + LEAD_BYTES // 2,
                                        )
                                    )
                                )
                            if ahead == 1:
                                for kk in range(PAIRS):
                                    for j in T.vectorized(tile):
                                        pairs[kk, j] = _pair(w[vj, ko * PAIRS + kk, j], scale[vj * tile // 32, ko])
                            _multiply(
                                X, b * (rows * groups * k) + (vj * tile // per_group) * k + ko * STEP, groups * k,
                                pairs, (ko if ahead > 1 else 0) * PAIRS * tile, tile, halves,
                            )  # fmt: skip
                        _add(part, sums, tile, halves, rows, chunk == 0, total_type)
                    _write(sums, Y, b, vj * tile, tile, rows, store)
                T.evaluate(amx.op("tilerelease"))

    return main


def _pair(codes: Any, scale: Any) -> Any:
    """Two e4m3 codes in a uint16 and their e8m0 scale -> two bf16 values in a uint32; exact, four significant bits."""
    s = e8m0_to_f32(scale)
    low = T.reinterpret("uint32", e4m3_code_to_f32(codes & T.uint16(0xFF)) * s)
    high = T.reinterpret("uint32", e4m3_code_to_f32(T.shift_right(codes, T.uint16(8))) * s)
    return T.bitwise_or(T.shift_right(low, T.uint32(16)), T.bitwise_and(high, T.uint32(0xFFFF0000)))
