"""Kernels under a stop watch: what each call of a layer costs, and single kernels on the arguments of a layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds41_tvm.program import Kernel


@dataclass
class Call:
    """One call: kernel, layer, shape of its first argument, seconds of every time it was run."""

    kernel: Kernel
    layer: int
    shape: tuple[int, ...]
    seconds: list[float]


@dataclass
class Watch:
    """Wraps the functions of a runner. Set `layer` before each `Runner.forward`.

    Operators in `again` are run `times` + 1 times in place, on the very arguments of the layer, whose buffers are valid
    at that moment only; kernels overwrite all they write, so the layer's result stays the same. The first of these runs
    is not counted.
    """

    again: Collection[str] = ()
    times: int = 1
    layer: int = -1
    calls: list[Call] = field(default_factory=list)

    def wrap(self, functions: Mapping[str, Callable[..., Any]], kernels: Iterable[Kernel]) -> dict[str, Any]:
        """The functions by name, each noting its calls here."""
        return {kernel.name: self._watched(functions[kernel.name], kernel) for kernel in kernels}

    def _watched(self, function: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
        clock = time.perf_counter

        def call(*args: Any) -> None:
            repeated = kernel.op in self.again
            if repeated:
                function(*args)
            seconds = []
            for _ in range(self.times if repeated else 1):
                start = clock()
                function(*args)
                seconds.append(clock() - start)
            self.calls.append(Call(kernel, self.layer, tuple(args[0].shape), seconds))

        return call
