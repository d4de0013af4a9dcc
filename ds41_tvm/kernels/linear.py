"""Linear layer over packed weights: y[t, j] = sum_k x[t, g(j) * K + k] * w[j, k]."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import e4m3_code_to_f32, half
from ds41_tvm.numerics.tir import bf16_to_f32, e8m0_to_f32, f32_to_bf16

# dtype of one packed word and how many inner indices it holds, by weight format.
WORD = {"bf16": ("uint32", 2), "fp8": ("uint16", 2), "f32": ("float32", 1)}


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


# Inner indices summed on their own before they join the total, by (weight format, type of the total).
CHUNK = {("bf16", "f32"): 128, ("fp8", "f32"): 128, ("bf16", "f64"): 16, ("fp8", "f64"): 16, ("f32", "f64"): 8}


def chunk_of(padded: int, weight: str, total: str) -> int:
    """The largest even divisor of `padded` that is at most `CHUNK`; `padded` itself if it has none."""
    return max((c for c in range(2, CHUNK[weight, total] + 1, 2) if padded % c == 0), default=padded)


@T.macro
def _blocks(X, Y, wide, value, word, partial, acc, store, total, m, rows, n, groups, k, padded, tile, chunk):
    """The four stages; `word(vo, vk, vi)` gives the weight of inner index vk as f32."""
    for b, i, g, kk in T.grid(m, rows, groups, padded):
        with T.sblock("widen"):
            vb, vi, vg, vk = T.axis.remap("SSSS", [b, i, g, kk])
            wide[vb, vi, vg, vk] = _element(X, vb, vi, vg, vk, k, padded)
    for jo, kk, ji in T.grid(n // tile, padded, tile):
        with T.sblock("decode"):
            vo, vk, vi = T.axis.remap("SSS", [jo, kk, ji])
            value[vo, vk, vi] = word(vo, vk, vi)
    for b, i, j, c, kk in T.grid(m, rows, n, padded // chunk, chunk):
        with T.sblock("product"):
            vb, vi, vj, vc, vk = T.axis.remap("SSSSR", [b, i, j, c, kk])
            with T.init():
                partial[vb, vi, vj, vc] = T.float32(0)
            partial[vb, vi, vj, vc] = (
                partial[vb, vi, vj, vc]
                + wide[vb, vi, vj // (n // groups), vc * chunk + vk] * value[vj // tile, vc * chunk + vk, vj % tile]
            )
    for b, i, j, c in T.grid(m, rows, n, padded // chunk):
        with T.sblock("sum"):
            vb, vi, vj, vc = T.axis.remap("SSSR", [b, i, j, c])
            with T.init():
                acc[vb, vi, vj] = T.Cast(total, T.float32(0))
            acc[vb, vi, vj] = acc[vb, vi, vj] + T.Cast(total, partial[vb, vi, vj, vc])
    for b, i, j in T.grid(m, rows, n):
        with T.sblock("store"):
            vb, vi, vj = T.axis.remap("SSS", [b, i, j])
            Y[vb, vi, vj] = store(T.Cast("float32", acc[vb, vi, vj]))


def linear(n: int, k: int, groups: int, weight: str, out: str, total: str, tile: int, rows: int) -> PrimFunc:
    """y[t, j] = round(sum_c (sum_k' x[t, g * k + k'] * w[j, k'])),  g = j // (n / groups), k' over chunk c, ascending.

    Shapes: x bf16 bits ``[m, rows, groups * k]``, y ``[m, rows, n]`` in bf16 bits or f32 (`out`); token t is row
    ``t % rows`` of tile ``t // rows``, and rows past the last token may hold anything. Packed weight, see `packing`:

    * ``bf16``: uint32 ``[n / tile, ceil(k / 2), tile]``, inner indices 2i (low half) and 2i + 1 (high half);
    * ``fp8``: uint16 of two e4m3 codes, same order; then e8m0 scales ``[ceil(n / 32), ceil(k / 32)]``;
    * ``f32``: float32 ``[n / tile, k, tile]``.

    Rounding: products and sums in f32 (fused), one rounding of the sum to bf16 where `out` is ``bf16``. The sum is
    taken in chunks of at most `CHUNK` indices, whose sums are added in f32 or f64 (`total`): a single running sum over
    thousands of products loses two more bits, enough to tip quantisers and selections behind it. An odd k is padded
    with a zero. The order does not depend on `rows`: a token gives the same
    bits alone and among others.
    """
    dtype, per_word = WORD[weight]
    words = -(-k // per_word)
    padded = words * per_word
    chunk = chunk_of(padded, weight, total)
    total_type = {"f32": "float32", "f64": "float64"}[total]
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
            partial = T.sblock_alloc_buffer((m, rows, n, padded // chunk), "float32")
            acc = T.sblock_alloc_buffer((m, rows, n), total_type)
            _blocks(
                X, Y, wide, value, lambda vo, vk, vi: _weight(w[vo, vk // per_word, vi], vk, weight), partial, acc,
                store, total_type, m, rows, n, groups, k, padded, tile, chunk,
            )  # fmt: skip

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
        partial = T.sblock_alloc_buffer((m, rows, n, padded // chunk), "float32")
        acc = T.sblock_alloc_buffer((m, rows, n), total_type)
        _blocks(
            X, Y, wide, value,
            lambda vo, vk, vi: _weight(w[vo, vk // per_word, vi], vk, weight)
            * e8m0_to_f32(scale[(vo * tile + vi) // 32, T.min(vk, k - 1) // 32]),
            partial, acc, store, total_type, m, rows, n, groups, k, padded, tile, chunk,
        )  # fmt: skip

    return scaled
