"""The last GPU rule: any plain kernel, bound to blocks and threads without thought for speed."""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import PrimFunc

from ds41_tvm.schedule.cuda.common import WARP

_REDUCTION = 2  # IterVar.iter_type of a reduction axis


def thread_bound(func: PrimFunc) -> PrimFunc:
    """A plain kernel of any operator as a GPU program: a warp for each row, or a thread where a row is one block."""
    s = Schedule(func)
    blocks = s.get_child_blocks(s.get_sblock("root"))
    if len(blocks) == 1:
        bind_each(s, s.fuse(*s.get_loops(blocks[0])))
    elif s.get(s.get_loops(blocks[0])[0]) != s.get(s.get_loops(blocks[-1])[0]):
        _product(s, blocks)
    else:
        _stages(s, blocks)
    return s.mod["main"]


def bind_each(s: Schedule, loop: LoopRV, threads: int = WARP) -> LoopRV:
    """An iteration of `loop` for each thread. Returns the thread loop."""
    block, thread = s.split(loop, [None, threads])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    return thread


def _product(s: Schedule, blocks: list[SBlockRV]) -> None:
    """A linear layer: a thread for each output."""
    widen, decode, product, total, store = blocks
    thread = bind_each(s, s.fuse(*s.get_loops(store)), 64)
    for block in (product, total):
        s.set_scope(block, 0, "local")
    s.compute_at(total, thread)
    s.compute_at(product, s.get_loops(total)[-1])
    s.compute_inline(decode)
    s.compute_inline(widen)


def _stages(s: Schedule, blocks: list[SBlockRV]) -> None:
    """A warp for each row, one stage after the other, what they hand on in shared memory."""
    nests = [s.get_loops(block) for block in blocks]
    common = 0
    while all(len(n) > common and s.get(n[common]) == s.get(nests[0][common]) for n in nests):
        common += 1
    outputs = list(s.mod["main"].params)
    for block in blocks:
        for index, region in enumerate(s.get(block).writes):
            if not any(region.source.same_as(buffer) for buffer in outputs):
                s.set_scope(block, index, "shared")
    for block in blocks:
        node, loops = s.get(block), s.get_loops(block)[common:]
        kinds = [axis.iter_type for axis in node.iter_vars[common:]]
        if not loops:
            loops, kinds = [s.add_unit_loop(block)], [0]
        spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != _REDUCTION]
        others = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _REDUCTION]
        if not spatial:
            spatial = [s.add_unit_loop(others[0])]
        s.reorder(*spatial, *others)
        fused = s.fuse(*spatial) if len(spatial) > 1 else spatial[0]
        s.bind(s.split(fused, [None, WARP])[1], "threadIdx.x")
    outer = s.get_loops(blocks[0])[:common]
    s.bind(s.fuse(*outer) if common > 1 else outer[0], "blockIdx.x")
