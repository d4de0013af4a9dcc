"""Sparse attention of few queries: the rows of a query are shared out, then the channels of its output.

One block for a query would work on its tiles of rows one after the other, with the GPU idle beside it. So a first
launch scores every tile in a block of its own and leaves the scores in device memory; in a second one, blocks that
share out the channels go through the tiles in ascending order: weights, running maximum and sums are those of
`attention`, in the same order. So the bits are the same, however many queries a step has.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.attention_rows import decode, first_slot, place_all, start, start_first, start_next
from ds41_tvm.schedule.cuda.attention_sizes import ROWS, SCORES, THREADS, WARPS
from ds41_tvm.schedule.cuda.attention_tile import add, clear, finish, gather, score, start_queries, weigh
from ds41_tvm.schedule.cuda.mma import exchange_shape


@T.macro
def score_rows(s, Q, F, R, P, N, first, base, slots, L, B, C, scratch, vt, part, vz, vx):
    """scratch[vt, part, vz, h, r] = the scores of tile vz. `s` has one stage."""
    queries = T.sblock_alloc_buffer((s.padded * s.dim // 2,), "uint32", scope=s.shared)
    values = T.sblock_alloc_buffer((ROWS * s.dim // 2,), "uint32", scope=s.shared)
    raw = T.sblock_alloc_buffer((ROWS * s.raw_words,), "uint32", scope=s.shared)
    scores = T.sblock_alloc_buffer((s.halves, s.padded, SCORES), "float32", scope=s.shared)
    place = T.sblock_alloc_buffer((s.slots,), "int32", scope=s.shared)
    tiles = T.sblock_alloc_buffer((2,), "int32", scope=s.shared)
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, WARPS), "uint32", scope="shared")
    count = T.sblock_alloc_buffer((2,), "int32", scope="local")
    low = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    high = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    words = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((2,), "uint32", scope="local")
    chain = T.sblock_alloc_buffer((s.row_tiles * 4,), "float32", scope="local")
    part_of = T.sblock_alloc_buffer((8,), "float32", scope="local")
    place_all(s, place, tiles, count, P, N, first, base, slots, B, C, vt, vx)
    start_queries(s, Q, queries, vt, part, vx)
    if vz < count[1]:
        start(s, raw, place, vz, count[0], F, R, L, vx)
    memory.commit(s.mma)
    for tile in range(vz, T.min(vz + 1, count[1])):  # none if the query has fewer tiles
        memory.wait(s.mma, 0)
        T.tvm_storage_sync("shared")
        decode(s, raw, place, tile, count[0], words, factors, values, 0, vx)
        T.tvm_storage_sync("shared")
        score(s, queries, values, scores, s.steps // s.halves, low, high, words, chain, exchange, vx)
        T.tvm_storage_sync("shared")
        gather(s, scores, part_of, vx)
        if vx < s.padded * 4:
            for c in T.vectorized(8):
                scratch[vt, part, tile, vx // 4, vx % 4 * 8 + c] = part_of[c]


@T.macro
def weigh_rows(s, F, R, sink, P, N, first, base, slots, L, B, C, scratch, Out, vt, part, vz, vx):
    """The channels of slice vz of the output. `s` has as many slices as there are of it."""
    # Both are read and written by address only, which TVM does not see where it lays out dynamic shared memory.
    values = T.sblock_alloc_buffer((ROWS * s.channels // 2,), "uint32", scope="shared")
    raw = T.sblock_alloc_buffer((s.stages * ROWS * s.raw_words,), "uint32", scope=s.shared)
    weights = T.sblock_alloc_buffer((s.weight_parts * s.padded * ROWS // 2,), "uint32", scope="shared")
    place = T.sblock_alloc_buffer((s.slots,), "int32", scope=s.shared)
    factor = T.sblock_alloc_buffer((s.padded,), "float32", scope=s.shared)
    tiles = T.sblock_alloc_buffer((2,), "int32", scope=s.shared)
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, WARPS), "uint32", scope="shared")
    count = T.sblock_alloc_buffer((2,), "int32", scope="local")
    top = T.sblock_alloc_buffer((3,), "float32", scope="local")
    total = T.sblock_alloc_buffer((3,), "float32", scope="local")
    part_of = T.sblock_alloc_buffer((8,), "float32", scope="local")
    words = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((2,), "uint32", scope="local")
    fragment = T.sblock_alloc_buffer((s.weight_parts * s.head_tiles * 4,), "uint32", scope="local")
    acc = T.sblock_alloc_buffer((s.head_tiles * s.channel_tiles * 4,), "float32", scope="local")
    place_all(s, place, tiles, count, P, N, first, base, slots, B, C, vt, vx)
    clear(s, acc, top, total)
    start_first(s, raw, place, count, F, R, L, vx)
    for tile in range(count[1]):
        for c in T.vectorized(8):
            part_of[c] = scratch[vt, part, tile, vx // 4 % s.padded, vx % 4 * 8 + c]
        memory.wait(s.mma, s.stages - 1)
        T.tvm_storage_sync("shared")
        decode(s, raw, place, tile, count[0], words, factors, values, vz, vx)
        weigh(s, place, first_slot(s, tile, count[0]), weights, factor, top, total, part_of, words, exchange, vx)
        T.tvm_storage_sync("shared")
        start_next(s, raw, place, tile, count, F, R, L, vx)
        add(s, values, weights, factor, fragment, words, acc, exchange, vx)
    T.tvm_storage_sync("shared")
    finish(s, Out, sink, factor, top, total, acc, words, vt, part, vz * s.channels, vx)


@T.macro
def launch(s, scores, sums, Q, F, R, sink, P, N, first, base, slots, L, B, C, scratch, Out, n):
    """Both launches. `scores` and `sums`: the sizes of each."""
    for bx in T.thread_binding(n, "blockIdx.x"):
        for by in T.thread_binding(s.parts, "blockIdx.y"):
            for bz in T.thread_binding(s.most_tiles, "blockIdx.z"):
                for tx in T.thread_binding(THREADS, "threadIdx.x"):
                    with T.sblock("score"):
                        vt, vp, vz, vx = T.axis.remap("SSSS", [bx, by, bz, tx])
                        T.reads(Q[vt, 0 : s.heads, 0 : s.dim], P[vt], N[vt])
                        T.writes(scratch[vt, vp, vz, 0 : s.padded, 0:ROWS])
                        score_rows(scores, Q, F, R, P, N, first, base, slots, L, B, C, scratch, vt, vp, vz, vx)
    for bx in T.thread_binding(n, "blockIdx.x"):
        for by in T.thread_binding(s.parts, "blockIdx.y"):
            for bz in T.thread_binding(sums.slices, "blockIdx.z"):
                for tx in T.thread_binding(THREADS, "threadIdx.x"):
                    with T.sblock("weigh"):
                        vt, vp, vz, vx = T.axis.remap("SSSS", [bx, by, bz, tx])
                        T.reads(
                            sink[0 : s.heads], P[vt], N[vt], scratch[vt, vp, 0 : s.most_tiles, 0 : s.padded, 0:ROWS]
                        )
                        T.writes(Out[vt, 0 : s.heads, vz * sums.channels : vz * sums.channels + sums.channels])
                        weigh_rows(sums, F, R, sink, P, N, first, base, slots, L, B, C, scratch, Out, vt, vp, vz, vx)
