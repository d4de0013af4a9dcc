"""Linear layers on tensor cores, as `kernels.linear.linear`: bf16 or fp8 weights, packed tiles of 16 or 32 columns.

The packed word of two inner indices is a register of the product's second operand, as it is (bf16) or decoded (fp8). A
chunk of inner indices is summed in f32 in the accumulators, in steps of 32 and within one in two products of 16; then
the chunks' sums are added in ascending order in f32 or f64. One row, a tile of rows and many rows take the same products
in the same order, and a row of a product does not depend on the others: a token's bits do not depend on its batch.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cuda.linear_few import one_row, row_tile
from ds41_tvm.schedule.cuda.linear_many import many_rows
from ds41_tvm.schedule.cuda.linear_sizes import STEP, THREADS, Sizes
from ds41_tvm.schedule.cuda.mma import form_of


def takes(k: int, weight: str, tile: int) -> bool:
    """Whether the programs here can make a layer of these sizes."""
    return weight in ("bf16", "fp8") and k % STEP == 0 and tile in (16, 32)


def linear_mma(s: Sizes, many: bool | None = None) -> PrimFunc:
    """The program for `s`; `many`: for many rows (the default where a row tile has more than one)."""
    if many is None:
        many = s.rows > 1
    body = many_rows if many else one_row if s.rows == 1 else row_tile
    return _program(s, body, many)


def _program(s: Sizes, body: Any, many: bool) -> PrimFunc:
    n, k, rows, groups, tile = s.n, s.k, s.rows, s.groups, s.tile
    columns = s.warp_columns * tile if many else s.columns
    block_rows, threads = (s.block_rows, THREADS) if many else (rows, s.threads)

    if s.weight == "bf16":

        @T.prim_func(s_tir=True)
        def plain(x: T.handle, w: T.Buffer((n // tile, k // 2, tile), "uint32"), y: T.handle):
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            m = T.int64()
            X = T.match_buffer(x, (m, rows, groups * k), "uint16")
            Y = T.match_buffer(y, (m, rows, n), s.out_type)
            for bx in T.thread_binding(n // columns, "blockIdx.x"):
                for by in T.thread_binding((m * rows + (block_rows - 1)) // block_rows, "blockIdx.y"):
                    for tx in T.thread_binding(threads, "threadIdx.x"):
                        with T.sblock("linear"):
                            vj, vb, vx = T.axis.remap("SSS", [bx, by, tx])
                            T.reads(X[0:m, 0:rows, 0 : groups * k], w[0 : n // tile, 0 : k // 2, 0:tile])
                            T.writes(Y[0:m, 0:rows, 0:n])
                            body(s, X, w, None, Y, vj, vb, vx, m)

        return plain

    @T.prim_func(s_tir=True)
    def scaled(
        x: T.handle,
        w: T.Buffer((n // tile, k // 2, tile), "uint16"),
        scale: T.Buffer(((n + 31) // 32, k // 32), "uint8"),
        y: T.handle,
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        X = T.match_buffer(x, (m, rows, groups * k), "uint16")
        Y = T.match_buffer(y, (m, rows, n), s.out_type)
        for bx in T.thread_binding(n // columns, "blockIdx.x"):
            for by in T.thread_binding((m * rows + (block_rows - 1)) // block_rows, "blockIdx.y"):
                for tx in T.thread_binding(threads, "threadIdx.x"):
                    with T.sblock("linear"):
                        vj, vb, vx = T.axis.remap("SSS", [bx, by, tx])
                        T.reads(X[0:m, 0:rows, 0 : groups * k], w[0 : n // tile, 0 : k // 2, 0:tile],
                                scale[0 : (n + 31) // 32, 0 : k // 32])  # fmt: skip
                        T.writes(Y[0:m, 0:rows, 0:n])
                        body(s, X, w, scale, Y, vj, vb, vx, m)

    return scaled


def _rule(op: str, p: dict[str, Any], kind: str) -> PrimFunc | None:
    if op != "linear" or not takes(p["k"], p["weight"], p["tile"]):
        return None
    names = ("n", "k", "groups", "weight", "out", "total", "tile", "rows")
    return linear_mma(Sizes(**{name: p[name] for name in names}, mma=form_of(kind)))


RULES = (("linear-mma", _rule),)
