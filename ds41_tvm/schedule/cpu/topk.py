"""Top-k for CPUs: look closely only where a winner can be.

The best of every `BLOCK` columns is found in vectors. The k-th best of these is a floor: k columns reach it, so no
column below it is selected. The radix select of the plain kernel then runs over the blocks that reach the floor. In the
worst case (all scores equal) these are all blocks, and the cost is that of the plain kernel.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.topk import deciding_bucket, order_key

BLOCK = 32  # columns whose best is found at once: one or two vectors


def order_key16(bits: Any, lanes: int) -> Any:
    """`kernels.topk.order_key` in 16-bit lanes: uint16 that orders like the bf16 values."""

    def c(value: int) -> Any:
        return T.broadcast(T.uint16(value), lanes)

    magnitude = T.bitwise_and(bits, c(0x7FFF))
    key = T.Select(bits > c(0x7FFF), c(0x8000) - magnitude, c(0x8000) + magnitude)
    return T.Select(magnitude > c(0x7F80), c(0xFFFF), key)


def greatest(keys: Any, lanes: int) -> Any:
    """The greatest lane of a uint16 vector."""
    return T.call_llvm_pure_intrin("uint16", f"llvm.vector.reduce.umax.v{lanes}i16", keys)


@T.macro
def _low_byte(keys, number, count, state):
    """state[0] = the key whose high byte is the deciding bucket state[2] and that is the state[1]-th best in it."""
    state[3] = state[2]
    for i in range(256):
        count[i] = T.int32(0)
    for i in range(number):
        if T.shift_right(T.Cast("int32", keys[i]), 8) == state[3]:
            count[T.bitwise_and(T.Cast("int32", keys[i]), 255)] = (
                count[T.bitwise_and(T.Cast("int32", keys[i]), 255)] + 1
            )
    deciding_bucket(count, state)
    state[0] = state[3] * 256 + state[2]


@T.macro
def _floor(best, blocks, k, count, state):
    """state[0] = the k-th best of best[0..blocks - 1]."""
    state[1] = T.int32(k)
    for i in range(256):
        count[i] = T.int32(0)
    for b in range(blocks):
        count[T.shift_right(T.Cast("int32", best[b]), 8)] = count[T.shift_right(T.Cast("int32", best[b]), 8)] + 1
    deciding_bucket(count, state)
    _low_byte(best, blocks, count, state)


@T.macro
def _select_row(S, L, Out, vt, k, best, key, column, count, state, position):
    """Write the selection of row vt.

    state: threshold key, how many equal to it to take, a bucket, high byte of the threshold, columns that reach the
    floor, columns taken. key, column: those that reach the floor, ascending.
    """
    if L[vt] <= k:
        for i in range(k):
            Out[vt, i] = T.int32(-1)
        for i in range(L[vt]):
            Out[vt, i] = position(i)
    else:
        state[0] = T.int32(0)
        for b in range(L[vt] // BLOCK):
            best[b] = greatest(order_key16(S[vt, T.ramp(b * BLOCK, 1, BLOCK)], BLOCK), BLOCK)
        if L[vt] // BLOCK > k:
            _floor(best, L[vt] // BLOCK, k, count, state)
        state[4] = T.int32(0)
        for i in range(256):
            count[i] = T.int32(0)
        for b in range(L[vt] // BLOCK + 1):
            if b == L[vt] // BLOCK or T.Cast("int32", best[b]) >= state[0]:
                for i in range(T.min(L[vt] - b * BLOCK, BLOCK)):
                    value: T.let = order_key(S[vt, b * BLOCK + i])
                    key[state[4]] = T.Cast("uint16", value)
                    column[state[4]] = b * BLOCK + i
                    if value >= state[0]:
                        state[4] = state[4] + 1
                        count[T.shift_right(value, 8)] = count[T.shift_right(value, 8)] + 1
        state[1] = T.int32(k)
        deciding_bucket(count, state)
        _low_byte(key, state[4], count, state)
        state[5] = T.int32(0)
        for i in range(state[4]):
            if T.Cast("int32", key[i]) > state[0]:
                Out[vt, state[5]] = position(column[i])
                state[5] = state[5] + 1
            else:
                if T.Cast("int32", key[i]) == state[0] and state[1] > 0:
                    Out[vt, state[5]] = position(column[i])
                    state[5] = state[5] + 1
                    state[1] = state[1] - 1


def topk_cpu(k: int, size: int) -> PrimFunc:
    """As `kernels.topk.topk_lowest_index`."""

    @T.prim_func(s_tir=True)
    def columns(s: T.handle, limit: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, width = T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        L = T.match_buffer(limit, (n,), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        for t in T.parallel(n):
            with T.sblock("select"):
                vt = T.axis.spatial(n, t)
                T.reads(S[vt, 0:width], L[vt])
                T.writes(Out[vt, 0:k])
                best = T.sblock_alloc_buffer((width // BLOCK + 1,), "uint16")
                key = T.sblock_alloc_buffer((width + 1,), "uint16")
                column = T.sblock_alloc_buffer((width + 1,), "int32")
                count = T.sblock_alloc_buffer((256,), "int32")
                state = T.sblock_alloc_buffer((6,), "int32")
                _select_row(S, L, Out, vt, k, best, key, column, count, state, lambda c: c)

    if size == 0:
        return columns

    @T.prim_func(s_tir=True)
    def candidate_columns(s: T.handle, limit: T.handle, candidates: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, width, blocks = T.int64(), T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        L = T.match_buffer(limit, (n,), "int32")
        C = T.match_buffer(candidates, (n, blocks), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        for t in T.parallel(n):
            with T.sblock("select"):
                vt = T.axis.spatial(n, t)
                T.reads(S[vt, 0:width], L[vt], C[vt, 0:blocks])
                T.writes(Out[vt, 0:k])
                best = T.sblock_alloc_buffer((width // BLOCK + 1,), "uint16")
                key = T.sblock_alloc_buffer((width + 1,), "uint16")
                column = T.sblock_alloc_buffer((width + 1,), "int32")
                count = T.sblock_alloc_buffer((256,), "int32")
                state = T.sblock_alloc_buffer((6,), "int32")
                _select_row(
                    S,
                    L,
                    Out,
                    vt,
                    k,
                    best,
                    key,
                    column,
                    count,
                    state,
                    lambda c: C[vt, c // size] * size + c % size,
                )

    return candidate_columns
