"""Index scores: how much each query wants each compressed position (official ``Indexer``)."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import bf16_product
from ds41_tvm.numerics.tir import bf16_to_f32, e2m1_to_twice, e8m0_to_f32, f32_to_bf16, round_bf16

MASKED = 0xFF80  # bf16 bits of -infinity


def scale_weights(heads: int, factor: float) -> PrimFunc:
    """w' = bf16(w * factor), factor = d^-0.5 * H^-0.5 in f32. Shapes: w, w' bf16 bits ``[n, heads]``."""

    @T.prim_func(s_tir=True)
    def main(w: T.handle, y: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        W = T.match_buffer(w, (n, heads), "uint16")
        Y = T.match_buffer(y, (n, heads), "uint16")
        for t, h in T.grid(n, heads):
            with T.sblock("scale"):
                vt, vh = T.axis.remap("SS", [t, h])
                Y[vt, vh] = f32_to_bf16(bf16_to_f32(W[vt, vh]) * T.float32(factor))

    return main


def index_scores(heads: int, dim: int, block_rows: int, candidate_block: int, spread: int) -> PrimFunc:
    """s[t, p] = bf16( sum_h bf16( bf16(relu(q_h . k_p)) * w_h ) ), the sum over heads in f32, ascending.

    q_h . k_p is summed over blocks of 32 channels in ascending order, each block's sum an exact integer times the two
    blocks' power-of-two scales. relu(NaN) is 0 (the official code's is NaN, which its top-k takes first): a bad key,
    stored as NaN, does not put itself into every later selection.

    Shapes: q uint8 ``[n, heads, bytes]`` and keys uint8 ``[p, bytes]``, packed index rows; w bf16 bits ``[n, heads]``;
    table int32 ``[sequences, blocks]`` of key blocks of `block_rows` rows; sequence int32 ``[n]``; visible int32
    ``[n]``, how many positions query t may see; s bf16 bits ``[n, width]``.

    With `candidate_block` = 0 column p is position p, and hidden positions score -infinity. Otherwise candidates int32
    ``[n, c]`` (ascending block numbers, then -1) comes before s: column c * block + i is position
    candidates[t, c] * block + i (`spread` = 0), or columns are positions and all others -infinity (`spread` = 1).
    """
    scales = dim // 32
    row_bytes = dim // 2 + scales
    factory = _dense if candidate_block == 0 else _candidates
    return factory(heads, dim, block_rows, candidate_block, spread, scales, row_bytes)


def _dense(heads: int, dim: int, block_rows: int, _b: int, _s: int, scales: int, row_bytes: int) -> PrimFunc:
    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle, s: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        n, p, seqs, blocks, width = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        S = T.match_buffer(s, (n, width), "uint16")
        for t in range(n):
            for c in range(width):
                with T.sblock("score"):
                    vt, vc = T.axis.remap("SS", [t, c])
                    T.reads(
                        Q[vt, 0:heads, 0:row_bytes],
                        W[vt, 0:heads],
                        K[0:p, 0:row_bytes],
                        B[0:seqs, 0:blocks],
                        N[vt],
                        V[vt],
                    )
                    T.writes(S[vt, vc])
                    row = T.sblock_alloc_buffer((1,), "int64", scope="local")
                    total = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    dot = T.sblock_alloc_buffer((2,), "float32", scope="local")
                    if vc < T.Cast("int64", V[vt]):
                        row[0] = T.Cast("int64", B[N[vt], vc // block_rows]) * T.int64(block_rows) + vc % T.int64(
                            block_rows
                        )
                        total[0] = T.float32(0)
                        for h in range(heads):
                            dot[0] = T.float32(0)
                            for b in range(scales):
                                dot[1] = T.float32(0)
                                for i in range(16):
                                    dot[1] = dot[1] + T.Cast(
                                        "float32", _quad(Q[vt, h, b * 16 + i], K[row[0], b * 16 + i])
                                    )
                                dot[0] = dot[0] + dot[1] * _scales(Q[vt, h, dim // 2 + b], K[row[0], dim // 2 + b])
                            total[0] = total[0] + bf16_product(
                                T.max(round_bf16(dot[0]), T.float32(0)), bf16_to_f32(W[vt, h])
                            )
                        S[vt, vc] = f32_to_bf16(total[0])
                    else:
                        S[vt, vc] = T.uint16(MASKED)

    return main


def _quad(q: Any, k: Any) -> Any:
    """Four times the sum of the two products of a byte of nibbles, int32."""
    low = e2m1_to_twice(q & T.uint8(15)) * e2m1_to_twice(k & T.uint8(15))
    high = e2m1_to_twice(T.shift_right(q, T.uint8(4))) * e2m1_to_twice(T.shift_right(k, T.uint8(4)))
    return low + high


def _scales(q: Any, k: Any) -> Any:
    return e8m0_to_f32(q) * e8m0_to_f32(k) * T.float32(0.25)


def _candidates(heads: int, dim: int, block_rows: int, size: int, spread: int, scales: int, row_bytes: int) -> PrimFunc:
    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle,
        candidates: T.handle, s: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        n, p, seqs, blocks, width, count = T.int64(), T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        C = T.match_buffer(candidates, (n, count), "int32")
        S = T.match_buffer(s, (n, width), "uint16")
        for t in range(n):
            with T.sblock("scores"):
                vt = T.axis.spatial(n, t)
                T.reads(
                    Q[vt, 0:heads, 0:row_bytes], W[vt, 0:heads], K[0:p, 0:row_bytes], B[0:seqs, 0:blocks], N[vt], V[vt],
                    C[vt, 0:count],
                )  # fmt: skip
                T.writes(S[vt, 0:width])
                position = T.sblock_alloc_buffer((1,), "int64", scope="local")
                row = T.sblock_alloc_buffer((1,), "int64", scope="local")
                total = T.sblock_alloc_buffer((1,), "float32", scope="local")
                dot = T.sblock_alloc_buffer((2,), "float32", scope="local")
                for c in range(width):
                    S[vt, c] = T.uint16(MASKED)
                for c in range(count * size):
                    position[0] = T.Cast("int64", C[vt, c // size]) * T.int64(size) + c % T.int64(size)
                    if position[0] >= T.int64(0) and position[0] < T.Cast("int64", V[vt]):
                        row[0] = T.Cast("int64", B[N[vt], position[0] // block_rows]) * T.int64(block_rows) + position[
                            0
                        ] % T.int64(block_rows)
                        total[0] = T.float32(0)
                        for h in range(heads):
                            dot[0] = T.float32(0)
                            for b in range(scales):
                                dot[1] = T.float32(0)
                                for i in range(16):
                                    dot[1] = dot[1] + T.Cast(
                                        "float32", _quad(Q[vt, h, b * 16 + i], K[row[0], b * 16 + i])
                                    )
                                dot[0] = dot[0] + dot[1] * _scales(Q[vt, h, dim // 2 + b], K[row[0], dim // 2 + b])
                            total[0] = total[0] + bf16_product(
                                T.max(round_bf16(dot[0]), T.float32(0)), bf16_to_f32(W[vt, h])
                            )
                        if spread == 1:
                            S[vt, position[0]] = f32_to_bf16(total[0])
                        else:
                            S[vt, c] = f32_to_bf16(total[0])

    return main
