"""Where a runner keeps its arrays: the interface of a device, and the host as one, which is plain NumPy.

Arrays of a device support what the runner does with them: ``len``, ``shape``, ``dtype``, ``nbytes``, slices of rows,
``reshape``, ``view``. On the host they are NumPy arrays; elsewhere `DeviceArray`, whose values the host cannot read.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.packing import ALIGNMENT, address, aligned, aligned_copy

# NumPy array on the host, DeviceArray elsewhere.
Array = Any
Shape = tuple[int, ...]
Functions = Mapping[str, Callable[..., Any]]


class Device(Protocol):
    """What the runner needs of a device. Work on it may run later than the call that asks for it, in that order."""

    name: str
    on_host: bool
    stream: int  # handle that work is given to
    parallel: int  # independent tasks that fill it
    score_bytes: int  # index scores held at a time

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """An aligned array that holds anything."""

    def zeros(self, shape: Shape, dtype: Any) -> Array:
        """An aligned array of zeros."""

    def upload(self, array: NDArray[Any]) -> Array:
        """The values of a host array in an array of the device."""

    def download(self, array: Array) -> NDArray[Any]:
        """A host copy; waits for what was asked for before."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy between arrays of the device of equal shape."""

    def fill(self, array: Array, byte: int) -> None:
        """Set every byte."""

    def gather(self, array: Array, rows: NDArray[np.int64]) -> NDArray[Any]:
        """A host copy of some rows."""

    def scatter(self, array: Array, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write host rows into some rows."""

    def place(
        self,
        arrays: Mapping[str, NDArray[Any]],
        scratch: Mapping[str, tuple[Shape, Any]],
        into: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Host arrays as arrays of the device, in one copy, and new ones that hold anything beside them.

        `into`: what an earlier call for the same names, shapes and dtypes returned; its memory is used again.
        """

    def fits(self, array: Array) -> bool:
        """Whether kernels can take the array as it is: aligned, contiguous, writable."""

    def leap(self, count: int) -> int:
        """A size of at least `count` for an axis that kernels do not read beyond what they are told."""

    def bind(self, functions: Functions) -> Functions:
        """Kernels that take arrays of this device."""

    def using(self, stream: Any) -> AbstractContextManager[None]:
        """Within it, work is given to `stream`; None for the device's own."""


def zero_pages(shape: Shape, dtype: Any) -> NDArray[Any]:
    """A zeroed, page-aligned array whose pages take memory only once they are written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    out: NDArray[Any] = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size).view(dtype).reshape(shape)
    return out


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Host:
    """Memory of the process."""

    name, on_host, stream, score_bytes = "the host", True, 0, 32 << 20

    def __init__(self, threads: int = 1) -> None:
        self.parallel = threads

    empty = staticmethod(aligned)
    zeros = staticmethod(zero_pages)

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        target[...] = source

    def fill(self, array: NDArray[Any], byte: int) -> None:
        array.reshape(-1).view(np.uint8)[:] = byte

    def gather(self, array: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
        taken: NDArray[Any] = array[rows]
        return taken

    def scatter(self, array: NDArray[Any], rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        array[rows] = values

    def place(
        self,
        arrays: Mapping[str, NDArray[Any]],
        scratch: Mapping[str, tuple[Shape, Any]],
        into: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, NDArray[Any]]:
        placed = {name: aligned_copy(array) for name, array in arrays.items()}
        for name, (shape, dtype) in scratch.items():
            placed[name] = aligned(shape, dtype)
        return placed

    def fits(self, array: NDArray[Any]) -> bool:
        return array.flags.c_contiguous and array.flags.writeable and address(array) % ALIGNMENT == 0

    def leap(self, count: int) -> int:
        return count

    def bind(self, functions: Functions) -> Functions:
        return functions

    def using(self, stream: Any) -> AbstractContextManager[None]:
        return _NOTHING
