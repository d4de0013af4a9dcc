"""What CPU schedule rules share."""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

LANES = 16  # f32 lanes of a 512-bit register; narrower machines get two or four registers


def vectorize_inner(s: Schedule, block: SBlockRV, lanes: int = LANES) -> None:
    """Vectorise the innermost loop of `block` in chunks of `lanes`, if its extent allows whole chunks."""
    inner = s.get_loops(block)[-1]
    extent = s.get(inner).extent
    if not hasattr(extent, "value"):
        return
    while lanes > 1 and extent.value % lanes:
        lanes //= 2
    if lanes > 1:
        s.vectorize(s.split(inner, [None, lanes])[1])


def prefetch(pointer: Any, keep: int = 3) -> Any:
    """Bring the cache line at `pointer` close (`keep` 3: into every cache, 2: not the first level); any address will
    do, wrong ones are ignored by the processor.
    """
    read, data = 0, 1
    return T.call_llvm_intrin("void", "llvm.prefetch", pointer, T.int32(read), T.int32(keep), T.int32(data))
