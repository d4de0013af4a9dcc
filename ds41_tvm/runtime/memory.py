"""Memory that grows with use: per-sequence rings in slots, cache rows in blocks, scratch buffers by name."""

from __future__ import annotations

import heapq
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.packing import aligned


def zero_pages(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zeroed, page-aligned array whose pages take memory only once they are written."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    out: NDArray[Any] = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size).view(dtype).reshape(shape)
    return out


class RowPool:
    """Rows of several arrays in units of `unit` rows; a unit number is valid in every array.

    Units are handed out lowest first and are zero when they are; unit 0 is never handed out and stays zero.
    """

    def __init__(self, unit: int, rows: dict[Any, tuple[tuple[int, ...], Any]]) -> None:
        self.unit = unit
        self._kinds = rows
        self._units = 1
        self._fresh = 1  # units from here on were never handed out
        self._free: list[int] = []
        self.arrays = {key: zero_pages((unit, *shape), dtype) for key, (shape, dtype) in rows.items()}

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit over all arrays."""
        return sum(self.unit * int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self._kinds.values())

    @property
    def used(self) -> int:
        """Units handed out now."""
        return self._fresh - 1 - len(self._free)

    def take(self) -> int:
        """A unit of zero rows."""
        if self._free:
            unit = heapq.heappop(self._free)
            for array in self.arrays.values():
                array[unit * self.unit : (unit + 1) * self.unit] = 0
            return unit
        if self._fresh == self._units:
            self._grow()
        self._fresh += 1
        return self._fresh - 1

    def give(self, unit: int) -> None:
        """Hand a unit back."""
        heapq.heappush(self._free, unit)

    def _grow(self) -> None:
        # Doubling copies every row once on average; pages beyond the used rows stay untouched and cost nothing.
        units = max(4, 2 * self._units)
        for key, (shape, dtype) in self._kinds.items():
            larger = zero_pages((units * self.unit, *shape), dtype)
            larger[: self._fresh * self.unit] = self.arrays[key][: self._fresh * self.unit]
            self.arrays[key] = larger
        self._units = units


class Workspace:
    """Scratch buffers by name, kept and grown from call to call. What a buffer holds on arrival is arbitrary."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An aligned C-contiguous view of the named buffer; the last view of the same name shares its bytes."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < size:
            buffer = self._buffers[name] = aligned(size, np.uint8)
        out: NDArray[Any] = buffer[:size].view(dtype).reshape(shape)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def fill(self, byte: int) -> None:
        """Overwrite every buffer: tests use it to show that nothing is read before it is written."""
        for buffer in self._buffers.values():
            buffer[:] = byte
