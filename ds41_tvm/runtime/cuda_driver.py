"""NVIDIA's driver by its C functions: all that a device needs, with every status checked."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ds41_tvm.errors import DeviceError, NoDriver

LIBRARY = "libcuda.so.1"
# cuDeviceGetAttribute
MULTIPROCESSORS, MAJOR, MINOR, CLOCK_KHZ, BUS_BITS, MEMORY_KHZ = 16, 75, 76, 13, 37, 36
_NO_DEVICE = 100
_NON_BLOCKING, _CAPTURE_THREAD_LOCAL = 1, 1

_HANDLE, _ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_OUT = ctypes.c_void_p  # passed by reference
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, _INT),
    "cuDeviceGetName": (ctypes.c_char_p, _INT, _INT),
    "cuDeviceGetAttribute": (_OUT, _INT, _INT),
    "cuDeviceTotalMem_v2": (_OUT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT, _INT),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_OUT, _SIZE),
    "cuMemHostAlloc": (_OUT, _SIZE, ctypes.c_uint),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _HANDLE, _SIZE, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (_HANDLE, _ADDRESS, _SIZE, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _SIZE, _HANDLE),
    "cuStreamCreate": (_OUT, ctypes.c_uint),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cuStreamBeginCapture_v2": (_HANDLE, _INT),
    "cuStreamEndCapture": (_HANDLE, _OUT),
    "cuGraphInstantiateWithFlags": (_OUT, _HANDLE, ctypes.c_ulonglong),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuEventCreate": (_OUT, ctypes.c_uint),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (_OUT, _HANDLE, _HANDLE),
}
_TEXT = ctypes.c_char_p


class Driver:
    """The functions, as methods that return what the C function hands out. Raises NoDriver where there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY, ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise NoDriver(
                f"{LIBRARY} cannot be loaded ({error}): this machine has no NVIDIA driver; expected one, with a GPU: "
                f"install the driver, or compile the artefact for 'cpu'"
            ) from None
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, _INT
        status = self._library.cuInit(0)
        if status:
            raise NoDriver(
                f"the NVIDIA driver is installed but does not start: cuInit gives {self._error(status)}; expected a "
                f"GPU that this process may use (see nvidia-smi, and CUDA_VISIBLE_DEVICES), or compile for 'cpu'"
            )
        if not self.number("cuDeviceGetCount"):
            raise NoDriver("the NVIDIA driver sees no GPU; expected one (see CUDA_VISIBLE_DEVICES)")

    def _error(self, status: int) -> str:
        text = _TEXT()
        self._library.cuGetErrorName(_INT(status), ctypes.byref(text))
        return f"{(text.value or b'error').decode()} ({status})"

    def do(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises DeviceError with its name and what the driver says."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DeviceError(
                f"{name} gave {self._error(status)}; expected success. An error of an earlier kernel can show up here: "
                f"run with CUDA_LAUNCH_BLOCKING=1 to see where"
            )

    def handle(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument receives a handle or an address."""
        out = ctypes.c_void_p()
        self.do(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument receives an int."""
        out = _INT()
        self.do(name, ctypes.byref(out), *arguments)
        return out.value

    def device_name(self, device: int) -> str:
        """As the driver calls it."""
        text = ctypes.create_string_buffer(100)
        self.do("cuDeviceGetName", text, 100, device)
        return text.value.decode()

    def total_memory(self, device: int) -> int:
        """Bytes."""
        out = _SIZE()
        self.do("cuDeviceTotalMem_v2", ctypes.byref(out), device)
        return out.value

    def elapsed(self, begin: int, end: int) -> float:
        """Seconds between two events that were reached."""
        out = ctypes.c_float()
        self.do("cuEventElapsedTime", ctypes.byref(out), begin, end)
        return out.value / 1e3

    def new_stream(self) -> int:
        """A stream that does not wait for the default one."""
        return self.handle("cuStreamCreate", _NON_BLOCKING)

    def begin_capture(self, stream: int) -> None:
        """Record what this thread gives to `stream`."""
        self.do("cuStreamBeginCapture_v2", stream, _CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """The recorded graph, ready to launch."""
        graph = ctypes.c_void_p()
        self.do("cuStreamEndCapture", stream, ctypes.byref(graph))
        made = self.handle("cuGraphInstantiateWithFlags", graph, 0)
        self.do("cuGraphDestroy", graph)
        return made


@functools.cache
def driver() -> Driver:
    """The driver, started once in a process."""
    return Driver()
