"""Quantisers on a GPU: a thread for each run of 32 elements, which it keeps in registers; loads and stores of up to 16
bytes.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.quantize import FORMATS
from ds41_tvm.numerics import tir
from ds41_tvm.schedule.cuda.common import vector

RUN = 32
THREADS = 128


@T.macro
def _load(X, index, first, value):
    """The run's bf16 bits."""
    for c in T.unroll(RUN // 8):
        for i in T.vectorized(8):
            value[c * 8 + i] = X[(*index, first + (c * 8 + i))]


@T.macro
def _scales(value, amax, scale, block, make):
    """The scale code of each block of the run."""
    for s in T.unroll(RUN // block):
        amax[0] = T.uint16(0)
        for i in T.unroll(block):
            amax[0] = T.max(amax[0], tir.bf16_abs_bits(value[s * block + i]))
        scale[s] = make(amax[0])


@T.macro
def _bytes(value, scale, out, code):
    for i in T.unroll(RUN):
        out[i] = code(value[i], scale[0])


@T.macro
def _nibbles(value, scale, out, code, block):
    for i in T.unroll(RUN // 2):
        out[i] = tir.join_nibbles(code(value[i], scale[0]), code(value[i + 16], scale[16 // block]))


def pack_rows(kind: str, heads: int, dim: int) -> PrimFunc:
    """As `kernels.quantize.pack_rows`."""
    form = FORMATS[kind]
    block, per_run = form.block, RUN // form.block
    scales, runs = dim // form.block, dim // RUN
    codes = dim if kind == "window" else dim // 2
    size = codes // runs  # bytes of a run
    row_bytes = codes + scales
    wide = vector(row_bytes, min(16, size))
    encode: Any = (
        (lambda v, s, o: _bytes(v, s, o, form.code))
        if kind == "window"
        else (lambda v, s, o: _nibbles(v, s, o, form.code, block))
    )

    @T.prim_func(s_tir=True)
    def main(x: T.handle, row: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, p = T.int64(), T.int64()
        X = T.match_buffer(x, (n, heads, dim), "uint16")
        R = T.match_buffer(row, (n,), "int64")
        Out = T.match_buffer(out, (p, heads, row_bytes), "uint8")
        for b in T.thread_binding((n * T.int64(heads * runs) + T.int64(THREADS - 1)) // T.int64(THREADS), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("pack"):
                    vb = T.axis.spatial((n * T.int64(heads * runs) + T.int64(THREADS - 1)) // T.int64(THREADS), b)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(X[0:n, 0:heads, 0:dim], R[0:n])
                    T.writes(Out[0:p, 0:heads, 0:row_bytes])
                    value = T.sblock_alloc_buffer((RUN,), "uint16", scope="local")
                    amax = T.sblock_alloc_buffer((1,), "uint16", scope="local")
                    scale = T.sblock_alloc_buffer((per_run,), "uint8", scope="local")
                    packed = T.sblock_alloc_buffer((size,), "uint8", scope="local")
                    item: T.let = vb * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < n * T.int64(heads * runs):
                        vt: T.let = item // T.int64(heads * runs)
                        vh: T.let = item // T.int64(runs) % T.int64(heads)
                        run: T.let = item % T.int64(runs)
                        _load(X, (vt, vh), run * T.int64(RUN), value)
                        _scales(value, amax, scale, block, form.scale)
                        encode(value, scale, packed)
                        for c in T.unroll(size // wide):
                            for i in T.vectorized(wide):
                                Out[R[vt], vh, run * T.int64(size) + (c * wide + i)] = packed[c * wide + i]
                        for s in T.unroll(per_run):
                            Out[R[vt], vh, T.int64(codes) + run * T.int64(per_run) + s] = scale[s]

    return main


def quantize_activation(dim: int) -> PrimFunc:
    """As `kernels.quantize.quantize_activation`."""
    runs = dim // RUN

    @T.prim_func(s_tir=True)
    def main(x: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        X = T.match_buffer(x, (n, dim), "uint16")
        Y = T.match_buffer(y, (n, dim), "uint16")
        for b in T.thread_binding((n * T.int64(runs) + T.int64(THREADS - 1)) // T.int64(THREADS), "blockIdx.x"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("quantize"):
                    vb = T.axis.spatial((n * T.int64(runs) + T.int64(THREADS - 1)) // T.int64(THREADS), b)
                    vx = T.axis.spatial(THREADS, tx)
                    T.reads(X[0:n, 0:dim])
                    T.writes(Y[0:n, 0:dim])
                    value = T.sblock_alloc_buffer((RUN,), "uint16", scope="local")
                    amax = T.sblock_alloc_buffer((1,), "uint16", scope="local")
                    scale = T.sblock_alloc_buffer((1,), "uint8", scope="local")
                    code = T.sblock_alloc_buffer((1,), "uint8", scope="local")
                    item: T.let = vb * T.int64(THREADS) + T.Cast("int64", vx)
                    if item < n * T.int64(runs):
                        vt: T.let = item // T.int64(runs)
                        first: T.let = item % T.int64(runs) * T.int64(RUN)
                        _load(X, (vt,), first, value)
                        _scales(value, amax, scale, RUN, tir.e8m0_scale_window)
                        for i in T.unroll(RUN):
                            code[0] = tir.window_code(value[i], scale[0])
                            value[i] = tir.f32_to_bf16(tir.window_value(code[0], scale[0]))
                        for c in T.unroll(RUN // 8):
                            for i in T.vectorized(8):
                                Y[vt, first + (c * 8 + i)] = value[c * 8 + i]

    return main
