"""Kernels as object files, each with what made it: for libraries that outlive the process."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tvm

from ds41_tvm.artifact.manifest import Buffer, Entry
from ds41_tvm.artifact.occupancy import occupancy
from ds41_tvm.compiler.cuda import device_code, lower_cuda, module_table
from ds41_tvm.compiler.nvcc import find_nvcc
from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.cpu_features import available_threads
from ds41_tvm.errors import CompileError, TooLargeForGpu
from ds41_tvm.program import Kernel, Program
from ds41_tvm.schedule import fallback, schedule
from ds41_tvm.target import Target
from ds41_tvm.tune.apply import Tuned, untuned

# The device's code as data of the library, under the name that TVM's loader looks for.
_TABLE = """
.section .rodata
.globl __tvm_ffi__library_bin
.type __tvm_ffi__library_bin, @object
.balign 64
__tvm_ffi__library_bin:
.incbin "device.bin"
.size __tvm_ffi__library_bin, . - __tvm_ffi__library_bin
.section .note.GNU-stack, "", @progbits
"""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel: its manifest entry, its scheduled IR as text, its object file; for a GPU also TVM's table of the
    functions on the device and their machine code.
    """

    entry: Entry
    ir: str
    code: bytes
    device: tuple[bytes, bytes] | None = None


# As in `build`: what was compiled in this process is not compiled again.
_compiled: dict[tuple[Target, Kernel], CompiledKernel] = {}


def compile_kernels(
    program: Program, progress: Callable[[int, int], None] | None = None, tuned: Tuned | None = None
) -> list[CompiledKernel]:
    """The kernels of a program in the program's order, made as `tuned` says.

    Raises CompileError naming the kernel that TVM refuses.
    """
    tuned = tuned or untuned(program)
    needed = tuned.kernels
    target, ours = tvm_target(program.target), program.target
    missing = [kernel for kernel in needed if (ours, kernel) not in _compiled]
    have = len(needed) - len(missing)
    tell = progress or (lambda done, total: None)
    with (
        tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder,
        ThreadPoolExecutor(available_threads()) as pool,  # of processes of nvcc; TVM itself works in one thread
    ):
        if ours.kind == "cuda":
            find_nvcc()  # before anything else, if it is missing
            jobs = [start_cuda(kernel, ours, Path(folder), pool) for kernel in missing]
            for done, (kernel, job) in enumerate(zip(missing, jobs, strict=True)):
                tell(have + done, len(needed))
                _compiled[ours, kernel] = job()
        else:
            for done, kernel in enumerate(missing):
                tell(have + done, len(needed))
                _compiled[ours, kernel] = _compile(kernel, target, ours, Path(folder) / "kernel.o")
    tell(len(needed), len(needed))
    return [_with_record(_compiled[ours, kernel], tuned.record(kernel)) for kernel in needed]


def _with_record(kernel: CompiledKernel, record: str | None) -> CompiledKernel:
    return dataclasses.replace(kernel, entry=msgspec.structs.replace(kernel.entry, record=record))


def _compile(kernel: Kernel, target: Any, ours: Target, path: Path) -> CompiledKernel:
    with _named(kernel, ours):
        rule, func = schedule(kernel, ours.kind)
        func = func.with_attr("global_symbol", kernel.name)
        text = func.script()
        tvm.compile(tvm.IRModule({kernel.name: func}), target=target).mod.write_to_file(str(path), "o")
    return CompiledKernel(_entry(kernel, func, rule, ours, text), text, path.read_bytes())


def start_cuda(
    kernel: Kernel, ours: Target, folder: Path, pool: ThreadPoolExecutor, symbol: str | None = None
) -> Callable[[], CompiledKernel]:
    """Lower a kernel now and let `pool` run nvcc; the result waits for it. `symbol`: the function's, if not its name.

    Raises CompileError; the result also TooLargeForGpu.
    """
    symbol = symbol or kernel.name
    with _named(kernel, ours):
        rule, func = schedule(kernel, ours.kind)
        text = func.with_attr("global_symbol", symbol).script()
        lowered = lower_cuda(symbol, func, tvm_target(ours), folder)
    future = pool.submit(device_code, symbol, lowered, ours.level)

    def wait() -> CompiledKernel:
        code, report = future.result()
        for function in report:
            if occupancy(function, ours.level)["blocks"] == 0:
                raise TooLargeForGpu(
                    f"{function.name} asks for {function.shared_bytes + function.dynamic_shared_bytes} bytes of shared "
                    f"memory, {function.threads} threads and {function.registers} registers a thread, more than a "
                    f"block of {ours.level} has: choose smaller sizes in the configuration or another architecture"
                )
        entry = msgspec.structs.replace(_entry(kernel, func, rule, ours, text), gpu=report)
        return CompiledKernel(entry, text, lowered.host, (lowered.functions, code))

    return wait


@contextmanager
def _named(kernel: Kernel, target: Target) -> Iterator[None]:
    """Let what TVM raises say which kernel it was about."""
    try:
        yield
    except Exception as error:
        raise CompileError(
            f"TVM {tvm.__version__} could not compile {kernel.name} for {target.name}: {str(error)[:500]}"
        ) from error


def _entry(kernel: Kernel, func: Any, rule: str, target: Target, text: str) -> Entry:
    return Entry(
        name=kernel.name,
        op=kernel.op,
        params=kernel.params,
        arguments=tuple(_buffer(p) for p in func.params),
        rule=rule,
        fallback=rule == fallback(target.kind),
        record=None,
        knobs=kernel.knobs,
        ir="sha256:" + hashlib.sha256(text.encode()).hexdigest(),
    )


def _buffer(buffer: Any) -> Buffer:
    """An argument as the kernel's signature states it."""

    def plain(text: Any) -> str:  # TVM's strings are a subclass of their own
        return str(text).encode().decode()

    shape = tuple(int(n.value) if hasattr(n, "value") else plain(n) for n in buffer.shape)
    return Buffer(name=plain(buffer.name), dtype=plain(buffer.dtype), shape=shape, alignment=int(buffer.data_alignment))


def compiler() -> str:
    """The C++ compiler that links. Raises CompileError if there is none."""
    for name in ("g++", "clang++", "c++", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    raise CompileError("no C++ compiler found to link the kernels; expected g++ or clang++ on the PATH: install one")


def link(objects: Sequence[bytes], out: Path, modules: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A shared library of object files, in the given order: equal objects give equal bytes.

    For that: no build id, no debug sections (they name temporary files), the same file names every time. `modules`:
    device code that goes with it, see `compiler.cuda.module_table`.
    """
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder:
        names = [f"{i:04}.o" for i in range(len(objects))]
        for name, code in zip(names, objects, strict=True):
            (Path(folder) / name).write_bytes(code)
        if modules:
            (Path(folder) / "device.bin").write_bytes(module_table(modules))
            (Path(folder) / "device.s").write_text(_TABLE)
            names.append("device.s")
        flags = ["-shared", "-fPIC", "-Wl,--build-id=none", "-Wl,--strip-debug", "-Wl,-z,noexecstack"]
        done = subprocess.run(
            [compiler(), *flags, "-o", "library.so", *names], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CompileError(f"{compiler()} could not link the kernels: {done.stderr.strip()[-2000:]}")
        shutil.copyfile(Path(folder) / "library.so", out)
