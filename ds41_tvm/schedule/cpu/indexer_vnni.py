"""Index scores with integer dot products (x86 ``avx512vnni``): a vector holds 16 positions.

Twice an e2m1 value is an integer of -12..12, so a block of 32 channels is an exact integer sum: eight instructions for
16 positions. They multiply unsigned by signed bytes: keys have 12 added, and a sum starts at -12 times the sum of the
query's block. Blocks and heads are added in ascending order as in the plain kernel, and the bits are the same.

A task is one query and some columns. Sixteen packed key rows are loaded and transposed in registers, so that a vector
holds the same four bytes of 16 rows, and looked up. A packed row of 128 channels is 16 words; the low nibbles of word
4 b + w are four channels of block b, its high nibbles the four that are 16 channels further.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.expr import bf16_product
from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.numerics.tir import bf16_to_f32, e8m0_to_f32, f32_to_bf16, round_bf16

SIDE = 16  # positions of a vector, and words of a packed row of `CHANNELS`
CHANNELS = 128
BLOCKS = CHANNELS // 32
OFFSET = 12
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each e2m1 code


def _lanes(buffer: Any, *row: Any) -> Any:
    """The 16 words of a row."""
    return buffer[(*row, T.ramp(0, 1, SIDE))]


def _exchange(a: Any, b: Any, distance: int, upper: int) -> Any:
    """Rows r and r + distance of a transpose step: groups of `distance` lanes change places across the diagonal."""
    if upper:
        lanes = [SIDE + i if i // distance % 2 else i + distance for i in range(SIDE)]
    else:
        lanes = [SIDE + i - distance if i // distance % 2 else i for i in range(SIDE)]
    return tirx.Shuffle([a, b], [tirx.IntImm("int32", i) for i in lanes])


def _lookup(words: Any, high: int, offset: int) -> Any:
    """Twice the value, plus `offset`, of the low or high nibble of each byte of 16 words (uint32x16), as bytes."""
    values = [tirx.IntImm("uint8", (value + offset) % 256) for value in TWICE * 4]
    table = tirx.Shuffle(values, [tirx.IntImm("int32", i) for i in range(64)])
    shifted = T.shift_right(words, T.broadcast(T.uint32(4), SIDE)) if high else words
    codes = T.reinterpret("uint8x64", T.bitwise_and(shifted, T.broadcast(T.uint32(0x0F0F0F0F), SIDE)))
    return T.call_llvm_pure_intrin("uint8x64", "llvm.x86.avx512.pshuf.b.512", table, codes)


def _dot4(total: Any, unsigned: Any, signed: Any) -> Any:
    """total (int32x16) + the four products of bytes of each lane (uint8x64, int8x64)."""
    return T.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", total, unsigned, signed)


@T.macro
def _load_query(Q, W, vt, query, start, scale, weight, sums, heads, dim):
    """query[h, part, half, word]: four signed bytes; start, scale [h, block]; weight[h]."""
    for h in range(heads):
        for part in range(dim // CHANNELS):
            query[h, part, 0, T.ramp(0, 1, SIDE)] = T.reinterpret(
                "int32x16", _lookup(T.reinterpret("uint32x16", Q[vt, h, T.ramp(part * 64, 1, 64)]), 0, 0)
            )
            query[h, part, 1, T.ramp(0, 1, SIDE)] = T.reinterpret(
                "int32x16", _lookup(T.reinterpret("uint32x16", Q[vt, h, T.ramp(part * 64, 1, 64)]), 1, 0)
            )
            sums[T.ramp(0, 1, SIDE)] = _dot4(
                _dot4(
                    T.broadcast(T.int32(0), SIDE), T.broadcast(T.uint8(OFFSET), 64),
                    T.reinterpret("int8x64", _lanes(query, h, part, 0)),
                ),
                T.broadcast(T.uint8(OFFSET), 64),
                T.reinterpret("int8x64", _lanes(query, h, part, 1)),
            )  # fmt: skip
            for b in T.unroll(BLOCKS):
                start[h, part * BLOCKS + b] = T.int32(0) - (
                    sums[b * 4] + sums[b * 4 + 1] + sums[b * 4 + 2] + sums[b * 4 + 3]
                )
                # Both operands of a product are twice their values.
                scale[h, part * BLOCKS + b] = e8m0_to_f32(Q[vt, h, dim // 2 + part * BLOCKS + b]) * T.float32(0.25)
        weight[h] = bf16_to_f32(W[vt, h])


@T.macro
def _transpose_step(source, target, distance):
    for outer in T.unroll(SIDE // (2 * distance)):
        for inner in T.unroll(distance):
            row: T.let = outer * (2 * distance) + inner
            target[row, T.ramp(0, 1, SIDE)] = _exchange(
                _lanes(source, row), _lanes(source, row + distance), distance, 0
            )
            target[row + distance, T.ramp(0, 1, SIDE)] = _exchange(
                _lanes(source, row), _lanes(source, row + distance), distance, 1
            )


@T.macro
def _load_keys(K, row, here, there, scales, keys, key_scale, dim):
    """keys[part, half, word, i] = four bytes of key row[i], `OFFSET` added; key_scale[block, i]."""
    for part in range(dim // CHANNELS):
        for i in T.unroll(SIDE):
            here[i, T.ramp(0, 1, SIDE)] = T.reinterpret("uint32x16", K[row[i], T.ramp(part * 64, 1, 64)])
        _transpose_step(here, there, 1)
        _transpose_step(there, here, 2)
        _transpose_step(here, there, 4)
        _transpose_step(there, here, 8)
        for i in T.unroll(SIDE):
            keys[part, 0, i, T.ramp(0, 1, SIDE)] = T.reinterpret("int32x16", _lookup(_lanes(here, i), 0, OFFSET))
            keys[part, 1, i, T.ramp(0, 1, SIDE)] = T.reinterpret("int32x16", _lookup(_lanes(here, i), 1, OFFSET))
        for i in T.unroll(SIDE):
            scales[i] = T.reinterpret("uint32", K[row[i], T.ramp(dim // 2 + part * BLOCKS, 1, BLOCKS)])
        for b in T.unroll(BLOCKS):
            for i in T.vectorized(SIDE):
                key_scale[part * BLOCKS + b, i] = e8m0_to_f32(
                    T.Cast("uint8", T.bitwise_and(T.shift_right(scales[i], T.uint32(8 * b)), T.uint32(0xFF)))
                )


@T.macro
def _score(query, start, scale, weight, keys, key_scale, total, dot, sums, score, heads, dim):
    """score[i] of 16 positions, in bf16 bits."""
    for b in range(dim // 32):
        for h in range(heads):
            total[T.ramp(0, 1, SIDE)] = T.broadcast(start[h, b], SIDE)
            for half in T.unroll(2):
                for w in T.unroll(4):
                    total[T.ramp(0, 1, SIDE)] = _dot4(
                        total[T.ramp(0, 1, SIDE)],
                        T.reinterpret("uint8x64", _lanes(keys, b // BLOCKS, half, b % BLOCKS * 4 + w)),
                        T.reinterpret("int8x64", T.broadcast(query[h, b // BLOCKS, half, b % BLOCKS * 4 + w], SIDE)),
                    )
            for i in T.vectorized(SIDE):
                dot[h, i] = T.if_then_else(b == 0, T.float32(0), dot[h, i]) + T.Cast("float32", total[i]) * (
                    key_scale[b, i] * scale[h, b]
                )
    for i in T.vectorized(SIDE):
        sums[i] = T.float32(0)
    for h in range(heads):
        for i in T.vectorized(SIDE):
            sums[i] = sums[i] + bf16_product(T.max(round_bf16(dot[h, i]), T.float32(0)), weight[h])
    for i in T.vectorized(SIDE):
        score[i] = f32_to_bf16(sums[i])


def index_scores_vnni(
    heads: int, dim: int, block_rows: int, candidate_block: int, spread: int, *, columns: int = 512
) -> PrimFunc:
    """As `kernels.indexer.index_scores`, for `dim` a multiple of 128. `columns`: of a parallel task."""
    factory = _candidates if candidate_block else _dense
    return factory(heads, dim, block_rows, candidate_block, spread, columns)


def _dense(heads: int, dim: int, block_rows: int, _size: int, _spread: int, chunk: int) -> PrimFunc:
    row_bytes, blocks_of_dim = dim // 2 + dim // 32, dim // 32

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle, s: T.handle
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        S = T.match_buffer(s, (n, width), "uint16")
        for task in T.parallel(n * ((width + T.int64(chunk - 1)) // T.int64(chunk))):
            with T.sblock("scores"):
                v = T.axis.spatial(n * ((width + T.int64(chunk - 1)) // T.int64(chunk)), task)
                T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes], B[0:seqs, 0:blocks], N[0:n],
                        V[0:n])  # fmt: skip
                T.writes(S[0:n, 0:width])
                query = T.sblock_alloc_buffer((heads, dim // CHANNELS, 2, SIDE), "int32")
                start = T.sblock_alloc_buffer((heads, blocks_of_dim), "int32")
                scale = T.sblock_alloc_buffer((heads, blocks_of_dim), "float32")
                weight = T.sblock_alloc_buffer((heads,), "float32")
                row = T.sblock_alloc_buffer((SIDE,), "int64", scope="local")
                here = T.sblock_alloc_buffer((SIDE, SIDE), "uint32", scope="local")
                there = T.sblock_alloc_buffer((SIDE, SIDE), "uint32", scope="local")
                scales = T.sblock_alloc_buffer((SIDE,), "uint32", scope="local")
                decoded = T.sblock_alloc_buffer((dim // CHANNELS, 2, SIDE, SIDE), "int32")
                key_scale = T.sblock_alloc_buffer((blocks_of_dim, SIDE), "float32")
                total = T.sblock_alloc_buffer((SIDE,), "int32", scope="local")
                dot = T.sblock_alloc_buffer((heads, SIDE), "float32")
                sums = T.sblock_alloc_buffer((SIDE,), "float32", scope="local")
                score = T.sblock_alloc_buffer((SIDE,), "uint16", scope="local")
                vt: T.let = v // ((width + T.int64(chunk - 1)) // T.int64(chunk))
                first: T.let = v % ((width + T.int64(chunk - 1)) // T.int64(chunk)) * T.int64(chunk)
                last: T.let = T.min(first + T.int64(chunk), width)
                seen: T.let = T.min(last, T.Cast("int64", V[vt]))
                if first < seen:
                    _load_query(Q, W, vt, query, start, scale, weight, total, heads, dim)
                for g in range((seen - first + T.int64(SIDE - 1)) // T.int64(SIDE)):
                    for i in range(SIDE):
                        # Past the last visible position the vector repeats it.
                        at: T.let = T.min(first + g * T.int64(SIDE) + i, seen - T.int64(1))
                        row[i] = T.Cast("int64", B[N[vt], at // T.int64(block_rows)]) * T.int64(
                            block_rows
                        ) + at % T.int64(block_rows)
                    _load_keys(K, row, here, there, scales, decoded, key_scale, dim)
                    _score(query, start, scale, weight, decoded, key_scale, total, dot, sums, score, heads, dim)
                    for i in range(SIDE):
                        if first + g * T.int64(SIDE) + i < seen:
                            S[vt, first + g * T.int64(SIDE) + i] = score[i]
                for c in range(last - T.max(first, seen)):
                    S[vt, T.max(first, seen) + c] = T.uint16(MASKED)

    return main


def _candidates(heads: int, dim: int, block_rows: int, size: int, spread: int, chunk: int) -> PrimFunc:
    row_bytes, blocks_of_dim = dim // 2 + dim // 32, dim // 32

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, w: T.handle, keys: T.handle, table: T.handle, sequence: T.handle, visible: T.handle,
        candidates: T.handle, s: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, width, count = T.int64(), T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, row_bytes), "uint8")
        W = T.match_buffer(w, (n, heads), "uint16")
        K = T.match_buffer(keys, (p, row_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        V = T.match_buffer(visible, (n,), "int32")
        C = T.match_buffer(candidates, (n, count), "int32")
        S = T.match_buffer(s, (n, width), "uint16")
        if spread == 1:
            for t in T.parallel(n):
                with T.sblock("mask"):
                    vm = T.axis.spatial(n, t)
                    T.reads()
                    T.writes(S[vm, 0:width])
                    for c in range(width):
                        S[vm, c] = T.uint16(MASKED)
        for task in T.parallel(n * ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk))):
            with T.sblock("scores"):
                v = T.axis.spatial(n * ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk)), task)
                T.reads(Q[0:n, 0:heads, 0:row_bytes], W[0:n, 0:heads], K[0:p, 0:row_bytes], B[0:seqs, 0:blocks], N[0:n],
                        V[0:n], C[0:n, 0:count])  # fmt: skip
                T.writes(S[0:n, 0:width])
                query = T.sblock_alloc_buffer((heads, dim // CHANNELS, 2, SIDE), "int32")
                start = T.sblock_alloc_buffer((heads, blocks_of_dim), "int32")
                scale = T.sblock_alloc_buffer((heads, blocks_of_dim), "float32")
                weight = T.sblock_alloc_buffer((heads,), "float32")
                position = T.sblock_alloc_buffer((SIDE,), "int64", scope="local")
                row = T.sblock_alloc_buffer((SIDE,), "int64", scope="local")
                here = T.sblock_alloc_buffer((SIDE, SIDE), "uint32", scope="local")
                there = T.sblock_alloc_buffer((SIDE, SIDE), "uint32", scope="local")
                scales = T.sblock_alloc_buffer((SIDE,), "uint32", scope="local")
                decoded = T.sblock_alloc_buffer((dim // CHANNELS, 2, SIDE, SIDE), "int32")
                key_scale = T.sblock_alloc_buffer((blocks_of_dim, SIDE), "float32")
                total = T.sblock_alloc_buffer((SIDE,), "int32", scope="local")
                dot = T.sblock_alloc_buffer((heads, SIDE), "float32")
                sums = T.sblock_alloc_buffer((SIDE,), "float32", scope="local")
                score = T.sblock_alloc_buffer((SIDE,), "uint16", scope="local")
                some = T.sblock_alloc_buffer((1,), "int32", scope="local")  # whether a position of 16 is visible
                vt: T.let = v // ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk))
                first: T.let = v % ((count * T.int64(size) + T.int64(chunk - 1)) // T.int64(chunk)) * T.int64(chunk)
                last: T.let = T.min(first + T.int64(chunk), count * T.int64(size))
                # Candidates are ascending, then -1: a task behind the last one has nothing to score.
                if C[vt, first // T.int64(size)] >= 0:
                    _load_query(Q, W, vt, query, start, scale, weight, total, heads, dim)
                for g in range((last - first + T.int64(SIDE - 1)) // T.int64(SIDE)):
                    some[0] = T.int32(0)
                    for i in range(SIDE):
                        at: T.let = T.min(first + g * T.int64(SIDE) + i, last - T.int64(1))
                        position[i] = T.Cast("int64", C[vt, at // T.int64(size)]) * T.int64(size) + at % T.int64(size)
                        if position[i] < T.int64(0) or position[i] >= T.Cast("int64", V[vt]):
                            position[i] = T.int64(-1)
                        else:
                            some[0] = T.int32(1)
                        here_at: T.let = T.max(position[i], T.int64(0))
                        row[i] = T.Cast("int64", B[N[vt], here_at // T.int64(block_rows)]) * T.int64(
                            block_rows
                        ) + here_at % T.int64(block_rows)
                    if some[0] == 1:
                        _load_keys(K, row, here, there, scales, decoded, key_scale, dim)
                        _score(query, start, scale, weight, decoded, key_scale, total, dot, sums, score, heads, dim)
                    for i in range(SIDE):
                        if first + g * T.int64(SIDE) + i < last:
                            if spread == 1:
                                if position[i] >= T.int64(0):
                                    S[vt, position[i]] = score[i]
                            else:
                                S[vt, first + g * T.int64(SIDE) + i] = T.Select(
                                    position[i] >= T.int64(0), score[i], T.uint16(MASKED)
                                )

    return main
