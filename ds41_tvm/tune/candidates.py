"""Every program of a GPU's schedule spaces, compiled and not run: what a search would measure, without a GPU."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ds41_tvm.cpu_features import available_threads
from ds41_tvm.errors import CompileError, TooLargeForGpu
from ds41_tvm.target import Target
from ds41_tvm.tune.task import Task, Values

if TYPE_CHECKING:
    from ds41_tvm.compiler.objects import CompiledKernel

State = Literal["compiled", "spills", "too large", "failed"]


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program and what the compiler says of it.

    `state`: ``spills`` is compiled too, but keeps values in memory that registers have no room for; ``too large`` asks
    for more than a block of the architecture has. `registers` of a thread, `spilled` bytes stored by a thread,
    `shared` bytes of a block: the most of its functions. `message`: why it was refused.
    """

    kernel: str
    knobs: Values
    default: bool
    state: State
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    message: str = ""

    @property
    def wrong(self) -> bool:
        """Whether this must not be: a program that does not compile, or a default that nobody would want to run."""
        return self.state == "failed" or (self.default and self.state != "compiled")


def compile_candidates(
    target: Target, tasks: Sequence[Task], report: Callable[[str, int, int], None] = lambda what, done, total: None
) -> Iterator[Candidate]:
    """Every candidate of every task, in order, as soon as it is compiled. Raises NoCudaCompiler."""
    from ds41_tvm.compiler.nvcc import find_nvcc
    from ds41_tvm.compiler.objects import start_cuda

    find_nvcc()
    total, done = sum(task.combinations for task in tasks), 0
    waiting: deque[tuple[Task, Values, Callable[[], CompiledKernel]]] = deque()
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder, ThreadPoolExecutor(available_threads()) as pool:

        def oldest() -> Candidate:
            nonlocal done
            task, values, job = waiting.popleft()
            done += 1
            report(task.kernel.op, done, total)
            return _judge(task, values, job)

        for task in tasks:
            for values in task.points():
                try:
                    job = start_cuda(task.with_values(values), target, Path(folder), pool)
                except CompileError as error:
                    job = _failing(error)
                waiting.append((task, values, job))
                if len(waiting) > 2 * available_threads():
                    yield oldest()
        while waiting:
            yield oldest()


def _failing(error: CompileError) -> Callable[[], CompiledKernel]:
    def job() -> CompiledKernel:
        raise error

    return job


def _judge(task: Task, values: Values, job: Callable[[], CompiledKernel]) -> Candidate:
    made = Candidate(kernel=task.name, knobs=values, default=values == task.default, state="failed")
    try:
        code = job().entry.gpu
    except TooLargeForGpu as error:
        return msgspec.structs.replace(made, state="too large", message=str(error))
    except CompileError as error:
        return msgspec.structs.replace(made, message=str(error))
    spilled = max(f.spill_stores + f.spill_loads for f in code)
    return msgspec.structs.replace(
        made,
        state="spills" if spilled else "compiled",
        registers=max(f.registers for f in code),
        spilled=spilled,
        shared=max(f.shared_bytes + f.dynamic_shared_bytes for f in code),
    )
