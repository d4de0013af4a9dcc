"""Kernels of target ``opencl`` as functions of NumPy arrays, run by PyOpenCL on a processor (PoCL)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm.target import Target as TvmTarget
from tvm.tirx.build import codegen_build, split_host_device_mods

from ds41_tvm.errors import CompileError
from ds41_tvm.program import Kernel
from ds41_tvm.proof.host import python_host
from ds41_tvm.proof.pocl import name_processor
from ds41_tvm.schedule import schedule

Function = Callable[..., Any]
# Products are rounded where the program rounds them, as nvcc is told to (see `schedule.cuda.common`).
_HEAD = "#pragma OPENCL FP_CONTRACT OFF\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n#define fmaf fma\n"
_HEAD += "#define atomicAdd(at, by) atomic_add((volatile __local int*)(at), by)\n"
# Not optimised: programs with many barriers take PoCL ten times as long to compile as they run in a test.
_OPTIONS = ["-cl-fp32-correctly-rounded-divide-sqrt", "-cl-opt-disable"]
_GROUP = 8  # kernels of one OpenCL program
_TAGS = [f"blockIdx.{axis}" for axis in "xyz"], [f"threadIdx.{axis}" for axis in "xyz"]

_built: dict[Kernel, Function] = {}


def opencl_functions(
    kernels: Iterable[Kernel], progress: Callable[[int, int], None] | None = None
) -> dict[str, Function]:
    """The kernels by name, each called with C-contiguous, 64-byte aligned arrays, which it reads and writes in place.

    Built once in a process. Raises CompileError where PyOpenCL or an OpenCL implementation for processors is missing,
    or refuses a program.
    """
    needed = tuple(kernels)
    missing = [k for k in needed if k not in _built]
    for start in range(0, len(missing), _GROUP):
        group = missing[start : start + _GROUP]
        _built.update(zip(group, _build({k.name: schedule(k, "opencl")[1] for k in group}), strict=True))
        if progress is not None:
            progress(len(needed) - len(missing) + start + len(group), len(needed))
    return {k.name: _built[k] for k in needed}


def opencl_function(func: tvm.tirx.PrimFunc) -> Function:
    """One scheduled program as such a function."""
    return _build({"main": func})[0]


def sources(functions: dict[str, tvm.tirx.PrimFunc]) -> tuple[list[tvm.tirx.PrimFunc], str]:
    """The host functions in the given order, and the OpenCL text of all kernels."""
    target = TvmTarget({"kind": "opencl", "max_num_threads": 1024}, host={"kind": "llvm"})
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    module = tvm.tirx.transform.BindTarget(target)(tvm.IRModule(named))
    pipeline, _, finalize = tvm.tirx.get_default_tir_pipeline(target)
    # Unrolled loops stay loops: a processor gains nothing from them and the text is compiled in a fraction of the time.
    with tvm.transform.PassContext(config={"tirx.UnrollLoop": {"explicit_unroll": False}}):
        host, device = split_host_device_mods(pipeline(module))
    text = "".join(codegen_build(finalize()(part), kind).inspect_source() for kind, part in device.items())
    hosts = {str(func.attrs["global_symbol"]).removeprefix("__tvm_ffi_"): func for func in host.functions.values()}
    return [hosts[name] for name in functions], _HEAD + text


def _build(functions: dict[str, tvm.tirx.PrimFunc]) -> list[Function]:
    names = ", ".join(functions)
    try:
        hosts, text = sources(functions)
    except Exception as error:
        raise CompileError(f"TVM {tvm.__version__} could not compile one of {names} for opencl: {error}") from error
    device = open_device()
    try:
        program = device.cl.Program(device.context, text).build(options=_OPTIONS)
    except device.cl.Error as error:
        raise CompileError(f"OpenCL could not compile one of {names}: {str(error)[:2000]}") from error
    kernels = {kernel.function_name: kernel for kernel in program.all_kernels()}

    def launch(name: str, arguments: tuple[Any, ...], tags: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        device.launch(kernels[name], arguments, dict(zip(tags, sizes, strict=True)))

    return [_checked(python_host(host, launch)) for host in hosts]


def _checked(function: Function) -> Function:
    def call(*arrays: NDArray[Any]) -> None:
        for i, array in enumerate(arrays):
            if not array.flags.c_contiguous or (array.size and array.ctypes.data % 64):
                raise ValueError(f"argument {i} is not C-contiguous and 64-byte aligned, as kernels assume")
        function(*arrays)

    return call


class Device:
    """A processor as an OpenCL device: buffers are the arrays' own memory."""

    def __init__(self) -> None:
        try:
            import pyopencl
        except ImportError as error:
            raise CompileError(
                f"PyOpenCL cannot be imported ({error}); target opencl needs it: pip install 'pyopencl[pocl]'"
            ) from error
        self.cl = pyopencl
        cpu = pyopencl.device_type.CPU
        try:
            found = [d for platform in pyopencl.get_platforms() for d in platform.get_devices(cpu)]
        except pyopencl.Error:
            found = []
        if not found:
            raise CompileError("no OpenCL device of type CPU; target opencl needs one: pip install 'pyopencl[pocl]'")
        name_processor(found[0])
        self.context = pyopencl.Context(found[:1])
        self.queue = pyopencl.CommandQueue(self.context)
        self._nothing = np.zeros(64, np.uint8)

    def launch(self, kernel: Any, arguments: tuple[Any, ...], sizes: dict[str, int]) -> None:
        """Run one kernel to its end; nothing if the grid is empty."""
        blocks, threads = ([sizes.pop(tag, 1) for tag in tags] for tags in _TAGS)
        if sizes:
            raise CompileError(f"{kernel.function_name} needs {', '.join(sizes)}, which OpenCL does not have")
        if 0 in blocks:
            return
        # Kept until the end: setting an argument does not hold its buffer.
        values = [self._buffer(value) if isinstance(value, np.ndarray) else value for value in arguments]
        for i, value in enumerate(values):
            kernel.set_arg(i, value)
        total = [b * t for b, t in zip(blocks, threads, strict=True)]
        self.cl.enqueue_nd_range_kernel(self.queue, kernel, total, threads)
        self.queue.finish()

    def _buffer(self, array: NDArray[Any]) -> Any:
        flags = self.cl.mem_flags
        access = flags.READ_WRITE if array.flags.writeable else flags.READ_ONLY
        memory = array.reshape(-1) if array.size else self._nothing
        return self.cl.Buffer(self.context, access | flags.USE_HOST_PTR, hostbuf=memory)


@functools.cache
def open_device() -> Device:
    """The first processor that OpenCL knows. Raises CompileError if there is none."""
    return Device()
