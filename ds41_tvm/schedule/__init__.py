"""Schedules: how a kernel becomes a program for one kind of target."""

from __future__ import annotations

from tvm.tirx import PrimFunc

from ds41_tvm.program import Kernel


def schedule(kernel: Kernel, target_kind: str) -> tuple[str, PrimFunc]:
    """Name of the rule that took the kernel, and its program, for a target of this kind: cpu, cuda or opencl."""
    if target_kind == "cpu":
        from ds41_tvm.schedule import cpu

        return cpu.schedule(kernel)
    from ds41_tvm.schedule import cuda

    return cuda.schedule(kernel, target_kind)


def space(kernel: Kernel, target_kind: str) -> dict[str, tuple[int, ...]]:
    """Knobs of a kernel's program and the values to choose from, the default first; see `Kernel.knobs`."""
    if target_kind == "cpu":
        from ds41_tvm.schedule import cpu

        return cpu.space(kernel)
    from ds41_tvm.schedule import cuda

    return cuda.space(kernel, target_kind)


def fallback(target_kind: str) -> str:
    """Name of the rule that takes what no other does."""
    from ds41_tvm.schedule import cpu, cuda

    return (cpu.RULES if target_kind == "cpu" else cuda.RULES)[-1][0]
