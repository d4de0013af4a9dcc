"""An array in a device's memory: an address with a shape and a dtype, which kernels take and NumPy does not."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from ds41_tvm.errors import HostAccess

_CODES = {"i": 0, "u": 1, "f": 2}  # DLPack's kDLInt, kDLUInt, kDLFloat


class DLTensor(ctypes.Structure):
    """DLPack's description of an array."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DeviceArray:
    """C-contiguous. Slices of the first axis, `reshape` and `view` share the memory; values cannot be read: HostAccess.

    Kernels get it by ``__tvm_ffi_opaque_ptr__``, the address of a DLTensor; other libraries through DLPack or
    ``__cuda_array_interface__`` (bf16 as its bits, uint16). The memory lives as long as an array of it does.
    """

    __slots__ = ("_tensor", "address", "device", "dtype", "owner", "shape")

    def __init__(self, device: Any, owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device, self.owner, self.address, self.shape, self.dtype = device, owner, address, shape, dtype
        self._tensor: tuple[DLTensor, Any] | None = None

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype} {list(self.shape)} on {self.device.name}>"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, part: slice) -> DeviceArray:
        if not isinstance(part, slice):
            raise HostAccess(f"{self!r}: index {part!r}; expected a slice of rows: a value would have to be fetched")
        first, last, step = part.indices(self.shape[0])
        if step != 1:
            raise HostAccess(f"{self!r}: slice of step {step}; expected neighbouring rows")
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(0, last - first), *self.shape[1:])
        return DeviceArray(self.device, self.owner, self.address + first * row, shape, self.dtype)

    def reshape(self, *shape: int) -> DeviceArray:
        """The same values in another shape; one size may be -1."""
        count = math.prod(self.shape)
        if -1 in shape:
            rest = -math.prod(shape)
            shape = tuple((count // rest if rest else 0) if n == -1 else n for n in shape)
        if math.prod(shape) != count:
            raise ValueError(f"{self!r} has {count} values; expected as many as {list(shape)} has")
        return DeviceArray(self.device, self.owner, self.address, tuple(shape), self.dtype)

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as another dtype; the last axis changes its size."""
        new = np.dtype(dtype)
        *rest, last = self.shape
        shape = (*rest, last * self.dtype.itemsize // new.itemsize)
        return DeviceArray(self.device, self.owner, self.address, shape, new)

    # ---- for kernels and other libraries

    def __tvm_ffi_opaque_ptr__(self) -> int:
        if self._tensor is None:
            sizes = (ctypes.c_int64 * len(self.shape))(*self.shape)
            self._tensor = self._describe(sizes), sizes
        return ctypes.addressof(self._tensor[0])

    def _describe(self, sizes: Any, strides: Any = None) -> DLTensor:
        kind, number = self.device.dlpack
        code, bits = _CODES[self.dtype.kind], self.dtype.itemsize * 8
        return DLTensor(self.address, kind, number, len(self.shape), code, bits, 1, sizes, strides, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.device.dlpack
        return device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """A capsule of the array as it is in the order of the device's own stream; `stream` waits for that."""
        self.device.join(stream)
        return _export(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.dlpack[0] != 2:
            raise AttributeError("__cuda_array_interface__ of an array that is not on a CUDA device")
        return {
            "version": 3, "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False),
            "strides": None, "stream": self.device.stream or 1,
        }  # fmt: skip

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise HostAccess(f"{self!r} was used as a NumPy array; expected a copy of it: numpy.from_dlpack cannot, but "
                         f"runner.device.download(array) fetches it")  # fmt: skip

    def __iter__(self) -> Any:
        raise HostAccess(f"{self!r} cannot be iterated over; its values are not on the host")


# ---- DLPack capsules


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_exported: dict[int, tuple[Any, ...]] = {}  # what a consumer of a capsule still uses


def _forget(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _drop(capsule: int) -> None:
    """Destructor of a capsule: frees what nobody consumed."""
    if ctypes.pythonapi.PyCapsule_IsValid(ctypes.c_void_p(capsule), b"dltensor"):
        _exported.pop(_pointer(ctypes.c_void_p(capsule), b"dltensor"), None)


_delete = _Deleter(_forget)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _export(array: DeviceArray) -> Any:
    sizes = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    steps, total = [1] * array.ndim, 1
    for axis in range(array.ndim - 1, -1, -1):
        steps[axis], total = total, total * array.shape[axis]
    strides = (ctypes.c_int64 * max(1, array.ndim))(*steps)
    managed = _Managed(array._describe(sizes, strides), None, _delete)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, sizes, strides, array)
    return _new(address, b"dltensor", ctypes.cast(_destructor, ctypes.c_void_p))
