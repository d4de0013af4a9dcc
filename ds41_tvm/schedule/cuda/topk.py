"""Deterministic top-k on a GPU: a block of threads for each row, a radix select in shared memory.

Counting needs no order: sums of integers are the same in any. Where each pick goes follows from prefix sums over
columns in ascending order, never from the order in which threads arrive.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.topk import order_key
from ds41_tvm.schedule.cuda.common import count_one

EACH = 8  # neighbouring columns of a thread in one turn: 16 bytes
LOW_BITS = 5
BINS, LOW_BINS = 1 << (16 - LOW_BITS), 1 << LOW_BITS
SEGMENT = 32  # values whose prefix sums one thread makes
# Scalars that the threads share: the deciding bin and how many of it to take; the threshold key and how many equal to
# it to take.
_BIN, _RANK = range(2)
_KEY, _EQUAL = range(2)


def threads_for(k: int) -> int:
    """More threads hide more latency where rows are long: selections of many out of many."""
    return 512 if k >= 256 else 256


@T.macro
def _load(S, words, vt, limit, width, column, bits, key):
    """key[0..EACH - 1] of the columns from `column` on, -1 past the limit."""
    for i in T.unroll(EACH):
        bits[i] = T.uint16(0)
    if width % T.int64(EACH) == T.int64(0):
        if column < limit:
            for i in T.vectorized(EACH):
                bits[i] = words[vt * (width // T.int64(EACH)) + T.Cast("int64", column // EACH), i]
    else:
        for i in T.unroll(EACH):
            if column + i < limit:
                bits[i] = S[vt, T.Cast("int64", column) + i]
    for i in T.unroll(EACH):
        key[i] = T.if_then_else(column + i < limit, order_key(bits[i]), T.int32(-1))


@T.macro
def _prefix(values, before, sums, offsets, run, vx, threads):
    """before[x]: the sum of the values before x in its segment; offsets[j]: the sum of those before segment j, the last
    one of all. What one thread both reads and writes is never shared: the barriers here are all that is needed."""
    T.tvm_storage_sync("shared")
    if vx < threads // SEGMENT:
        run[0] = T.int32(0)
        for i in range(SEGMENT):
            before[vx * SEGMENT + i] = run[0]
            run[0] = run[0] + values[vx * SEGMENT + i]
        sums[vx] = run[0]
    T.tvm_storage_sync("shared")
    if vx == 0:
        run[0] = T.int32(0)
        for j in range(threads // SEGMENT):
            offsets[j] = run[0]
            run[0] = run[0] + sums[j]
        offsets[threads // SEGMENT] = run[0]
    T.tvm_storage_sync("shared")


@T.macro
def _threshold(
    S, words, vt, limit, width, k, vx, threads, turns, bits, key, bins, low, scan, decided, shared, mine, run
):
    """shared: the key of the k-th best column, and how many of the columns equal to it are among the best."""
    for i in range(BINS // threads):
        bins[i * threads + vx] = T.int32(0)
    if vx < LOW_BINS:
        low[vx] = T.int32(0)
    T.tvm_storage_sync("shared")
    for c in range(turns):
        _load(S, words, vt, limit, width, (c * threads + vx) * EACH, bits, key)
        for i in T.unroll(EACH):
            if key[i] >= T.int32(0):
                count_one(bins, T.shift_right(key[i], T.int32(LOW_BITS)))
    T.tvm_storage_sync("shared")
    # Thread x owns the x-th group of bins from the top: sums before it are of greater keys.
    mine[0] = T.int32(0)
    for i in range(BINS // threads):
        mine[0] = mine[0] + bins[BINS - 1 - (vx * (BINS // threads) + i)]
    scan[0][vx] = mine[0]
    _prefix(scan[0], scan[1], scan[2], scan[3], run, vx, threads)
    mine[0] = scan[1][vx] + scan[3][vx // SEGMENT]
    for i in range(BINS // threads):
        mine[1] = bins[BINS - 1 - (vx * (BINS // threads) + i)]
        if mine[0] < k and mine[0] + mine[1] >= k:
            decided[_BIN] = BINS - 1 - (vx * (BINS // threads) + i)
            decided[_RANK] = k - mine[0]
        mine[0] = mine[0] + mine[1]
    T.tvm_storage_sync("shared")
    mine[0] = decided[_BIN]
    for c in range(turns):
        _load(S, words, vt, limit, width, (c * threads + vx) * EACH, bits, key)
        for i in T.unroll(EACH):
            if T.shift_right(key[i], T.int32(LOW_BITS)) == mine[0]:
                count_one(low, T.bitwise_and(key[i], T.int32(LOW_BINS - 1)))
    T.tvm_storage_sync("shared")
    if vx == 0:
        mine[0] = decided[_RANK]
        mine[1] = T.int32(-1)
        for i in range(LOW_BINS):
            run[0] = low[LOW_BINS - 1 - i]
            if mine[1] < T.int32(0):
                if run[0] >= mine[0]:
                    mine[1] = LOW_BINS - 1 - i
                else:
                    mine[0] = mine[0] - run[0]
        shared[_EQUAL] = mine[0]
        shared[_KEY] = decided[_BIN] * T.int32(LOW_BINS) + mine[1]
    T.tvm_storage_sync("shared")


@T.macro
def _write(S, words, Out, vt, limit, width, vx, threads, turns, bits, key, scan, shared, mine, run, at):
    """The columns above the threshold and the first of those equal to it, ascending; `at(c)`: position of column c.

    mine: the threshold; how many equal to it to take; greater and equal columns of earlier turns; those before one.
    """
    mine[0] = shared[_KEY]
    mine[1] = shared[_EQUAL]
    mine[2] = T.int32(0)
    mine[3] = T.int32(0)
    for c in range(turns):
        _load(S, words, vt, limit, width, (c * threads + vx) * EACH, bits, key)
        # Both counts in one sum: neither exceeds threads * EACH.
        mine[4] = T.int32(0)
        for i in T.unroll(EACH):
            mine[4] = (
                mine[4] + T.Cast("int32", key[i] > mine[0]) * T.int32(1 << 16) + T.Cast("int32", key[i] == mine[0])
            )
        scan[0][vx] = mine[4]
        _prefix(scan[0], scan[1], scan[2], scan[3], run, vx, threads)
        mine[5] = scan[1][vx] + scan[3][vx // SEGMENT]
        mine[4] = mine[2] + T.shift_right(mine[5], T.int32(16))
        mine[5] = mine[3] + T.bitwise_and(mine[5], T.int32(0xFFFF))
        for i in T.unroll(EACH):
            if key[i] > mine[0]:
                Out[vt, mine[4] + T.min(mine[5], mine[1])] = at((c * threads + vx) * EACH + i)
                mine[4] = mine[4] + T.int32(1)
            if key[i] == mine[0]:
                if mine[5] < mine[1]:
                    Out[vt, mine[4] + mine[5]] = at((c * threads + vx) * EACH + i)
                mine[5] = mine[5] + T.int32(1)
        mine[2] = mine[2] + T.shift_right(scan[3][threads // SEGMENT], T.int32(16))
        mine[3] = mine[3] + T.bitwise_and(scan[3][threads // SEGMENT], T.int32(0xFFFF))
        T.tvm_storage_sync("shared")


@T.macro
def _select(S, L, Out, vt, vx, n, width, k, threads, at):
    # Whole loads are aligned where the width is a multiple of them; this form of the index says so to the compiler.
    words = T.decl_buffer((n * (width // T.int64(EACH)), EACH), "uint16", data=S.data)
    bins = T.sblock_alloc_buffer((BINS,), "int32", scope="shared")
    low = T.sblock_alloc_buffer((LOW_BINS,), "int32", scope="shared")
    values = T.sblock_alloc_buffer((threads,), "int32", scope="shared")
    before = T.sblock_alloc_buffer((threads,), "int32", scope="shared")
    sums = T.sblock_alloc_buffer((threads // SEGMENT,), "int32", scope="shared")
    offsets = T.sblock_alloc_buffer((threads // SEGMENT + 1,), "int32", scope="shared")
    decided = T.sblock_alloc_buffer((2,), "int32", scope="shared")
    shared = T.sblock_alloc_buffer((2,), "int32", scope="shared")
    bits = T.sblock_alloc_buffer((EACH,), "uint16", scope="local")
    key = T.sblock_alloc_buffer((EACH,), "int32", scope="local")
    mine = T.sblock_alloc_buffer((6,), "int32", scope="local")
    run = T.sblock_alloc_buffer((1,), "int32", scope="local")
    turns = T.sblock_alloc_buffer((1,), "int32", scope="local")
    for i in range((k + threads - 1) // threads):
        if i * threads + vx < k and L[vt] <= k:
            Out[vt, i * threads + vx] = T.int32(-1)
            if i * threads + vx < L[vt]:
                Out[vt, i * threads + vx] = at(i * threads + vx)
    turns[0] = T.Select(L[vt] > k, (L[vt] + (threads * EACH - 1)) // (threads * EACH), T.int32(0))
    if turns[0] > T.int32(0):
        _threshold(
            S, words, vt, L[vt], width, k, vx, threads, turns[0], bits, key, bins, low, (values, before, sums, offsets),
            decided, shared, mine, run,
        )  # fmt: skip
        _write(
            S, words, Out, vt, L[vt], width, vx, threads, turns[0], bits, key, (values, before, sums, offsets),
            shared, mine, run, at,
        )  # fmt: skip


def topk_lowest_index(k: int, size: int) -> PrimFunc:
    """As `kernels.topk.topk_lowest_index`: three passes over a row's scores. Counts are of the upper 11 bits of a key,
    which spread more evenly than 8, then of the lower 5 within the deciding bin.
    """
    threads = threads_for(k)

    @T.prim_func(s_tir=True)
    def columns(s: T.handle, limit: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width = T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        L = T.match_buffer(limit, (n,), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        for t in T.thread_binding(n, "blockIdx.x"):
            for tx in T.thread_binding(threads, "threadIdx.x"):
                with T.sblock("select"):
                    vt, vx = T.axis.remap("SS", [t, tx])
                    T.reads(S[vt, 0:width], L[vt])
                    T.writes(Out[vt, 0:k])
                    _select(S, L, Out, vt, vx, n, width, k, threads, lambda c: c)

    if size == 0:
        return columns

    @T.prim_func(s_tir=True)
    def candidate_columns(s: T.handle, limit: T.handle, candidates: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width, blocks = T.int64(), T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        L = T.match_buffer(limit, (n,), "int32")
        C = T.match_buffer(candidates, (n, blocks), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        for t in T.thread_binding(n, "blockIdx.x"):
            for tx in T.thread_binding(threads, "threadIdx.x"):
                with T.sblock("select"):
                    vt, vx = T.axis.remap("SS", [t, tx])
                    T.reads(S[vt, 0:width], L[vt], C[vt, 0:blocks])
                    T.writes(Out[vt, 0:k])
                    _select(S, L, Out, vt, vx, n, width, k, threads, lambda c: _position(C, vt, c, size))

    return candidate_columns


def _position(candidates: Any, row: Any, column: Any, size: int) -> Any:
    return candidates[row, column // size] * size + column % size
