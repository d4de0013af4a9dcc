"""Programs of small kernels by their knobs, and records made without measuring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm

from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.config import AttentionConfig
from ds41_tvm.program import Kernel, Program
from ds41_tvm.runtime.threads import use_threads
from ds41_tvm.schedule.cpu import plain_kernel, schedule
from ds41_tvm.schedule.cpu.rowwise import schedule_rowwise
from ds41_tvm.target import Target, parse_target
from ds41_tvm.tune.apply import program_digest
from ds41_tvm.tune.inputs import arguments, checks, output_rows
from ds41_tvm.tune.records import Record
from ds41_tvm.tune.task import Task, Values

TINY = AttentionConfig.preset("tiny")


def program(target: str = "cpu:x86-64-v3", layers: tuple[int, ...] = (0,), **options: Any) -> Program:
    return Program(config=TINY, layers=layers, target=parse_target(target), **options)


def outputs(kernels: list[Kernel], target: Target, plain: bool = False) -> list[bytes]:
    """What each kernel writes for the inputs that winners are checked with."""
    functions = {}
    for number, kernel in enumerate(kernels):
        if plain:
            func = schedule_rowwise(plain_kernel(kernel.op, dict(kernel.params))).mod["main"]
        else:
            func = schedule(kernel)[1]
        functions[f"k{number}"] = func.with_attr("global_symbol", f"k{number}")
    compiled = tvm.compile(tvm.IRModule(functions), target=tvm_target(target))
    use_threads(1)
    found = []
    for number, kernel in enumerate(kernels):
        out = b""
        for case in checks(kernel):
            arrays = arguments(kernel, case)
            compiled[f"k{number}"](*arrays)
            out += np.ascontiguousarray(output_rows(kernel, case, arrays[-1])).tobytes()
        found.append(out)
    return found


def record(task: Task, values: Values, aim: Target, /, **changes: Any) -> Record:
    """A record as tuning would write it, with `changes`."""
    fields: dict[str, Any] = {
        "kernel": task.name, "op": task.kernel.op, "sizes": task.sizes, "knobs": values,
        "ir": program_digest(task.with_values(values), aim.kind), "target": aim.name, "tvm": tvm.__version__,
        "case": "1 token(s)", "before": 2e-6, "after": 1e-6, "limit": "read", "share_before": 0.4, "share_after": 0.8,
        "checked": True, "trials": 9, "environment": "here",
    }  # fmt: skip
    return Record(**fields | changes)


@pytest.fixture(name="program")
def _program() -> Callable[..., Program]:
    """`program(target, layers, **options)` of the configuration tiny."""
    return program


@pytest.fixture(name="outputs")
def _outputs() -> Callable[..., list[bytes]]:
    """`outputs(kernels, target, plain)`."""
    return outputs


@pytest.fixture(name="record")
def _record() -> Callable[..., Record]:
    """`record(task, values, target, **changes)`."""
    return record
