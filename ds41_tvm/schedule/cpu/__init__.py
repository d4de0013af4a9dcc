"""CPU schedules: an ordered list of rules, the first that takes a kernel makes its program; the last takes all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm.tirx import PrimFunc

from ds41_tvm.kernels import FACTORIES
from ds41_tvm.program import Kernel
from ds41_tvm.schedule.cpu.attention import sparse_attention_fma
from ds41_tvm.schedule.cpu.attention_amx import sparse_attention_amx
from ds41_tvm.schedule.cpu.gather import Sizes
from ds41_tvm.schedule.cpu.indexer import index_scores_cpu
from ds41_tvm.schedule.cpu.linear import schedule_linear
from ds41_tvm.schedule.cpu.linear_amx import linear_amx
from ds41_tvm.schedule.cpu.rowwise import schedule_rowwise

Params = dict[str, Any]


def _amx(op: str, p: Params) -> PrimFunc | None:
    if op != "linear" or p["form"] != "amx":
        return None
    return linear_amx(p["n"], p["k"], p["groups"], p["weight"], p["out"], p["total"], p["tile"], p["rows"])


def _linear(op: str, p: Params) -> PrimFunc | None:
    if op != "linear":
        return None
    plain = plain_kernel(op, p)
    return schedule_linear(plain, p["weight"], p["tile"], p["rows"], p["groups"]).mod["main"]


def _attention(op: str, p: Params) -> PrimFunc | None:
    if op != "sparse_attention":
        return None
    sizes = Sizes(**{k: v for k, v in p.items() if k != "form"})
    return sparse_attention_amx(sizes) if p["form"] == "amx" else sparse_attention_fma(sizes)


def _scores(op: str, p: Params) -> PrimFunc | None:
    return index_scores_cpu(**p) if op == "index_scores" else None


def _rowwise(op: str, p: Params) -> PrimFunc | None:
    return schedule_rowwise(plain_kernel(op, p)).mod["main"]


# Tile registers, register-tiled products, gathered attention, index scores; then rows in parallel.
RULES: tuple[tuple[str, Callable[[str, Params], PrimFunc | None]], ...] = (
    ("linear-amx", _amx),
    ("linear-fma", _linear),
    ("attention", _attention),
    ("index-scores", _scores),
    ("rowwise", _rowwise),
)


def plain_kernel(op: str, params: Params) -> PrimFunc:
    """The unscheduled kernel, without the parameters that only choose a program."""
    only_program = {"linear": ("form",), "sparse_attention": ("form", "split")}.get(op, ())
    return FACTORIES[op](**{k: v for k, v in params.items() if k not in only_program})


@functools.cache
def schedule(kernel: Kernel) -> tuple[str, PrimFunc]:
    """Name of the rule that took the kernel, and its program. Cached: half of a compilation is reading TVMScript."""
    params = dict(kernel.params)
    for name, rule in RULES:
        func = rule(kernel.op, params)
        if func is not None:
            return name, func
    raise AssertionError("the last rule takes every kernel")
