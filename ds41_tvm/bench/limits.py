"""What the machine can do at most, measured by compiled kernels on the same threads as the layer.

- ``read``: bytes per second of reading memory in order, a buffer several times larger than the last cache;
- ``fma``: f32 FLOP per second of fused multiply-adds out of registers;
- ``vnni``: integer operations per second of ``vpdpbusd`` (64 products and sums each), where the target has it;
- ``bf16``: bf16 FLOP per second of ``vdpbf16ps`` (32 products and sums each), where the target has it;
- ``amx``: bf16 FLOP per second of tile products out of tile registers, where the target has them.

Every sample makes several passes and keeps the fastest and the median one: the first pass after a pause meets cold
address caches and a clock that is still rising, and says little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script import tirx as T

from ds41_tvm.bench.machine import last_cache
from ds41_tvm.packing import aligned
from ds41_tvm.runtime.threads import use_threads
from ds41_tvm.schedule.cpu import amx, dot
from ds41_tvm.schedule.cpu.common import prefetch
from ds41_tvm.target import Target

_TASKS = 64  # pieces of the read buffer; every thread has some in a row
_LANES = 64  # int32 read per turn: 256 bytes
_LEAD = 1024  # int32 by which a prefetch runs ahead
_CHAINS = 12  # independent accumulators: enough to cover the latency of two units
_TURNS = 200_000
PASSES = 5


def _read(words: int, lead: int):
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((_TASKS, words), "int32"), y: T.Buffer((_TASKS, _LANES), "int32")):
        T.func_attr({"tirx.noalias": True})
        for task in T.parallel(_TASKS):
            with T.sblock("read"):
                v = T.axis.spatial(_TASKS, task)
                T.reads(x[v, 0:words])
                T.writes(y[v, 0:_LANES])
                total = T.sblock_alloc_buffer((_LANES,), "int32", scope="local")
                for lane in T.vectorized(_LANES):
                    total[lane] = T.int32(0)
                for i in range(words // _LANES):
                    if lead > 0:
                        for line in T.unroll(4):
                            T.evaluate(prefetch(x.access_ptr("r", offset=v * words + i * _LANES + line * 16 + lead)))
                    for lane in T.vectorized(_LANES):
                        total[lane] = total[lane] + x[v, i * _LANES + lane]
                for lane in T.vectorized(_LANES):
                    y[v, lane] = total[lane]

    return main


def _fma(tasks: int, lanes: int, chains: int):
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((2,), "float32"), y: T.Buffer((tasks, chains, lanes), "float32")):
        T.func_attr({"tirx.noalias": True})
        for task in T.parallel(tasks):
            with T.sblock("fma"):
                v = T.axis.spatial(tasks, task)
                T.reads(x[0:2])
                T.writes(y[v, 0:chains, 0:lanes])
                total = T.sblock_alloc_buffer((chains, lanes), "float32", scope="local")
                for c in T.unroll(chains):
                    for lane in T.vectorized(lanes):
                        total[c, lane] = T.Cast("float32", c)
                for _ in range(_TURNS):
                    for c in T.unroll(chains):
                        for lane in T.vectorized(lanes):
                            total[c, lane] = total[c, lane] * x[0] + x[1]
                for c in T.unroll(chains):
                    for lane in T.vectorized(lanes):
                        y[v, c, lane] = total[c, lane]

    return main


def _vnni(tasks: int, chains: int):
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((64,), "uint8"), b: T.Buffer((64,), "int8"), y: T.Buffer((tasks, chains * 16), "int32")):
        T.func_attr({"tirx.noalias": True})
        for task in T.parallel(tasks):
            with T.sblock("vnni"):
                v = T.axis.spatial(tasks, task)
                T.reads(a[0:64], b[0:64])
                T.writes(y[v, 0 : chains * 16])
                total = T.sblock_alloc_buffer((chains * 16,), "int32", scope="local")
                for i in T.vectorized(chains * 16):
                    total[i] = T.int32(0)
                for _ in range(_TURNS):
                    for c in T.unroll(chains):
                        total[T.ramp(c * 16, 1, 16)] = T.call_llvm_pure_intrin(
                            "int32x16",
                            "llvm.x86.avx512.vpdpbusd.512",
                            total[T.ramp(c * 16, 1, 16)],
                            a[T.ramp(0, 1, 64)],
                            b[T.ramp(0, 1, 64)],
                        )
                for i in T.vectorized(chains * 16):
                    y[v, i] = total[i]

    return main


def _bf16(tasks: int, chains: int):
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((2, 16), "uint32"), y: T.Buffer((tasks, chains * 16), "float32")):
        T.func_attr({"tirx.noalias": True})
        with T.attr(T.int32(0), dot.IMPORT, dot.SOURCE):
            for task in T.parallel(tasks):
                with T.sblock("bf16"):
                    v = T.axis.spatial(tasks, task)
                    T.reads(x[0:2, 0:16])
                    T.writes(y[v, 0 : chains * 16])
                    total = T.sblock_alloc_buffer((chains * 16,), "float32", scope="local")
                    for i in T.vectorized(chains * 16):
                        total[i] = T.float32(0)
                    for _ in range(_TURNS):
                        for c in T.unroll(chains):
                            total[T.ramp(c * 16, 1, 16)] = dot.dot(
                                total[T.ramp(c * 16, 1, 16)], x[0, T.ramp(0, 1, 16)], x[1, T.ramp(0, 1, 16)]
                            )
                    for i in T.vectorized(chains * 16):
                        y[v, i] = total[i]

    return main


def _amx(tasks: int):
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((16, 16), "int32"), y: T.Buffer((tasks, 16, 16), "float32")):
        T.func_attr({"tirx.noalias": True})
        for task in T.parallel(tasks):
            with T.sblock("amx"):
                v = T.axis.spatial(tasks, task)
                T.reads(x[0:16, 0:16])
                T.writes(y[v, 0:16, 0:16])
                setup = T.sblock_alloc_buffer((64,), "uint8", scope="local")
                amx.configure(setup, 16, 0)
                amx.clear(4)
                for i in T.unroll(4):
                    T.evaluate(amx.load(4 + i, x, 0, 64))
                for _ in range(_TURNS // 16):
                    for c in T.unroll(4):
                        T.evaluate(amx.multiply(c, 4 + c // 2, 6 + c % 2))
                T.evaluate(amx.store(0, y, v * 256, 64))
                T.evaluate(amx.op("tilerelease"))

    return main


def _launch(tasks: int):
    """One word written by each of `tasks` tasks: what a kernel costs that does nothing."""

    @T.prim_func(s_tir=True)
    def serial(y: T.Buffer((1,), "int32")):
        for task in range(1):
            with T.sblock("touch"):
                v = T.axis.spatial(1, task)
                y[v] = T.int32(1)

    @T.prim_func(s_tir=True)
    def parallel(y: T.Buffer((tasks, 16), "int32")):
        for task in T.parallel(tasks):
            with T.sblock("touch"):
                v = T.axis.spatial(tasks, task)
                y[v, 0] = T.int32(1)

    return parallel if tasks > 1 else serial


@cache
def _compiled(make: Callable[..., Any], *args: int, target: Target) -> Any:
    import tvm

    from ds41_tvm.compiler.targets import tvm_target

    return tvm.compile(make(*args), target=tvm_target(target))["main" if make is not _launch else _name(*args)]


def _name(tasks: int) -> str:
    return "parallel" if tasks > 1 else "serial"


@cache
def read_bytes() -> int:
    """Size of the read buffer: half a gigabyte or four times the last cache, whichever is more, 1 GiB at most."""
    return min(max(512 << 20, 4 * last_cache()), 1 << 30) // (1 << 20) * (1 << 20)


@cache
def _buffers() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    x = aligned((_TASKS, read_bytes() // 4 // _TASKS), np.int32)
    x[:] = 1
    return x, aligned((_TASKS, _LANES), np.int32)


class Limits:
    """The limits of one target on some threads. `sample` takes a fresh look; `kinds` names what there is."""

    def __init__(self, target: Target, threads: int) -> None:
        self.target, self.threads = target, threads
        wide = 16 if target.has("avx512f") else 8
        words = read_bytes() // 4 // _TASKS
        self._work: dict[str, tuple[float, Callable[[], Any]]] = {}
        self._add("read", float(read_bytes()), _read, (words, _LEAD), _buffers())
        ones = aligned(2, np.float32)
        ones[:] = 1.0, 0.0
        out = aligned((threads, _CHAINS, wide), np.float32)
        self._add("fma", 2.0 * threads * _CHAINS * wide * _TURNS, _fma, (threads, wide, _CHAINS), (ones, out))
        if target.has("avx512vnni"):
            a, b, sums = aligned(64, np.uint8), aligned(64, np.int8), aligned((threads, _CHAINS * 16), np.int32)
            a[:] = b[:] = 0
            self._add("vnni", 128.0 * threads * _CHAINS * _TURNS, _vnni, (threads, _CHAINS), (a, b, sums))
        if target.has("avx512bf16"):
            pairs, totals = aligned((2, 16), np.uint32), aligned((threads, _CHAINS * 16), np.float32)
            pairs[:] = 0
            self._add("bf16", 64.0 * threads * _CHAINS * _TURNS, _bf16, (threads, _CHAINS), (pairs, totals))
        if target.has("amx-bf16"):
            tile, tiles = aligned((16, 16), np.int32), aligned((threads, 16, 16), np.float32)
            tile[:] = 0
            flops = 2.0 * 16 * 16 * 32 * 4 * (_TURNS // 16) * threads
            self._add("amx", flops, _amx, (threads,), (tile, tiles))

    def _add(self, kind: str, work: float, make: Any, sizes: tuple[int, ...], arrays: Any) -> None:
        function = _compiled(make, *sizes, target=self.target)
        self._work[kind] = work, lambda: function(*arrays)

    @property
    def kinds(self) -> tuple[str, ...]:
        """``read``, ``fma`` and, where the target has them, ``vnni``, ``bf16`` and ``amx``."""
        return tuple(self._work)

    def sample(self, kinds: tuple[str, ...] | None = None, passes: int = PASSES) -> dict[str, list[float]]:
        """What each pass reached, per second: bytes (read), FLOP (fma, bf16, amx) or integer operations (vnni)."""
        use_threads(self.threads)
        return {
            kind: [work / seconds for seconds in _times(run, passes)]
            for kind, (work, run) in self._work.items()
            if kinds is None or kind in kinds
        }


def _times(run: Callable[[], Any], passes: int) -> list[float]:
    out = []
    for _ in range(passes):
        start = time.perf_counter()
        run()
        out.append(time.perf_counter() - start)
    return out


def launch_times(target: Target, threads: int, parallel: bool, count: int) -> list[float]:
    """Seconds of `count` calls of a kernel that does nothing: serial, or with one task on every thread."""
    tasks = threads if parallel else 1
    function = _compiled(_launch, tasks, target=target)
    y = aligned((tasks, 16), np.int32) if tasks > 1 else aligned(1, np.int32)
    use_threads(threads)
    function(y)
    return _times(lambda: function(y), count)
