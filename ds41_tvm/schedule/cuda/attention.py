"""Sparse attention on tensor cores, as `kernels.attention.sparse_attention`.

A block is a query and up to 64 of its heads. The rows come in tiles of 32, gathered once for all heads: those of the
window first, then the selected latents, in ascending order. Scores are exact products summed in f32. The softmax runs
along: sums so far are brought to each new maximum. The second product takes each weight as the sum of three bf16
values, which is exact, as in the CPU's form; `WEIGHT_PARTS` says what fewer would change.

The tiles and their order follow from the query's position and selection alone, so a token's bits depend neither on its
batch nor on `split`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cuda import memory
from ds41_tvm.schedule.cuda.attention_rows import decode, first_slot, place_all, start_first, start_next
from ds41_tvm.schedule.cuda.attention_sizes import ROWS, SCORES, THREADS, WARPS, Sizes
from ds41_tvm.schedule.cuda.attention_split import launch
from ds41_tvm.schedule.cuda.attention_tile import add, clear, finish, gather, score, start_queries, weigh
from ds41_tvm.schedule.cuda.mma import exchange_shape, form_of


def _steps(s: Sizes, window: Any) -> Any:
    """Steps of a chain of scores; `window`: tiles of the window, never 0.

    For few heads in a form that does not look constant: nvcc would unroll the loop whole, and spill registers so as to
    have two blocks on a multiprocessor.
    """
    steps = s.steps // s.halves
    return T.min(window * steps, steps) if s.head_tiles == 1 else steps


@T.macro
def _attend(s, Q, F, R, sink, P, N, first, base, slots, L, B, C, Out, vt, part, vx):
    queries = T.sblock_alloc_buffer((s.padded * s.dim // 2,), "uint32", scope=s.shared)
    values = T.sblock_alloc_buffer((ROWS * s.dim // 2,), "uint32", scope=s.shared)
    raw = T.sblock_alloc_buffer((s.stages * ROWS * s.raw_words,), "uint32", scope=s.shared)
    scores = T.sblock_alloc_buffer((s.halves, s.padded, SCORES), "float32", scope=s.shared)
    weights = T.sblock_alloc_buffer((s.weight_parts * s.padded * ROWS // 2,), "uint32", scope=s.shared)
    place = T.sblock_alloc_buffer((s.slots,), "int32", scope=s.shared)
    factor = T.sblock_alloc_buffer((s.padded,), "float32", scope=s.shared)
    tiles = T.sblock_alloc_buffer((2,), "int32", scope=s.shared)
    exchange = T.sblock_alloc_buffer(exchange_shape(s.mma, WARPS), "uint32", scope="shared")
    count = T.sblock_alloc_buffer((2,), "int32", scope="local")  # tiles of the window, tiles
    top = T.sblock_alloc_buffer((3,), "float32", scope="local")  # of all tiles so far, with this tile, of another lane
    total = T.sblock_alloc_buffer((3,), "float32", scope="local")  # of all tiles so far, of this tile, of another lane
    part_of = T.sblock_alloc_buffer((8,), "float32", scope="local")
    low = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    high = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    words = T.sblock_alloc_buffer((4,), "uint32", scope="local")
    factors = T.sblock_alloc_buffer((2,), "uint32", scope="local")
    fragment = T.sblock_alloc_buffer((s.weight_parts * s.head_tiles * 4,), "uint32", scope="local")
    chain = T.sblock_alloc_buffer((s.row_tiles * 4,), "float32", scope="local")
    acc = T.sblock_alloc_buffer((s.head_tiles * s.channel_tiles * 4,), "float32", scope="local")
    place_all(s, place, tiles, count, P, N, first, base, slots, B, C, vt, vx)
    clear(s, acc, top, total)
    start_queries(s, Q, queries, vt, part, vx)
    start_first(s, raw, place, count, F, R, L, vx)
    for tile in range(count[1]):
        memory.wait(s.mma, s.stages - 1)
        T.tvm_storage_sync("shared")
        decode(s, raw, place, tile, count[0], words, factors, values, 0, vx)
        T.tvm_storage_sync("shared")
        start_next(s, raw, place, tile, count, F, R, L, vx)
        score(s, queries, values, scores, _steps(s, count[0]), low, high, words, chain, exchange, vx)
        T.tvm_storage_sync("shared")
        gather(s, scores, part_of, vx)
        weigh(s, place, first_slot(s, tile, count[0]), weights, factor, top, total, part_of, words, exchange, vx)
        T.tvm_storage_sync("shared")
        add(s, values, weights, factor, fragment, words, acc, exchange, vx)
    T.tvm_storage_sync("shared")
    finish(s, Out, sink, factor, top, total, acc, words, vt, part, 0, vx)


@T.macro
def _launch(s, Q, F, R, sink, P, N, first, base, slots, L, B, C, Out, n):
    for bx in T.thread_binding(n, "blockIdx.x"):
        for by in T.thread_binding(s.parts, "blockIdx.y"):
            for tx in T.thread_binding(THREADS, "threadIdx.x"):
                with T.sblock("attend"):
                    vt, vp, vx = T.axis.remap("SSS", [bx, by, tx])
                    T.reads(Q[vt, 0 : s.heads, 0 : s.dim], sink[0 : s.heads], P[vt], N[vt])
                    T.writes(Out[vt, 0 : s.heads, 0 : s.dim])
                    _attend(s, Q, F, R, sink, P, N, first, base, slots, L, B, C, Out, vt, vp, vx)


def _two(s: Sizes) -> tuple[Sizes, Sizes]:
    """Sizes of the two launches of `attention_split`."""
    return replace(s, stages=1), replace(s, slices=s.most_slices)


def sparse_attention_mma(s: Sizes) -> PrimFunc:
    """The program for `s`; `dim` a multiple of 32."""
    return _with_latents(s) if s.k else _window(s)


def _window(s: Sizes) -> PrimFunc:
    heads, dim, row_bytes = s.heads, s.dim, s.window_bytes
    scores, sums = _two(s)

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, fresh: T.handle, ring: T.handle, sink: T.Buffer((heads,), "float32"), position: T.handle,
        sequence: T.handle, start: T.handle, row: T.handle, slot: T.handle, o: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs = T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, dim), "uint16")
        F = T.match_buffer(fresh, (n, row_bytes), "uint8")
        R = T.match_buffer(ring, (p, row_bytes), "uint8")
        P = T.match_buffer(position, (n,), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        first = T.match_buffer(start, (seqs,), "int32")
        base = T.match_buffer(row, (seqs,), "int32")
        slots = T.match_buffer(slot, (seqs,), "int32")
        Out = T.match_buffer(o, (n, heads, dim), "uint16")
        if s.split_rows:
            scratch = T.sblock_alloc_buffer((n, s.parts, s.most_tiles, s.padded, ROWS), "float32")
            launch(s, scores, sums, Q, F, R, sink, P, N, first, base, slots, None, None, None, scratch, Out, n)
        else:
            _launch(s, Q, F, R, sink, P, N, first, base, slots, None, None, None, Out, n)

    return main


def _with_latents(s: Sizes) -> PrimFunc:
    heads, dim, row_bytes, latent_bytes, k = s.heads, s.dim, s.window_bytes, s.latent_bytes, s.k
    scores, sums = _two(s)

    @T.prim_func(s_tir=True)
    def main(
        q: T.handle, fresh: T.handle, ring: T.handle, sink: T.Buffer((heads,), "float32"), position: T.handle,
        sequence: T.handle, start: T.handle, row: T.handle, slot: T.handle, latents: T.handle, table: T.handle,
        selected: T.handle, o: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, p, seqs, blocks, stored = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (n, heads, dim), "uint16")
        F = T.match_buffer(fresh, (n, row_bytes), "uint8")
        R = T.match_buffer(ring, (p, row_bytes), "uint8")
        P = T.match_buffer(position, (n,), "int32")
        N = T.match_buffer(sequence, (n,), "int32")
        first = T.match_buffer(start, (seqs,), "int32")
        base = T.match_buffer(row, (seqs,), "int32")
        slots = T.match_buffer(slot, (seqs,), "int32")
        L = T.match_buffer(latents, (stored, latent_bytes), "uint8")
        B = T.match_buffer(table, (seqs, blocks), "int32")
        C = T.match_buffer(selected, (n, k), "int32")
        Out = T.match_buffer(o, (n, heads, dim), "uint16")
        if s.split_rows:
            scratch = T.sblock_alloc_buffer((n, s.parts, s.most_tiles, s.padded, ROWS), "float32")
            launch(s, scores, sums, Q, F, R, sink, P, N, first, base, slots, L, B, C, scratch, Out, n)
        else:
            _launch(s, Q, F, R, sink, P, N, first, base, slots, L, B, C, Out, n)

    return main


def _rule(op: str, p: dict[str, Any], kind: str, knobs: dict[str, int]) -> PrimFunc | None:
    if op != "sparse_attention" or p["dim"] % 32:
        return None
    sizes = Sizes(**{name: v for name, v in p.items() if name != "form"}, mma=form_of(kind), **knobs)
    # Small blocks leave threads without a share of the work, and TVM's pass for barriers refuses what they skip.
    if kind == "cuda" and (sizes.dim < 128 or (sizes.padded < 32 and sizes.dim < 512)):
        return None
    return sparse_attention_mma(sizes)


RULES = (("attention-mma", _rule),)
