"""Kernels by name, in every form: the plain one with rows in parallel, the CPU's own program, and the GPU's, run on the
processor as OpenCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm

from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.program import kernel, scores_form
from ds41_tvm.proof import opencl_functions
from ds41_tvm.schedule.cpu import plain_kernel, schedule
from ds41_tvm.schedule.cpu.rowwise import schedule_rowwise
from ds41_tvm.target import parse_target

FORMS = ["plain", *[t for t in ("cpu", "cpu:x86-64-v3") if not parse_target(t).missing_here()], "opencl"]
V4 = "cpu:x86-64-v4", "cpu:x86-64-v4+vnni+vbmi"

_compiled: dict[Any, Callable[..., Any]] = {}


def _compile(form: str, op: str, params: dict[str, Any]) -> Callable[..., Any]:
    if form == "opencl":
        wanted = kernel(op, **{name: "cuda" if name == "form" else value for name, value in params.items()})
        return opencl_functions([wanted])[wanted.name]
    target = parse_target("cpu" if form == "plain" else form)
    if op == "index_scores" and form != "plain":
        params = {**params, **scores_form(target, params["dim"])}
    rule, func = schedule(kernel(op, **params))
    plain = form == "plain" or rule == "rowwise"
    key = target, plain, op, tuple(params.items())
    if key not in _compiled:
        if form == "plain" and rule != "rowwise":
            func = schedule_rowwise(plain_kernel(op, params)).mod["main"]
        executable = tvm.compile(func.with_attr("global_symbol", "main"), target=tvm_target(target))
        _compiled[key] = executable["main"]
    return _compiled[key]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """``plain``: the unscheduled kernel through the fallback schedule; else the program for a target."""
    return str(request.param)


@pytest.fixture
def compiled(form: str) -> Callable[..., Callable[..., Any]]:
    """`compiled(op, **params)`: the kernel in the form of this test."""
    return lambda op, /, **params: _compile(form, op, params)


@pytest.fixture(scope="session")
def native() -> Callable[..., Callable[..., Any]]:
    """As `compiled`, for this machine only: operators that are plain integer code on every target."""
    return lambda op, /, **params: _compile("cpu", op, params)


@pytest.fixture(scope="session")
def compile_as() -> Callable[..., Callable[..., Any]]:
    """`compile_as(form, op, **params)`: the kernel in a form of the caller's choice."""
    return lambda form, op, /, **params: _compile(form, op, params)


@pytest.fixture(scope="session")
def forms() -> list[str]:
    """All forms that run here."""
    return FORMS + [target for target in V4 if not parse_target(target).missing_here()]
