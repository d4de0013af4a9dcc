"""Fallback for operators that treat rows one by one: rows in parallel, inner loops in vectors."""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import BufferStore, PrimFunc, SeqStmt

from ds41_tvm.schedule.cpu.common import LANES, vectorize_inner


def schedule_rowwise(func: PrimFunc, *, lanes: int = LANES) -> Schedule:
    """Run the outermost loop, over rows, in parallel; vectorise every spatial innermost loop that whole chunks fill."""
    s = Schedule(func)
    blocks = s.get_child_blocks(s.get_sblock("root"))
    outer = s.get_loops(blocks[0])[0]
    for block in blocks:
        if len(s.get_loops(block)) > 1 and _is_vectorizable(s, block):
            vectorize_inner(s, block, lanes)
    s.parallel(outer)
    return s


_DATA_PARALLEL = 0  # IterVar.iter_type of a spatial axis


def _is_vectorizable(s: Schedule, block: SBlockRV) -> bool:
    """An elementwise body (stores only, no loops of its own) whose last axis is spatial."""
    node = s.get(block)
    statements = node.body.seq if isinstance(node.body, SeqStmt) else [node.body]
    return node.iter_vars[-1].iter_type == _DATA_PARALLEL and all(isinstance(x, BufferStore) for x in statements)
