"""Deterministic top-k: equal scores are taken in ascending position. Selections are ascending, then -1."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc


def order_key(bits: Any) -> Any:
    """bf16 bits -> int32 in 0..65535 that orders like the values: -0 equal to 0, NaN above infinity."""
    u = T.Cast("int32", bits)
    magnitude = T.bitwise_and(u, T.int32(0x7FFF))
    key = T.Select(u > T.int32(0x7FFF), T.int32(0x8000) - magnitude, T.int32(0x8000) + magnitude)
    return T.Select(magnitude > T.int32(0x7F80), T.int32(0xFFFF), key)


@T.macro
def deciding_bucket(count, state):
    """Walk down from the highest bucket to the one that holds the state[1]-th best; state[1] becomes the rank in it."""
    state[2] = T.int32(255)
    while count[state[2]] < state[1]:
        state[1] = state[1] - count[state[2]]
        state[2] = state[2] - 1


@T.macro
def _select_row(S, L, Out, vt, k, count, state, position):
    """Write the selection of row vt. state: threshold key, how many equal to it to take, cursor, columns taken."""
    if L[vt] <= k:
        for i in range(k):
            Out[vt, i] = T.int32(-1)
        for i in range(L[vt]):
            Out[vt, i] = position(i)
    else:
        state[1] = T.int32(k)
        for i in range(256):
            count[i] = T.int32(0)
        for c in range(L[vt]):
            count[T.shift_right(order_key(S[vt, c]), 8)] = count[T.shift_right(order_key(S[vt, c]), 8)] + 1
        deciding_bucket(count, state)
        state[0] = state[2]
        for i in range(256):
            count[i] = T.int32(0)
        for c in range(L[vt]):
            if T.shift_right(order_key(S[vt, c]), 8) == state[0]:
                count[T.bitwise_and(order_key(S[vt, c]), 255)] = count[T.bitwise_and(order_key(S[vt, c]), 255)] + 1
        deciding_bucket(count, state)
        state[0] = state[0] * 256 + state[2]
        state[3] = T.int32(0)
        for c in range(L[vt]):
            if order_key(S[vt, c]) > state[0]:
                Out[vt, state[3]] = position(c)
                state[3] = state[3] + 1
            else:
                if order_key(S[vt, c]) == state[0] and state[1] > 0:
                    Out[vt, state[3]] = position(c)
                    state[3] = state[3] + 1
                    state[1] = state[1] - 1


def topk_lowest_index(k: int, size: int) -> PrimFunc:
    """The min(k, limit) best of columns 0..limit-1 of each row; equal scores are taken in ascending column order.

    A two-level radix select on 16-bit keys: count the high bytes, then the low bytes within the deciding high byte;
    what lies above the threshold is taken whole, of what equals it the first ones.

    Shapes: s bf16 bits ``[n, width]``, limit int32 ``[n]`` (at most width), out int32 ``[n, k]``. With `size` > 0,
    candidates int32 ``[n, c]`` comes before out and column c * size + i stands for position candidates[t, c] * size +
    i.
    """

    @T.prim_func(s_tir=True)
    def columns(s: T.handle, limit: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width = T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        L = T.match_buffer(limit, (n,), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        for t in range(n):
            with T.sblock("select"):
                vt = T.axis.spatial(n, t)
                T.reads(S[vt, 0:width], L[vt])
                T.writes(Out[vt, 0:k])
                count = T.sblock_alloc_buffer((256,), "int32", scope="local")
                state = T.sblock_alloc_buffer((4,), "int32", scope="local")
                _select_row(S, L, Out, vt, k, count, state, lambda c: c)

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
        for t in range(n):
            with T.sblock("select"):
                vt = T.axis.spatial(n, t)
                T.reads(S[vt, 0:width], L[vt], C[vt, 0:blocks])
                T.writes(Out[vt, 0:k])
                count = T.sblock_alloc_buffer((256,), "int32", scope="local")
                state = T.sblock_alloc_buffer((4,), "int32", scope="local")
                _select_row(S, L, Out, vt, k, count, state, lambda c: C[vt, c // size] * size + c % size)

    return candidate_columns
