"""How long work takes on a device: by its own events and as a graph, so that the host's time to ask is not in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from ds41_tvm.runtime.device import Device
from ds41_tvm.runtime.device_base import Accelerator
from ds41_tvm.runtime.device_cuda import CudaDevice

Measure = Callable[[Callable[[], Any], int], float]  # seconds of so many runs


def seconds(device: Device, work: Callable[[], Any], least: float = 0.02, rounds: int = 3) -> float:
    """Median time of `work` once, over `rounds` measurements of at least `least` seconds.

    On a GPU it is captured first, as `StepGraph` does, and must take memory no more.
    """
    work()
    if not isinstance(device, Accelerator):
        return _repeated(work, lambda run, times: _wall(lambda: _all(run, times)), least, rounds)
    with device.capture() as made:
        work()
    graph = made[0]

    def measure(run: Callable[[], Any], times: int) -> float:
        if not isinstance(device, CudaDevice):  # an emulated one
            return _wall(lambda: _all(run, times, device.synchronize))
        begin = device.timestamp()
        for _ in range(times):
            run()
        return device.seconds(begin, device.timestamp())

    return _repeated(lambda: device.launch(graph), measure, least, rounds)


def _repeated(
    run: Callable[[], Any], measure: Callable[[Callable[[], Any], int], float], least: float, rounds: int
) -> float:
    measure(run, 1)
    times = max(1, min(1000, int(least / max(measure(run, 1), 1e-6))))
    return median(measure(run, times) / times for _ in range(rounds))


def _all(run: Callable[[], Any], times: int, end: Callable[[], Any] = lambda: None) -> None:
    for _ in range(times):
        run()
    end()


def _wall(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
