"""Kernels as object files, each with what made it: for libraries that outlive the process."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from ds41_tvm.artifact.manifest import Buffer, Entry
from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.errors import CompileError
from ds41_tvm.program import Kernel, Program
from ds41_tvm.schedule.cpu import RULES, schedule
from ds41_tvm.target import Target


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel: its manifest entry, its scheduled IR as text, its object file."""

    entry: Entry
    ir: str
    code: bytes


# As in `build`: what was compiled in this process is not compiled again.
_compiled: dict[tuple[Target, Kernel], CompiledKernel] = {}


def compile_kernels(program: Program, progress: Callable[[int, int], None] | None = None) -> list[CompiledKernel]:
    """The kernels of a program in the program's order. Raises CompileError naming the kernel that TVM refuses."""
    needed = program.kernels()
    target = tvm_target(program.target)
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder:
        for done, kernel in enumerate(needed):
            if progress is not None:
                progress(done, len(needed))
            if (program.target, kernel) not in _compiled:
                _compiled[program.target, kernel] = _compile(kernel, target, program.target, Path(folder) / "kernel.o")
    if progress is not None:
        progress(len(needed), len(needed))
    return [_compiled[program.target, kernel] for kernel in needed]


def _compile(kernel: Kernel, target: Any, ours: Target, path: Path) -> CompiledKernel:
    try:
        rule, func = schedule(kernel)
        func = func.with_attr("global_symbol", kernel.name)
        text = func.script()
        tvm.compile(tvm.IRModule({kernel.name: func}), target=target).mod.write_to_file(str(path), "o")
    except Exception as error:
        raise CompileError(
            f"TVM {tvm.__version__} could not compile {kernel.name} for {ours.name}: {str(error)[:500]}"
        ) from error
    entry = Entry(
        name=kernel.name,
        op=kernel.op,
        params=kernel.params,
        arguments=tuple(_buffer(p) for p in func.params),
        rule=rule,
        fallback=rule == RULES[-1][0],
        record=None,
        ir="sha256:" + hashlib.sha256(text.encode()).hexdigest(),
    )
    return CompiledKernel(entry, text, path.read_bytes())


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


def link(objects: Sequence[bytes], out: Path) -> None:
    """A shared library of object files, in the given order: equal objects give equal bytes.

    For that: no build id, no debug sections (they name temporary files), the same file names every time.
    """
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder:
        names = [f"{i:04}.o" for i in range(len(objects))]
        for name, code in zip(names, objects, strict=True):
            (Path(folder) / name).write_bytes(code)
        flags = ["-shared", "-fPIC", "-Wl,--build-id=none", "-Wl,--strip-debug", "-Wl,-z,noexecstack"]
        done = subprocess.run(
            [compiler(), *flags, "-o", "library.so", *names], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CompileError(f"{compiler()} could not link the kernels: {done.stderr.strip()[-2000:]}")
        shutil.copyfile(Path(folder) / "library.so", out)
