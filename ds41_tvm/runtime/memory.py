"""Memory that grows with use: per-sequence rings in slots, cache rows in blocks, scratch buffers by name."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.runtime.device import Array, Device, Host


class RowPool:
    """Rows of several arrays in units of `unit` rows; a unit number is valid in every array.

    Units are handed out lowest first and are zero when they are; unit 0 is never handed out and stays zero.
    """

    def __init__(self, unit: int, rows: dict[Any, tuple[tuple[int, ...], Any]], device: Device | None = None) -> None:
        self.unit, self.device = unit, device or Host()
        self._kinds = rows
        self._units = 1
        self._fresh = 1  # units from here on were never handed out
        self._free: list[int] = []
        self.changes = 0  # times that the arrays moved
        self.arrays: dict[Any, Array] = {
            key: self.device.zeros((unit, *shape), dtype) for key, (shape, dtype) in rows.items()
        }

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
                self.device.fill(array[unit * self.unit : (unit + 1) * self.unit], 0)
            return unit
        if self._fresh == self._units:
            self._grow()
        self._fresh += 1
        return self._fresh - 1

    def give(self, unit: int) -> None:
        """Hand a unit back."""
        heapq.heappush(self._free, unit)

    def read(self, key: Any, rows: NDArray[np.int64]) -> NDArray[Any]:
        """A host copy of some rows of an array."""
        return self.device.gather(self.arrays[key], rows)

    def write(self, key: Any, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write host rows into some rows of an array."""
        self.device.scatter(self.arrays[key], rows, values)

    def _grow(self) -> None:
        # Doubling copies every row once on average; pages beyond the used rows stay untouched and cost nothing.
        units = max(4, 2 * self._units)
        for key, (shape, dtype) in self._kinds.items():
            larger = self.device.zeros((units * self.unit, *shape), dtype)
            used = slice(0, self._fresh * self.unit)
            self.device.copy(larger[used], self.arrays[key][used])
            self.arrays[key] = larger
        self._units = units
        self.changes += 1


VIEWS = 256  # views of scratch buffers that are kept


class Workspace:
    """Scratch buffers by name, kept and grown from call to call. What a buffer holds on arrival is arbitrary."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or Host()
        self._buffers: dict[str, Array] = {}
        self._views: dict[Any, Array] = {}  # what was handed out: steady loops ask for the same over and over
        self.changes = 0  # times that a buffer came or grew: addresses hold until the next one

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An aligned C-contiguous view of the named buffer; the last view of the same name shares its bytes."""
        key = name, shape, dtype
        view = self._views.get(key)
        if view is not None:
            return view
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < size:
            buffer = self._buffers[name] = self._device.empty((size,), np.uint8)
            self.changes += 1
            self._views.clear()
        elif len(self._views) >= VIEWS:
            self._views.clear()
        view = self._views[key] = buffer[:size].view(dtype).reshape(*shape)
        return view

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def fill(self, byte: int) -> None:
        """Overwrite every buffer: tests use it to show that nothing is read before it is written."""
        for buffer in self._buffers.values():
            self._device.fill(buffer, byte)
