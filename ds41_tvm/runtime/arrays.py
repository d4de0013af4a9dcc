"""Arrays of other libraries as NumPy arrays over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import InputError
from ds41_tvm.runtime.device import Device
from ds41_tvm.runtime.device_array import DeviceArray
from ds41_tvm.runtime.ffi import import_ffi

# Number formats that NumPy does not have are carried as their bits.
_BITS = {
    "bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e8m0fnu": np.uint8,
}  # fmt: skip
_CPU = 1  # DLPack's kDLCPU


class _Memory:
    """Memory of another library's tensor, described for NumPy, which keeps this object as long as its array."""

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(int(n) for n in tensor.shape),
            "strides": tuple(int(n) * dtype.itemsize for n in tensor.strides),
            "typestr": dtype.str,
        }


def as_array(value: Any, what: str) -> tuple[NDArray[Any], str]:
    """`value` as a NumPy array and the name of its dtype; nothing is copied where NumPy or DLPack can share memory.

    NumPy and ml_dtypes arrays, anything with ``__dlpack__`` on the CPU (torch tensors), or what ``np.asarray`` takes.
    bfloat16, float8_e4m3fn and float8_e8m0fnu come as their bits (uint16, uint8). Raises InputError naming `what`.
    """
    if isinstance(value, np.ndarray):
        array: NDArray[Any] = value
    elif hasattr(value, "__dlpack__"):
        return _from_dlpack(value, what)
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{what} is a {type(value).__name__} that NumPy cannot read ({error})") from error
    name = array.dtype.name
    # A dtype of swapped bytes has the same name.
    return (array.view(_BITS[name]) if name in _BITS and array.dtype.isnative else array), name


def _from_dlpack(value: Any, what: str) -> tuple[NDArray[Any], str]:
    try:
        tensor = import_ffi().from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InputError(
            f"{what} is a {type(value).__name__} that cannot be shared through DLPack ({error}); hand over a plain "
            f"array on the CPU, of a tensor with a gradient its .detach()"
        ) from error
    if tensor.device.dlpack_device_type() != _CPU:
        raise InputError(f"{what} lies on {tensor.device}; expected the CPU: copy it there first")
    name = str(tensor.dtype)
    try:
        dtype = np.dtype(_BITS.get(name, name))
    except TypeError:
        raise InputError(f"{what} has dtype {name}; expected bf16, float32 or bytes") from None
    if 0 in tensor.shape:  # may have no memory at all
        return np.zeros(tuple(int(n) for n in tensor.shape), dtype), name
    return np.asarray(_Memory(tensor, dtype)), name


def borrowed(value: Any, what: str, device: Device) -> DeviceArray | None:
    """`value` as an array of `device` over the same memory, None if it lies on the host.

    A `DeviceArray`, or anything with DLPack (torch, CuPy) on that device: contiguous; bf16 as its bits. Raises
    InputError if it lies on another device.
    """
    if isinstance(value, DeviceArray):
        if value.device.dlpack != getattr(device, "dlpack", (0, 0)):
            raise InputError(f"{what} lies on {value.device.name}; expected {device.name}")
        return value
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return None
    kind, number = value.__dlpack_device__()
    expected = getattr(device, "dlpack", (0, 0))
    if (int(kind), int(number)) != expected:
        if int(kind) == _CPU:
            return None
        raise InputError(
            f"{what} lies on a device of DLPack type {int(kind)}, number {int(number)}; expected {expected}, "
            f"{device.name}, or the CPU"
        )
    try:
        tensor = import_ffi().from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InputError(f"{what} cannot be shared through DLPack ({error})") from error
    name = str(tensor.dtype)
    dtype = np.dtype(_BITS.get(name, name))
    shape = tuple(int(n) for n in tensor.shape)
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    if tuple(int(n) for n in tensor.strides) != tuple(reversed(steps)) and 1 not in shape and 0 not in shape:
        raise InputError(f"{what} is not contiguous; expected rows one after the other: use .contiguous()")
    return DeviceArray(device, tensor, tensor.data_ptr(), shape, dtype)
