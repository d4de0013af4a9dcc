"""Move whole rows of bytes: how the last rows of a step get into the rings of its sequences."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc


def copy_rows(size: int) -> PrimFunc:
    """out[place[i]] = x[take[i]], rows of `size` bytes.

    Shapes: x uint8 ``[n, size]``; take, place int64 ``[m]``, the places distinct; out uint8 ``[p, size]``. Rows of
    `out` that `place` does not name keep what they hold.
    """

    @T.prim_func(s_tir=True)
    def main(x: T.handle, take: T.handle, place: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, m, p = T.int64(), T.int64(), T.int64()
        X = T.match_buffer(x, (n, size), "uint8")
        From = T.match_buffer(take, (m,), "int64")
        To = T.match_buffer(place, (m,), "int64")
        Out = T.match_buffer(out, (p, size), "uint8")
        for i, b in T.grid(m, size):
            with T.sblock("copy"):
                vi, vb = T.axis.remap("SS", [i, b])
                Out[To[vi], vb] = X[From[vi], vb]

    return main
