"""Linear layer over packed weights: y[t, j] = sum_k x[t, g(j) * K + k] * w[j, k]."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import e4m3_code_to_f32, half
from ds41_tvm.numerics.tir import bf16_to_f32, e8m0_to_f32, f32_to_bf16

# dtype of one packed word and how many inner indices it holds, by weight format.
WORD = {"bf16": ("uint32", 2), "fp8": ("uint16", 2), "f32": ("float32", 1)}


def linear(n: int, k: int, groups: int, weight: str, out: str, tile: int, rows: int) -> PrimFunc:
    """y[t, j] = round(sum_k x[t, g * k + k'] * w[j, k']),  g = j // (n / groups), k' ascending, one f32 accumulator.

    Shapes: x bf16 bits ``[m, rows, groups * k]``, y ``[m, rows, n]`` in bf16 bits or f32 (`out`); token t is row
    ``t % rows`` of tile ``t // rows``, and rows past the last token may hold anything. Packed weight, see `packing`:

    * ``bf16``: uint32 ``[n / tile, ceil(k / 2), tile]``, inner indices 2i (low half) and 2i + 1 (high half);
    * ``fp8``: uint16 of two e4m3 codes, same order; then e8m0 scales ``[ceil(n / 32), ceil(k / 32)]``;
    * ``f32``: float32 ``[n / tile, k, tile]``.

    Rounding: products and sums in f32 (fused), one rounding of the sum to bf16 where `out` is ``bf16``. An odd k is
    padded with a zero. The order of accumulation does not depend on `rows`: a token gives the same bits alone and
    among others.
    """
    dtype, per_word = WORD[weight]
    words, per_group = -(-k // per_word), n // groups
    padded = words * per_word
    out_type = "float32" if out == "f32" else "uint16"
    store = _same if out == "f32" else f32_to_bf16

    if weight != "fp8":

        @T.prim_func(s_tir=True)
        def plain(x: T.handle, w: T.Buffer((n // tile, words, tile), dtype), y: T.handle):
            T.func_attr({"tirx.noalias": True})
            m = T.int64()
            X = T.match_buffer(x, (m, rows, groups * k), "uint16")
            Y = T.match_buffer(y, (m, rows, n), out_type)
            wide = T.sblock_alloc_buffer((m, rows, groups, padded), "float32")
            value = T.sblock_alloc_buffer((n // tile, padded, tile), "float32")
            acc = T.sblock_alloc_buffer((m, rows, n), "float32")
            for b, i, g, kk in T.grid(m, rows, groups, padded):
                with T.sblock("widen"):
                    vb, vi, vg, vk = T.axis.remap("SSSS", [b, i, g, kk])
                    wide[vb, vi, vg, vk] = _element(X, vb, vi, vg, vk, k, padded)
            for jo, kk, ji in T.grid(n // tile, padded, tile):
                with T.sblock("decode"):
                    vo, vk, vi = T.axis.remap("SSS", [jo, kk, ji])
                    value[vo, vk, vi] = _weight(w[vo, vk // per_word, vi], vk, weight)
            for b, i, j, kk in T.grid(m, rows, n, padded):
                with T.sblock("product"):
                    vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, kk])
                    with T.init():
                        acc[vb, vi, vj] = T.float32(0)
                    acc[vb, vi, vj] = (
                        acc[vb, vi, vj] + wide[vb, vi, vj // per_group, vk] * value[vj // tile, vk, vj % tile]
                    )
            for b, i, j in T.grid(m, rows, n):
                with T.sblock("store"):
                    vb, vi, vj = T.axis.remap("SSS", [b, i, j])
                    Y[vb, vi, vj] = store(acc[vb, vi, vj])

        return plain

    @T.prim_func(s_tir=True)
    def scaled(
        x: T.handle,
        w: T.Buffer((n // tile, words, tile), dtype),
        scale: T.Buffer(((n + 31) // 32, (k + 31) // 32), "uint8"),
        y: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        m = T.int64()
        X = T.match_buffer(x, (m, rows, groups * k), "uint16")
        Y = T.match_buffer(y, (m, rows, n), out_type)
        wide = T.sblock_alloc_buffer((m, rows, groups, padded), "float32")
        value = T.sblock_alloc_buffer((n // tile, padded, tile), "float32")
        acc = T.sblock_alloc_buffer((m, rows, n), "float32")
        for b, i, g, kk in T.grid(m, rows, groups, padded):
            with T.sblock("widen"):
                vb, vi, vg, vk = T.axis.remap("SSSS", [b, i, g, kk])
                wide[vb, vi, vg, vk] = _element(X, vb, vi, vg, vk, k, padded)
        for jo, kk, ji in T.grid(n // tile, padded, tile):
            with T.sblock("decode"):
                vo, vk, vi = T.axis.remap("SSS", [jo, kk, ji])
                value[vo, vk, vi] = _weight(w[vo, vk // per_word, vi], vk, weight) * e8m0_to_f32(
                    scale[(vo * tile + vi) // 32, T.min(vk, k - 1) // 32]
                )
        for b, i, j, kk in T.grid(m, rows, n, padded):
            with T.sblock("product"):
                vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, kk])
                with T.init():
                    acc[vb, vi, vj] = T.float32(0)
                acc[vb, vi, vj] = acc[vb, vi, vj] + wide[vb, vi, vj // per_group, vk] * value[vj // tile, vk, vj % tile]
        for b, i, j in T.grid(m, rows, n):
            with T.sblock("store"):
                vb, vi, vj = T.axis.remap("SSS", [b, i, j])
                Y[vb, vi, vj] = store(acc[vb, vi, vj])

    return scaled


def _same(value: Any) -> Any:
    return value


def _element(X: Any, vb: Any, vi: Any, vg: Any, vk: Any, k: int, padded: int) -> Any:
    """x as f32; zero at the padding index that an odd k adds."""
    if k == padded:
        return bf16_to_f32(X[vb, vi, vg * k + vk])
    return T.if_then_else(vk < k, bf16_to_f32(X[vb, vi, vg * k + T.min(vk, k - 1)]), T.float32(0))


def _weight(word: Any, vk: Any, weight: str) -> Any:
    """The weight of inner index vk as f32 out of its packed word, without its block scale."""
    if weight == "f32":
        return word
    if weight == "bf16":
        return half(word, vk)
    return e4m3_code_to_f32(T.if_then_else(vk % 2 == 0, word & T.uint16(0xFF), T.shift_right(word, T.uint16(8))))
