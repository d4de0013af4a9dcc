"""What devices with memory of their own share: blocks that are kept and reused, packed uploads, graphs.

Work is given to a stream and runs later, in order. Memory that is handed back is given out again to work that comes
after it in the stream, so nothing ever waits for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import CaptureError, HostAccess
from ds41_tvm.packing import ALIGNMENT
from ds41_tvm.runtime.device import Functions, Shape
from ds41_tvm.runtime.device_array import DeviceArray

PAGE = 256  # alignment and least size of a block
STAGES = 4  # uploads that may be under way before the host waits for the oldest


class Block:
    """Memory of a device, handed back when nobody refers to it any more."""

    __slots__ = ("address", "device", "size")

    def __init__(self, device: Accelerator, address: int, size: int) -> None:
        self.device, self.address, self.size = device, address, size

    def __del__(self) -> None:
        self.device.give_back(self.address, self.size)


class Accelerator:
    """Base of devices; subclasses bring the primitives at the end."""

    name, on_host, score_bytes, parallel = "a device", False, 256 << 20, 1
    dlpack = (0, 0)

    def __init__(self) -> None:
        self.stream = 0
        self.capturing = False
        self.allocated = 0  # bytes taken from the system, kept until the process ends
        self._free: dict[int, list[int]] = {}
        self._stages: list[tuple[NDArray[np.uint8], Any]] = []
        self._next = 0

    # ---- memory

    def empty(self, shape: Shape, dtype: Any) -> DeviceArray:
        kind = np.dtype(dtype)
        size = block_size(math.prod(shape) * kind.itemsize)
        free = self._free.get(size)
        if free:
            address = free.pop()
        else:
            self._refuse("device memory was asked for")
            address = self._allocate(size)
            self.allocated += size
        return DeviceArray(self, Block(self, address, size), address, tuple(shape), kind)

    def give_back(self, address: int, size: int) -> None:
        """Take a block back; the one handed back last is given out first, so that steady loops see steady addresses."""
        self._free.setdefault(size, []).append(address)

    def zeros(self, shape: Shape, dtype: Any) -> DeviceArray:
        out = self.empty(shape, dtype)
        self.fill(out, 0)
        return out

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        out = self.empty(array.shape, array.dtype)
        self._write(out.address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return out

    def download(self, array: DeviceArray) -> NDArray[Any]:
        self._refuse("values were fetched")
        out = np.empty(array.shape, array.dtype)
        if out.nbytes:
            self._read(out.reshape(-1).view(np.uint8), array.address)
        return out

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"copy of {source!r} to {target!r}: expected equal shapes and dtypes")
        if target.nbytes:
            self._copy(target, source)

    def fill(self, array: DeviceArray, byte: int) -> None:
        if array.nbytes:
            self._fill(array, byte)

    def gather(self, array: DeviceArray, rows: NDArray[np.int64]) -> NDArray[Any]:
        if not len(rows):
            return np.empty((0, *array.shape[1:]), array.dtype)
        first = int(rows.min())
        taken: NDArray[Any] = self.download(array[first : int(rows.max()) + 1])[rows - first]
        return taken

    def scatter(self, array: DeviceArray, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        if len(rows):
            part = array[int(rows.min()) : int(rows.max()) + 1]
            content = self.download(part)
            content[rows - rows.min()] = values
            self._write(part.address, content.reshape(-1).view(np.uint8))

    def place(
        self,
        arrays: Mapping[str, NDArray[Any]],
        scratch: Mapping[str, tuple[Shape, Any]],
        into: Mapping[str, DeviceArray] | None = None,
    ) -> dict[str, DeviceArray]:
        """All in one block: what is uploaded first, through a page-locked buffer of the host, in one copy."""
        specs = {name: (a.shape, a.dtype) for name, a in arrays.items()} | {
            name: (shape, np.dtype(dtype)) for name, (shape, dtype) in scratch.items()
        }
        offsets, end, uploaded = {}, 0, 0
        for name, (shape, dtype) in specs.items():
            offsets[name] = end
            used = end + math.prod(shape) * dtype.itemsize
            end = -(-used // PAGE) * PAGE
            if name in arrays:
                uploaded = used
        block = self.empty((max(end, 1),), np.uint8) if into is None else next(iter(into.values()))
        if uploaded:
            stage = self._stage(uploaded)
            for name, array in arrays.items():
                stage[offsets[name] : offsets[name] + array.nbytes] = (
                    np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                )
            self._send(block.address, stage[:uploaded])
        return {
            name: DeviceArray(self, block.owner, block.address + offsets[name], tuple(shape), dtype)
            for name, (shape, dtype) in specs.items()
        }

    def _stage(self, size: int) -> NDArray[np.uint8]:
        """A page-locked host buffer whose earlier upload is done; `_send` must follow."""
        self._refuse("a step was planned")
        if len(self._stages) < STAGES:
            self._next = len(self._stages)
            self._stages.append((self._host_buffer(block_size(size)), None))
        else:
            self._next = (self._next + 1) % STAGES
        buffer, done = self._stages[self._next]
        if done is not None:
            self._wait(done)
        if len(buffer) < size:
            buffer = self._host_buffer(block_size(size))
        self._stages[self._next] = buffer, None
        return buffer

    def _send(self, address: int, stage: NDArray[np.uint8]) -> None:
        self._write_later(address, stage)
        self._stages[self._next] = self._stages[self._next][0], self._mark()

    def fits(self, array: Any) -> bool:
        return bool(array.address % ALIGNMENT == 0)

    def leap(self, count: int) -> int:
        """The next power of two from 256 on: shapes, and with them graphs, stay the same while a context grows."""
        return max(256, 1 << (count - 1).bit_length())

    def bind(self, functions: Functions) -> Functions:
        return functions

    # ---- order

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before = self.stream
        self._enter(before if stream is None else stream_handle(stream))
        try:
            yield
        finally:
            self._leave(before)

    def _refuse(self, what: str) -> None:
        if self.capturing:
            raise CaptureError(
                f"{what} while a graph was captured; run a step of the same shape once before capturing, and plan the "
                f"step before the capture begins"
            )

    def join(self, stream: Any) -> None:
        """Let `stream`, of another library, wait for the work given so far."""

    # ---- graphs

    def capture(self) -> contextlib.AbstractContextManager[list[Any]]:
        """Record the work given within; the list then holds one graph. Nothing runs."""
        return self._capture()

    @contextlib.contextmanager
    def _capture(self) -> Iterator[list[Any]]:
        made: list[Any] = []
        self.synchronize()
        self._begin_capture()
        self.capturing = True
        try:
            yield made
        finally:
            self.capturing = False
            graph = self._end_capture()
        made.append(graph)

    # ---- primitives

    def synchronize(self) -> None:
        """Wait for all work."""
        raise NotImplementedError

    def launch(self, graph: Any) -> None:
        """Give a captured graph to the stream."""
        raise NotImplementedError

    def _allocate(self, size: int) -> int:
        raise NotImplementedError

    def _host_buffer(self, size: int) -> NDArray[np.uint8]:
        raise NotImplementedError

    def _write(self, address: int, data: NDArray[np.uint8]) -> None:
        """`data` may change when this returns."""
        raise NotImplementedError

    def _write_later(self, address: int, data: NDArray[np.uint8]) -> None:
        """`data`, of `_host_buffer`, stays as it is until a mark made after this is reached."""
        raise NotImplementedError

    def _read(self, out: NDArray[np.uint8], address: int) -> None:
        raise NotImplementedError

    def _copy(self, target: DeviceArray, source: DeviceArray) -> None:
        raise NotImplementedError

    def _fill(self, array: DeviceArray, byte: int) -> None:
        raise NotImplementedError

    def _mark(self) -> Any:
        raise NotImplementedError

    def _wait(self, mark: Any) -> None:
        raise NotImplementedError

    def _enter(self, stream: int) -> None:
        self.stream = stream

    def _leave(self, stream: int) -> None:
        self.stream = stream

    def _begin_capture(self) -> None:
        raise NotImplementedError

    def _end_capture(self) -> Any:
        raise NotImplementedError


def block_size(size: int) -> int:
    """Sizes that blocks have: powers of two up to 1 MiB, then multiples of an eighth of the next power of two."""
    size = max(size, PAGE)
    step = max(PAGE, 1 << (size - 1).bit_length()) if size <= 1 << 20 else (1 << (size - 1).bit_length()) >> 3
    return -(-size // step) * step


def stream_handle(stream: Any) -> int:
    """The handle of a stream: a number, or what torch, CuPy and others call one. Raises HostAccess otherwise."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("cuda_stream", "ptr"):
        if isinstance(handle := getattr(stream, name, None), int):
            return handle
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise HostAccess(
        f"stream is {stream!r}; expected a handle as an integer, a torch or CuPy stream, or an object with "
        f"__cuda_stream__"
    )
