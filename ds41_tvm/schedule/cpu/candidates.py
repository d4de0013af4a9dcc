"""Block scores for CPUs: whole blocks in vectors, the newest one, which may be visible in part, by itself."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from ds41_tvm.kernels.indexer import MASKED
from ds41_tvm.schedule.cpu.topk import greatest, order_key16

CHUNK = 512  # blocks of a task
SIZES = (8, 16, 32)  # candidate blocks that fill a vector


def _from_order_key(key: Any) -> Any:
    """bf16 bits of an order key (uint16): of zeros +0, of NaNs the canonical one."""
    value = T.Select(key >= T.uint16(0x8000), key - T.uint16(0x8000), T.uint16(0x8000) - key + T.uint16(0x8000))
    return T.Select(key == T.uint16(0xFFFF), T.uint16(0x7FC0), value)


def block_scores_cpu(size: int) -> PrimFunc:
    """As `kernels.candidates.block_scores`, for the block sizes `SIZES`; equal up to the sign of zero."""

    @T.prim_func(s_tir=True)
    def main(s: T.handle, visible: T.handle, b: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n, width, blocks = T.int64(), T.int64(), T.int64()
        S = T.match_buffer(s, (n, width), "uint16")
        V = T.match_buffer(visible, (n,), "int32")
        B = T.match_buffer(b, (n, blocks), "uint16")
        for task in T.parallel(n * ((blocks + T.int64(CHUNK - 1)) // T.int64(CHUNK))):
            with T.sblock("blocks"):
                v = T.axis.spatial(n * ((blocks + T.int64(CHUNK - 1)) // T.int64(CHUNK)), task)
                T.reads(S[0:n, 0:width], V[0:n])
                T.writes(B[0:n, 0:blocks])
                vt: T.let = v // ((blocks + T.int64(CHUNK - 1)) // T.int64(CHUNK))
                first: T.let = v % ((blocks + T.int64(CHUNK - 1)) // T.int64(CHUNK)) * T.int64(CHUNK)
                # Blocks that are visible whole and not the newest; then the newest; then hidden ones.
                newest: T.let = T.Cast("int64", T.floordiv(V[vt] - 1, size))
                for i in range(T.min(T.int64(CHUNK), blocks - first)):
                    if first + i < newest:
                        B[vt, first + i] = _from_order_key(
                            greatest(order_key16(S[vt, T.ramp((first + i) * T.int64(size), 1, size)], size), size)
                        )
                    else:
                        B[vt, first + i] = T.Select(first + i == newest, T.uint16(0x7F80), T.uint16(MASKED))

    return main
