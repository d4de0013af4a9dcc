"""Linear layers with fused multiply-adds: a register tile of rows x columns, weights decoded on the way."""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cpu.common import vectorize_inner


def schedule_linear(
    func: PrimFunc, weight: str, tile: int, rows: int, groups: int,
    *, unroll: int | None = None, decode_first: int | None = None,
) -> Schedule:  # fmt: skip
    """Column tiles in parallel; within one, row tiles in turn, `rows` x `tile` accumulators in registers over a chunk
    of k.

    One row streams the weights and decodes them in registers. Many rows decode a column tile of fp8 weights once,
    into a buffer that stays in the second-level cache; bf16 decodes in registers there too (one shift for each two
    multiply-adds or more). `decode_first` chooses between the two, `unroll` how many inner indices are written out in
    a row.
    """
    if unroll is None:
        unroll = 1 if weight == "f32" else 2
    if decode_first is None:
        decode_first = int(weight == "fp8" and rows > 1)
    s = Schedule(func)
    # By position: the parser numbers the names of blocks that come from a macro.
    widen, decode, product, total, store = s.get_child_blocks(s.get_sblock("root"))
    s.set_scope(product, 0, "local")
    s.set_scope(total, 0, "local")
    b, i, j = s.get_loops(store)
    jo, ji = s.split(j, [None, tile])
    s.reorder(jo, b, i, ji)
    s.vectorize(ji)
    s.unroll(i)
    s.parallel(jo)
    s.compute_at(total, b, preserve_unit_loops=True)
    i2, j2, chunk = s.get_loops(total)[-3:]
    s.reorder(chunk, i2, j2)
    s.unroll(i2)
    s.vectorize(j2)
    s.compute_at(product, chunk, preserve_unit_loops=True)
    i3, j3, _, k = s.get_loops(product)[-4:]
    ko, ki = s.split(k, [None, unroll])
    s.reorder(ko, ki, i3, j3)
    s.unroll(i3)
    s.vectorize(j3)
    s.unroll(ki)
    if decode_first:
        s.compute_at(decode, jo, preserve_unit_loops=True)
        loops = s.get_loops(decode)
        s.unroll(s.split(loops[-2], [None, 2])[1])
        s.vectorize(loops[-1])
    else:
        s.compute_inline(decode)
    if rows > 1:
        s.compute_at(widen, b, preserve_unit_loops=True)
    vectorize_inner(s, widen)
    for block, loop in ((product, ko), (total, chunk)):
        rows_loop, columns = s.get_loops(s.decompose_reduction(block, loop))[-2:]
        s.unroll(rows_loop)
        s.vectorize(columns)
    return s
