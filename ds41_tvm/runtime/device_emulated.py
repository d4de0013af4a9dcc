"""A device made of host memory, to prove that a runner is ready for a real one.

It behaves as badly as a device may: memory is out of reach, arrives full of NaN patterns and is overwritten when it is
handed back; work is queued and runs only when somebody waits; page-locked buffers are read as late as possible.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.packing import aligned
from ds41_tvm.runtime.device import Functions
from ds41_tvm.runtime.device_array import DeviceArray
from ds41_tvm.runtime.device_base import Accelerator

Work = Callable[[], None]


class Emulated(Accelerator):
    """`parallel`: tasks that are said to fill it. Kernels are functions over NumPy arrays."""

    name = "an emulated device"
    dlpack = (1, 0)  # the CPU, for other libraries: what a real device hands over stays there, too

    def __init__(self, parallel: int = 8) -> None:
        super().__init__()
        self.parallel = parallel
        self.queue: list[Work] = []
        self.done = 0  # works that ran
        self.streams: set[int] = set()  # that were used
        self.synchronized = 0  # times that the host waited
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._recorded: list[Work] | None = None
        self._frozen = False

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it, memory must not be taken from the system and the host must not wait: as in a warm decode step."""
        self._frozen = True
        try:
            yield
        finally:
            self._frozen = False

    def bind(self, functions: Functions) -> Functions:
        return {name: self._kernel(function) for name, function in functions.items()}

    def _kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: DeviceArray) -> None:
            for array in arguments:
                if not self.fits(array):
                    raise AssertionError(f"a kernel got {array!r} at {array.address:#x}")
                if not array.nbytes:  # a GPU refuses launches of 0 blocks
                    raise AssertionError(f"a kernel got {array!r}; expected no call where there is nothing to do")
            memory = [hidden(array) for array in arguments]  # the queue keeps no array alive, as none does on a GPU
            self._give(lambda: function(*memory))

        return call

    def _give(self, work: Work) -> None:
        self.streams.add(self.stream)
        (self.queue if self._recorded is None else self._recorded).append(work)

    # ---- primitives

    def synchronize(self) -> None:
        if self._frozen:
            raise AssertionError("the host waited for the device")
        self.synchronized += 1
        work, self.queue = self.queue, []
        for item in work:
            item()
        self.done += len(work)

    def launch(self, graph: list[Work]) -> None:
        for work in graph:
            self._give(work)

    def give_back(self, address: int, size: int) -> None:
        super().give_back(address, size)
        memory = self._memory[address]
        self.queue.append(lambda: memory.fill(0xFF))  # also where a graph still uses it

    def _allocate(self, size: int) -> int:
        if self._frozen:
            raise AssertionError(f"{size} bytes of device memory were taken")
        memory = aligned(size, np.uint8)
        memory[:] = 0xFF
        self._memory[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def _host_buffer(self, size: int) -> NDArray[np.uint8]:
        if self._frozen:
            raise AssertionError(f"{size} bytes of page-locked memory were taken")
        return np.empty(size, np.uint8)

    def _write(self, address: int, data: NDArray[np.uint8]) -> None:
        self._write_later(address, data.copy())

    def _write_later(self, address: int, data: NDArray[np.uint8]) -> None:
        self._refuse("values were written")
        self._give(lambda: _ignore(ctypes.memmove(address, data.ctypes.data, data.nbytes)))

    def _read(self, out: NDArray[np.uint8], address: int) -> None:
        self.synchronize()
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def _copy(self, target: DeviceArray, source: DeviceArray) -> None:
        to, of = hidden(target), hidden(source)
        self._give(lambda: np.copyto(to, of))

    def _fill(self, array: DeviceArray, byte: int) -> None:
        address, size = array.address, array.nbytes
        self._give(lambda: _ignore(ctypes.memset(address, byte, size)))

    def _mark(self) -> int:
        return self.done + len(self.queue)

    def _wait(self, mark: int) -> None:
        if self.done < mark:
            self.synchronize()

    def join(self, stream: Any) -> None:
        self.synchronize()  # who takes the array reads host memory at once

    def _begin_capture(self) -> None:
        self._recorded = []

    def _end_capture(self) -> list[Work]:
        recorded, self._recorded = self._recorded or [], None
        return recorded


def hidden(array: DeviceArray) -> NDArray[Any]:
    """The memory behind an array."""
    size = array.nbytes
    memory = (ctypes.c_uint8 * max(size, 1)).from_address(array.address if size else ctypes.addressof(_NOTHING))
    out: NDArray[Any] = (
        np.frombuffer(memoryview(memory), dtype=np.uint8, count=size).view(array.dtype).reshape(array.shape)
    )
    return out


def _ignore(_: object) -> None:
    """Turns a call into work."""


_NOTHING = (ctypes.c_uint8 * 64)()
