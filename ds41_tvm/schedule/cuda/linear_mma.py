"""Linear layers on tensor cores, as `kernels.linear.linear`: bf16 or fp8 weights, packed tiles of 16 or 32 columns.

The packed word of two inner indices is a register of the product's second operand, as it is (bf16) or decoded (fp8). A
chunk of inner indices is summed in f32 in the accumulators, in steps of 32 and within one in two products of 16; then
the chunks' sums are added in ascending order in f32 or f64. One row and many rows take the same
products in the same order, and a row of a product does not depend on the others: a token's bits do not depend on its
batch.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cuda.linear_many import many_rows
from ds41_tvm.schedule.cuda.linear_one import one_row
from ds41_tvm.schedule.cuda.linear_sizes import STEP, THREADS, Sizes
from ds41_tvm.schedule.cuda.mma import form_of


def takes(k: int, weight: str, tile: int, rows: int) -> bool:
    """Whether the programs here can make a layer of these sizes."""
    return weight in ("bf16", "fp8") and k % STEP == 0 and tile in (16, 32) and rows in (1, 16)


def linear_mma(s: Sizes) -> PrimFunc:
    """The program for `s`, sizes that `takes` takes, and 1 or 16 rows."""
    return _scaled(s) if s.weight == "fp8" else _plain(s)


@T.macro
def _launch(s, X, W, scale, Y, m, body, columns, block_rows, threads):
    for bx in T.thread_binding(s.n // columns, "blockIdx.x"):
        for by in T.thread_binding((m * s.rows + (block_rows - 1)) // block_rows, "blockIdx.y"):
            for tx in T.thread_binding(threads, "threadIdx.x"):
                with T.sblock("linear"):
                    vj, vb, vx = T.axis.remap("SSS", [bx, by, tx])
                    T.reads(X[0:m, 0 : s.rows, 0 : s.groups * s.k])
                    T.writes(Y[0:m, 0 : s.rows, 0 : s.n])
                    body(s, X, W, scale, Y, vj, vb, vx, m)


@T.macro
def _choose(s, X, W, scale, Y, m):
    if s.rows == 1:
        _launch(s, X, W, scale, Y, m, one_row, s.columns, 1, s.threads)
    else:
        _launch(s, X, W, scale, Y, m, many_rows, s.warp_columns * s.tile, s.block_rows, THREADS)


def _plain(s: Sizes) -> PrimFunc:
    n, k, rows, groups, tile = s.n, s.k, s.rows, s.groups, s.tile

    @T.prim_func(s_tir=True)
    def main(x: T.handle, w: T.Buffer((n // tile, k // 2, tile), "uint32"), y: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        X = T.match_buffer(x, (m, rows, groups * k), "uint16")
        Y = T.match_buffer(y, (m, rows, n), s.out_type)
        _choose(s, X, w, None, Y, m)

    return main


def _scaled(s: Sizes) -> PrimFunc:
    n, k, rows, groups, tile = s.n, s.k, s.rows, s.groups, s.tile

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
        Y = T.match_buffer(y, (m, rows, n), s.out_type)
        _choose(s, X, w, scale, Y, m)

    return main


def _rule(op: str, p: dict[str, Any], kind: str, knobs: dict[str, int]) -> PrimFunc | None:
    if op != "linear" or not takes(p["k"], p["weight"], p["tile"], p["rows"]):
        return None
    names = ("n", "k", "groups", "weight", "out", "total", "tile", "rows")
    return linear_mma(Sizes(**{name: p[name] for name in names}, mma=form_of(kind), knobs=tuple(knobs.items())))


RULES = (("linear-mma", _rule),)
