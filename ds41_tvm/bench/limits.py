"""What the machine can do at most, measured by compiled kernels on the same threads as the layer."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
from numpy.typing import NDArray
from tvm.script import tirx as T

from ds41_tvm.packing import aligned
from ds41_tvm.runtime.threads import use_threads
from ds41_tvm.target import parse_target

READ_BYTES = 512 << 20  # well beyond any cache
_TASKS = 256
_WORDS = READ_BYTES // 4 // _TASKS
_LANES = 64  # 256 bytes per turn


@cache
def _read_kernel():
    import tvm

    from ds41_tvm.compiler.targets import tvm_target

    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((_TASKS, _WORDS), "int32"), y: T.Buffer((_TASKS, _LANES), "int32")):
        T.func_attr({"tirx.noalias": True})
        for task in T.parallel(_TASKS):
            with T.sblock("read"):
                v = T.axis.spatial(_TASKS, task)
                T.reads(x[v, 0:_WORDS])
                T.writes(y[v, 0:_LANES])
                total = T.sblock_alloc_buffer((_LANES,), "int32", scope="local")
                for lane in T.vectorized(_LANES):
                    total[lane] = T.int32(0)
                for i in range(_WORDS // _LANES):
                    for line in T.unroll(4):
                        T.evaluate(
                            T.call_llvm_intrin(
                                "void",
                                "llvm.prefetch",
                                x.access_ptr("r", offset=v * _WORDS + i * _LANES + line * 16 + 512),
                                T.int32(0),
                                T.int32(3),
                                T.int32(1),
                            )
                        )
                    for lane in T.vectorized(_LANES):
                        total[lane] = total[lane] + x[v, i * _LANES + lane]
                for lane in T.vectorized(_LANES):
                    y[v, lane] = total[lane]

    return tvm.compile(main, target=tvm_target(parse_target("cpu")))["main"]


@cache
def _buffers() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    x = aligned((_TASKS, _WORDS), np.int32)
    x[:] = 1
    return x, aligned((_TASKS, _LANES), np.int32)


def read_bandwidth(threads: int) -> float:
    """Bytes per second of one pass over 512 MiB of memory that no cache holds, read in order on `threads` threads."""
    kernel, (x, y) = _read_kernel(), _buffers()
    use_threads(threads)
    start = time.perf_counter()
    kernel(x, y)
    return READ_BYTES / float(time.perf_counter() - start)
