"""An NVIDIA GPU: memory, order and graphs through the driver, kernels through TVM's runtime, nothing of torch.

TVM launches on the stream that its environment holds for the device, in the device's primary context; torch and CuPy
use that context, too, so that pointers and streams mean the same to all.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import UnsupportedGpu, UsageError
from ds41_tvm.runtime import cuda_driver
from ds41_tvm.runtime.cuda_driver import driver
from ds41_tvm.runtime.device_array import DeviceArray
from ds41_tvm.runtime.device_base import Accelerator
from ds41_tvm.runtime.ffi import import_ffi, load_cuda_runtime

_CUDA = 2  # DLPack's kDLCUDA
_LEGACY, _NO_ORDER = 1, -1  # numbers for streams in DLPack


class CudaDevice(Accelerator):
    """GPU `number` of this process. Raises NoDriver, NoCudaRuntime, UsageError (there are not that many)."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self._driver = d = driver()
        count = d.number("cuDeviceGetCount")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise UsageError(
                f"GPU number {number!r}; expected an integer from 0 to {count - 1}, as the driver counts them"
            )
        self.number, self._device = number, d.number("cuDeviceGet", number)
        self.dlpack = (_CUDA, number)
        self.model = d.device_name(self._device)
        self.name = f"cuda:{number} ({self.model})"
        self.parallel = self.attribute(cuda_driver.MULTIPROCESSORS)
        self.capability = (self.attribute(cuda_driver.MAJOR), self.attribute(cuda_driver.MINOR))
        load_cuda_runtime()
        self._context = d.handle("cuDevicePrimaryCtxRetain", self._device)
        self._set_stream = ctypes.CDLL(import_ffi().libinfo.find_libtvm_ffi()).TVMFFIEnvSetStream
        self._current()
        self._event = d.handle("cuEventCreate", 2)  # without time
        self._side = d.new_stream()  # where graphs are captured: the default stream cannot be
        self._last = 0  # the stream that got work last
        self._outer: list[tuple[int, int | None]] = []
        self._marks: list[int] = []

    def attribute(self, which: int) -> int:
        """What the driver says of the GPU, see `cuda_driver`."""
        return self._driver.number("cuDeviceGetAttribute", which, self._device)

    @property
    def memory(self) -> int:
        """Bytes of the GPU's memory."""
        return self._driver.total_memory(self._device)

    def check_level(self, level: str, where: str) -> None:
        """Raises UnsupportedGpu unless machine code for `level`, such as sm_90, runs here."""
        major, minor = self.capability
        made, exact = level.removeprefix("sm_").rstrip("af"), level[-1] in "af"
        theirs = (int(made[:-1]), int(made[-1]))
        if theirs[0] != major or (theirs[1] != minor if exact else theirs[1] > minor):
            raise UnsupportedGpu(
                f"{where}: compiled for {level}; {self.name} is sm_{major}{minor}; compile it with --target "
                f"cuda:sm_{major}{minor}, or use a GPU of that kind"
            )

    # ---- order

    def _current(self) -> None:
        self._driver.do("cuCtxSetCurrent", self._context)

    def _work_stream(self) -> int:
        """The stream for what comes now, made to wait for what another one got before."""
        self._current()
        if self.stream != self._last:
            self._driver.do("cuEventRecord", self._event, self._last)
            self._driver.do("cuStreamWaitEvent", self.stream, self._event, 0)
            self._last = self.stream
        return self.stream

    def _swap_environment(self, stream: int | None) -> int | None:
        """Set the stream that TVM launches on; the one before."""
        before = ctypes.c_void_p()
        self._set_stream(_CUDA, self.number, ctypes.c_void_p(stream), ctypes.byref(before))
        return before.value

    def _enter(self, stream: int) -> None:
        self._outer.append((self.stream, self._swap_environment(stream)))
        self.stream = stream
        self._work_stream()

    def _leave(self, stream: int) -> None:
        self.stream, environment = self._outer.pop()
        self._swap_environment(environment)

    def join(self, stream: Any) -> None:
        if stream == _NO_ORDER:
            return
        other = 0 if stream in (None, _LEGACY) else int(stream)
        if other != self._last:
            self._current()
            self._driver.do("cuEventRecord", self._event, self._last)
            self._driver.do("cuStreamWaitEvent", other, self._event, 0)

    def synchronize(self) -> None:
        self._refuse("the host waited")
        self._driver.do("cuStreamSynchronize", self._work_stream())

    # ---- graphs

    def _begin_capture(self) -> None:
        self._outer.append((self.stream, self._swap_environment(self._side)))
        self.stream = self._last = self._side  # everything before is done: no order between streams is recorded
        self._driver.begin_capture(self._side)

    def _end_capture(self) -> int:
        try:
            return self._driver.end_capture(self._side)
        finally:
            self.stream, environment = self._outer.pop()
            self._last = self.stream
            self._swap_environment(environment)

    def launch(self, graph: int) -> None:
        self._driver.do("cuGraphLaunch", graph, self._work_stream())

    # ---- timing

    def timestamp(self) -> int:
        """An event in the stream, for `seconds`."""
        event = self._driver.handle("cuEventCreate", 0)
        self._driver.do("cuEventRecord", event, self._work_stream())
        return event

    def seconds(self, begin: int, end: int) -> float:
        """Between two timestamps; waits for the second."""
        self._driver.do("cuEventSynchronize", end)
        return self._driver.elapsed(begin, end)

    # ---- memory

    def _allocate(self, size: int) -> int:
        self._current()
        return self._driver.handle("cuMemAlloc_v2", size)

    def _host_buffer(self, size: int) -> NDArray[np.uint8]:
        self._current()
        address = self._driver.handle("cuMemHostAlloc", size, 0)
        return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), dtype=np.uint8)

    def _write(self, address: int, data: NDArray[np.uint8]) -> None:
        self._refuse("values were written")
        # The driver copies from pageable memory before it returns.
        self._driver.do("cuMemcpyHtoDAsync_v2", address, data.ctypes.data, data.nbytes, self._work_stream())

    def _write_later(self, address: int, data: NDArray[np.uint8]) -> None:
        self._refuse("values were written")
        self._driver.do("cuMemcpyHtoDAsync_v2", address, data.ctypes.data, data.nbytes, self._work_stream())

    def _read(self, out: NDArray[np.uint8], address: int) -> None:
        self._driver.do("cuMemcpyDtoHAsync_v2", out.ctypes.data, address, out.nbytes, self._work_stream())
        self._driver.do("cuStreamSynchronize", self.stream)

    def _copy(self, target: DeviceArray, source: DeviceArray) -> None:
        stream = self._work_stream()
        self._driver.do("cuMemcpyDtoDAsync_v2", target.address, source.address, target.nbytes, stream)

    def _fill(self, array: DeviceArray, byte: int) -> None:
        self._driver.do("cuMemsetD8Async", array.address, byte, array.nbytes, self._work_stream())

    def _mark(self) -> int:
        mark = self._marks.pop() if self._marks else self._driver.handle("cuEventCreate", 2)
        self._driver.do("cuEventRecord", mark, self.stream)
        return mark

    def _wait(self, mark: int) -> None:
        self._driver.do("cuEventSynchronize", mark)
        self._marks.append(mark)
