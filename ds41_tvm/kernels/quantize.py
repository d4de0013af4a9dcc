"""Quantise rows into the packed bytes that the caches hold, and the activation quantiser of fp8 linear layers.

RoPE comes before, see `kernels.rope`; the formats are those of `numerics.formats`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.numerics import tir


class _Format(NamedTuple):
    block: int  # elements per scale
    scale: Any  # bits of the block's largest magnitude -> scale code
    code: Any  # (bf16 bits, scale code) -> element code


FORMATS = {
    "window": _Format(32, tir.e8m0_scale_window, tir.window_code),
    "latent": _Format(16, tir.e4m3_scale_latent, tir.latent_code),
    "index": _Format(32, tir.e8m0_scale_index, tir.index_code),
}


def pack_rows(kind: str, heads: int, dim: int) -> PrimFunc:
    """out[row[t], h] = codes(x[t, h] / scale) then scales, scale from the block's largest magnitude.

    `kind`: ``window`` (e4m3, block 32, e8m0), ``latent`` (e2m1, block 16, e4m3) or ``index`` (e2m1, block 32, e8m0).
    Shapes: x bf16 bits ``[n, heads, dim]``; row int64 ``[n]``, distinct; out uint8 ``[p, heads, bytes of a row]``. Rows
    of `out` that `row` does not name keep what they hold.
    """
    form = FORMATS[kind]
    block, scales = form.block, dim // form.block
    codes = dim if kind == "window" else dim // 2

    if kind == "window":

        @T.prim_func(s_tir=True)
        def bytes_(x: T.handle, row: T.handle, out: T.handle):
            T.func_attr({"tirx.noalias": True})
            n, p = T.int64(), T.int64()
            X = T.match_buffer(x, (n, heads, dim), "uint16")
            R = T.match_buffer(row, (n,), "int64")
            Out = T.match_buffer(out, (p, heads, codes + scales), "uint8")
            amax = T.sblock_alloc_buffer((n, heads, scales), "uint16")
            scale = T.sblock_alloc_buffer((n, heads, scales), "uint8")
            for t, h in T.grid(n, heads):
                for s, i in T.grid(scales, block):
                    with T.sblock("largest"):
                        vt, vh, vs, vi = T.axis.remap("SSSR", [t, h, s, i])
                        with T.init():
                            amax[vt, vh, vs] = T.uint16(0)
                        amax[vt, vh, vs] = T.max(amax[vt, vh, vs], tir.bf16_abs_bits(X[vt, vh, vs * block + vi]))
                for s in range(scales):
                    with T.sblock("scale"):
                        vt, vh, vs = T.axis.remap("SSS", [t, h, s])
                        scale[vt, vh, vs] = form.scale(amax[vt, vh, vs])
                for s, i in T.grid(scales, block):
                    with T.sblock("code"):
                        vt, vh, vs, vi = T.axis.remap("SSSS", [t, h, s, i])
                        Out[R[vt], vh, vs * block + vi] = form.code(X[vt, vh, vs * block + vi], scale[vt, vh, vs])
                for s in range(scales):
                    with T.sblock("scale_bytes"):
                        vt, vh, vs = T.axis.remap("SSS", [t, h, s])
                        Out[R[vt], vh, codes + vs] = scale[vt, vh, vs]

        return bytes_

    @T.prim_func(s_tir=True)
    def nibbles(x: T.handle, row: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, p = T.int64(), T.int64()
        X = T.match_buffer(x, (n, heads, dim), "uint16")
        R = T.match_buffer(row, (n,), "int64")
        Out = T.match_buffer(out, (p, heads, codes + scales), "uint8")
        amax = T.sblock_alloc_buffer((n, heads, scales), "uint16")
        scale = T.sblock_alloc_buffer((n, heads, scales), "uint8")
        for t, h in T.grid(n, heads):
            for s, i in T.grid(scales, block):
                with T.sblock("largest"):
                    vt, vh, vs, vi = T.axis.remap("SSSR", [t, h, s, i])
                    with T.init():
                        amax[vt, vh, vs] = T.uint16(0)
                    amax[vt, vh, vs] = T.max(amax[vt, vh, vs], tir.bf16_abs_bits(X[vt, vh, vs * block + vi]))
            for s in range(scales):
                with T.sblock("scale"):
                    vt, vh, vs = T.axis.remap("SSS", [t, h, s])
                    scale[vt, vh, vs] = form.scale(amax[vt, vh, vs])
            for r, i in T.grid(dim // 32, 16):
                with T.sblock("code"):
                    vt, vh, vr, vi = T.axis.remap("SSSS", [t, h, r, i])
                    Out[R[vt], vh, vr * 16 + vi] = tir.join_nibbles(
                        form.code(X[vt, vh, vr * 32 + vi], scale[vt, vh, vr * 32 // block]),
                        form.code(X[vt, vh, vr * 32 + 16 + vi], scale[vt, vh, (vr * 32 + 16) // block]),
                    )
            for s in range(scales):
                with T.sblock("scale_bytes"):
                    vt, vh, vs = T.axis.remap("SSS", [t, h, s])
                    Out[R[vt], vh, codes + vs] = scale[vt, vh, vs]

    return nibbles


def quantize_activation(dim: int) -> PrimFunc:
    """y = e4m3(x / s) * s per block of 32, s = 2^ceil(log2(max(amax, 1e-4) / 448)): the input of an fp8 linear layer.

    Shapes: x, y bf16 bits ``[n, dim]``. Exact in bf16; a block with a NaN or an infinity becomes NaN.
    """
    blocks = dim // 32

    @T.prim_func(s_tir=True)
    def main(x: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        X = T.match_buffer(x, (n, dim), "uint16")
        Y = T.match_buffer(y, (n, dim), "uint16")
        amax = T.sblock_alloc_buffer((n, blocks), "uint16")
        scale = T.sblock_alloc_buffer((n, blocks), "uint8")
        code = T.sblock_alloc_buffer((n, blocks, 32), "uint8")
        for t in range(n):
            for s, i in T.grid(blocks, 32):
                with T.sblock("largest"):
                    vt, vs, vi = T.axis.remap("SSR", [t, s, i])
                    with T.init():
                        amax[vt, vs] = T.uint16(0)
                    amax[vt, vs] = T.max(amax[vt, vs], tir.bf16_abs_bits(X[vt, vs * 32 + vi]))
            for s in range(blocks):
                with T.sblock("scale"):
                    vt, vs = T.axis.remap("SS", [t, s])
                    scale[vt, vs] = tir.e8m0_scale_window(amax[vt, vs])
            for s, i in T.grid(blocks, 32):
                with T.sblock("code"):
                    vt, vs, vi = T.axis.remap("SSS", [t, s, i])
                    code[vt, vs, vi] = tir.window_code(X[vt, vs * 32 + vi], scale[vt, vs])
            for s, i in T.grid(blocks, 32):
                with T.sblock("value"):
                    vt, vs, vi = T.axis.remap("SSS", [t, s, i])
                    Y[vt, vs * 32 + vi] = tir.f32_to_bf16(tir.window_value(code[vt, vs, vi], scale[vt, vs]))

    return main
