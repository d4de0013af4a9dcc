"""Compile the kernels of a program in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tvm
from tvm_ffi.error import register_error

from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.errors import CompileError, TargetError
from ds41_tvm.program import Kernel, Program
from ds41_tvm.schedule import schedule
from ds41_tvm.target import Target

# TVM's passes call back into Python; an interruption there would come out as a RuntimeError without a message.
register_error("KeyboardInterrupt", KeyboardInterrupt)

Function = Callable[..., Any]
# Kernels compiled in this process; a test suite or a notebook builds the same ones over and over.
_compiled: dict[tuple[Target, Kernel], Function] = {}


def lower(kernels: Iterable[Kernel], kind: Target) -> tvm.IRModule:
    """The scheduled functions of `kernels` for a target in one module, each under its own name."""
    functions = {}
    for kernel in kernels:
        _, func = schedule(kernel, kind.kind)
        functions[kernel.name] = func.with_attr("global_symbol", kernel.name)
    return tvm.IRModule(functions)


def compile_program(program: Program, progress: Callable[[int, int], None] | None = None) -> dict[str, Function]:
    """Callable kernels of a program as it is without tuning, see `compile_kernels`."""
    return compile_kernels(program.kernels(), program.target, progress)


def compile_kernels(
    kernels: Iterable[Kernel], kind: Target, progress: Callable[[int, int], None] | None = None
) -> dict[str, Function]:
    """Callable kernels by name. `progress` is told (done, total) as groups of kernels are compiled.

    Raises CompileError naming the kernels if TVM refuses them, TargetError for CUDA.
    """
    if kind.kind == "cuda":
        raise TargetError(
            f"target {kind.name!r} cannot be built in this process; make an artefact and load it: "
            f"ds41_tvm.compile(..., target={kind.name!r}), ds41_tvm.load(path)"
        )
    if kind.kind == "opencl":
        from ds41_tvm.proof import opencl_functions

        return opencl_functions(kernels, progress)
    needed = tuple(kernels)
    missing = [k for k in needed if (kind, k) not in _compiled]
    target = tvm_target(kind)
    for start in range(0, len(missing), 8):
        group = missing[start : start + 8]
        try:
            executable = tvm.compile(lower(group, kind), target=target)
        except Exception as error:
            names = ", ".join(k.name for k in group)
            raise CompileError(
                f"TVM {tvm.__version__} could not compile one of {names} for {kind.name}: {error}"
            ) from error
        for kernel in group:
            _compiled[kind, kernel] = executable[kernel.name]
        if progress is not None:
            progress(len(needed) - len(missing) + start + len(group), len(needed))
    return {k.name: _compiled[kind, k] for k in needed}
