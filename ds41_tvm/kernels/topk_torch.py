"""Top-k with the picks of torch's CPU ``topk`` (ties, and masked positions where few candidates exist).

torch runs libstdc++'s ``partial_sort`` where k * 64 <= n and its ``nth_element`` otherwise, over (value, index) pairs
with "greater" on the values; which of several equal values ends among the first k follows from their exact steps, which
are repeated here: heap select, introselect with median of three, final insertion sort.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.topk import order_key

# Integer registers of one row.
_COUNT, _CURSOR, _FIRST, _LAST, _DEPTH, _CUT, _HIGH, _HOLE, _CHILD, _TOP, _LENGTH, _I = range(12)

# Macros see only what is defined before them: leaves first.


def _greater(a: Any, b: Any) -> Any:
    """Comparator of torch's topk on two pairs; keys already put NaN first and make -0 equal to 0."""
    return T.shift_right(a, T.int64(32)) > T.shift_right(b, T.int64(32))


@T.macro
def _swap(pair, v, a, b):
    v[0] = pair[a]
    pair[a] = pair[b]
    pair[b] = v[0]


@T.macro
def _adjust_heap(pair, r, v, first):
    """Sift v[0] from the hole r[_TOP] down to a leaf, then up again (``__adjust_heap``, ``__push_heap``)."""
    r[_HOLE] = r[_TOP]
    r[_CHILD] = r[_TOP]
    while r[_CHILD] < (r[_LENGTH] - 1) // 2:
        r[_CHILD] = 2 * (r[_CHILD] + 1)
        if _greater(pair[first + r[_CHILD]], pair[first + r[_CHILD] - 1]):
            r[_CHILD] = r[_CHILD] - 1
        pair[first + r[_HOLE]] = pair[first + r[_CHILD]]
        r[_HOLE] = r[_CHILD]
    if r[_LENGTH] % 2 == 0 and r[_CHILD] == (r[_LENGTH] - 2) // 2:
        r[_CHILD] = 2 * (r[_CHILD] + 1)
        pair[first + r[_HOLE]] = pair[first + r[_CHILD] - 1]
        r[_HOLE] = r[_CHILD] - 1
    r[_CHILD] = (r[_HOLE] - 1) // 2
    while r[_HOLE] > r[_TOP] and _greater(pair[first + T.max(r[_CHILD], 0)], v[0]):
        pair[first + r[_HOLE]] = pair[first + r[_CHILD]]
        r[_HOLE] = r[_CHILD]
        r[_CHILD] = (r[_HOLE] - 1) // 2
    pair[first + r[_HOLE]] = v[0]


@T.macro
def _heap_select(pair, r, v, first, middle, last):
    """libstdc++ ``__heap_select``: a heap of [first, middle), its worst on top, swallows what beats the worst."""
    r[_LENGTH] = middle - first
    r[_I] = (r[_LENGTH] - 2) // 2
    if r[_LENGTH] >= 2:
        while r[_I] >= 0:
            v[0] = pair[first + r[_I]]
            r[_TOP] = r[_I]
            _adjust_heap(pair, r, v, first)
            r[_I] = r[_I] - 1
    r[_I] = middle
    while r[_I] < last:
        if _greater(pair[r[_I]], pair[first]):
            v[0] = pair[r[_I]]
            pair[r[_I]] = pair[first]
            r[_TOP] = T.int32(0)
            _adjust_heap(pair, r, v, first)
        r[_I] = r[_I] + 1


def _median(pair: Any, a: Any, b: Any, c: Any) -> Any:
    """Which of the three libstdc++ moves to the front (``__move_median_to_first``)."""
    ab, bc, ac = _greater(pair[a], pair[b]), _greater(pair[b], pair[c]), _greater(pair[a], pair[c])
    return T.Select(ab, T.Select(bc, b, T.Select(ac, c, a)), T.Select(ac, a, T.Select(bc, c, b)))


@T.macro
def _partition(pair, r, v):
    """Median of three to the front, then the unguarded partition around it; the cut goes to r[_CUT]."""
    r[_I] = r[_FIRST] + (r[_LAST] - r[_FIRST]) // 2
    r[_HOLE] = _median(pair, r[_FIRST] + 1, r[_I], r[_LAST] - 1)
    _swap(pair, v, r[_FIRST], r[_HOLE])
    r[_CUT] = r[_FIRST] + 1
    r[_HIGH] = r[_LAST]
    r[_CHILD] = T.int32(1)
    while r[_CHILD] == 1:
        while _greater(pair[r[_CUT]], pair[r[_FIRST]]):
            r[_CUT] = r[_CUT] + 1
        r[_HIGH] = r[_HIGH] - 1
        while _greater(pair[r[_FIRST]], pair[r[_HIGH]]):
            r[_HIGH] = r[_HIGH] - 1
        if r[_CUT] < r[_HIGH]:
            _swap(pair, v, r[_CUT], r[_HIGH])
            r[_CUT] = r[_CUT] + 1
        else:
            r[_CHILD] = T.int32(0)


@T.macro
def _insertion_sort(pair, r, v):
    """Sort [first, last), at most three elements, stably with respect to `_greater`."""
    r[_I] = r[_FIRST] + 1
    while r[_I] < r[_LAST]:
        v[1] = pair[r[_I]]
        r[_HOLE] = r[_I]
        while r[_HOLE] > r[_FIRST] and _greater(v[1], pair[T.max(r[_HOLE] - 1, 0)]):
            pair[r[_HOLE]] = pair[r[_HOLE] - 1]
            r[_HOLE] = r[_HOLE] - 1
        pair[r[_HOLE]] = v[1]
        r[_I] = r[_I] + 1


@T.macro
def _nth_element(pair, r, v, nth, end):
    """libstdc++ ``nth_element(0, nth, end)``: introselect over [0, end)."""
    r[_FIRST] = T.int32(0)
    r[_LAST] = end
    r[_DEPTH] = T.int32(0)
    r[_I] = end
    while r[_I] > 1:
        r[_I] = T.shift_right(r[_I], 1)
        r[_DEPTH] = r[_DEPTH] + 2
    while r[_LAST] - r[_FIRST] > 3 and r[_DEPTH] >= 0:
        if r[_DEPTH] == 0:
            _heap_select(pair, r, v, r[_FIRST], nth + 1, r[_LAST])
            _swap(pair, v, r[_FIRST], nth)
            r[_DEPTH] = T.int32(-1)
        else:
            r[_DEPTH] = r[_DEPTH] - 1
            _partition(pair, r, v)
            if r[_CUT] <= nth:
                r[_FIRST] = r[_CUT]
            else:
                r[_LAST] = r[_CUT]
    if r[_DEPTH] >= 0:
        _insertion_sort(pair, r, v)


def pair_of(score: Any, column: Any) -> Any:
    """Key in the high bits, column in the low 32. Only keys are ever compared."""
    return T.shift_left(T.Cast("int64", order_key(score)), T.int64(32)) + T.Cast("int64", column)


@T.macro
def select_row(N, L, Out, vt, k, pair, chosen, r, v):
    """The selection of row vt out of its pairs; `chosen` all 0. Both have room for one element more than the row."""
    r[_COUNT] = T.min(T.int32(k), N[vt])
    if r[_COUNT] > 0:
        if r[_COUNT] * 64 <= N[vt]:
            _heap_select(pair, r, v, T.int32(0), r[_COUNT], N[vt])
        else:
            _nth_element(pair, r, v, r[_COUNT] - 1, N[vt])
    for c in range(r[_COUNT]):
        chosen[T.Cast("int32", T.bitwise_and(pair[c], T.int64(0xFFFFFFFF)))] = T.uint8(1)
    r[_CURSOR] = T.int32(0)
    for c in range(L[vt]):
        if chosen[c] == T.uint8(1):
            Out[vt, r[_CURSOR]] = c
            r[_CURSOR] = r[_CURSOR] + 1
    for i in range(k):
        if i >= r[_CURSOR]:
            Out[vt, i] = T.int32(-1)


def topk_torch_cpu(k: int) -> PrimFunc:
    """The first min(k, total) of torch's order over columns 0..total-1, kept where column < limit, ascending, then -1.

    Shapes: s bf16 bits ``[n, width]``, total and limit int32 ``[n]`` (limit <= total <= width), out int32 ``[n, k]``.
    """

    @T.prim_func(s_tir=True)
    def main(s: T.handle, total: T.handle, limit: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, width = T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        N = T.match_buffer(total, (n,), "int32")
        L = T.match_buffer(limit, (n,), "int32")
        Out = T.match_buffer(out, (n, k), "int32")
        for t in range(n):
            with T.sblock("select"):
                vt = T.axis.spatial(n, t)
                T.reads(S[vt, 0:width], N[vt], L[vt])
                T.writes(Out[vt, 0:k])
                pair = T.sblock_alloc_buffer((width + T.int64(1),), "int64")
                chosen = T.sblock_alloc_buffer((width + T.int64(1),), "uint8")
                r = T.sblock_alloc_buffer((12,), "int32", scope="local")
                v = T.sblock_alloc_buffer((2,), "int64", scope="local")
                for c in range(N[vt]):
                    pair[c] = pair_of(S[vt, c], c)
                    chosen[c] = T.uint8(0)
                select_row(N, L, Out, vt, k, pair, chosen, r, v)

    return main
