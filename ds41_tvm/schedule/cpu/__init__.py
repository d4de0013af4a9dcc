"""CPU schedules: an ordered list of rules, the first that takes a kernel makes its program; the last takes all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tvm.tirx import PrimFunc

from ds41_tvm.kernels import FACTORIES
from ds41_tvm.program import Kernel
from ds41_tvm.schedule.cpu import knobs
from ds41_tvm.schedule.cpu.attention import sparse_attention_vector
from ds41_tvm.schedule.cpu.attention_amx import sparse_attention_amx
from ds41_tvm.schedule.cpu.candidates import SIZES, block_scores_cpu
from ds41_tvm.schedule.cpu.gather import Sizes
from ds41_tvm.schedule.cpu.indexer import index_scores_cpu
from ds41_tvm.schedule.cpu.indexer_vnni import index_scores_vnni
from ds41_tvm.schedule.cpu.linear import schedule_linear
from ds41_tvm.schedule.cpu.linear_amx import linear_amx
from ds41_tvm.schedule.cpu.linear_dot import linear_dot
from ds41_tvm.schedule.cpu.linear_row import linear_row
from ds41_tvm.schedule.cpu.linear_row import takes as linear_row_takes
from ds41_tvm.schedule.cpu.rowwise import schedule_rowwise
from ds41_tvm.schedule.cpu.topk import topk_cpu

Params = dict[str, Any]
Knobs = dict[str, int]


def _linear_amx(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return linear_amx(p["n"], p["k"], p["groups"], p["weight"], p["out"], p["total"], p["tile"], p["rows"], **knobs)


def _linear_dot(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return linear_dot(p["n"], p["k"], p["groups"], p["weight"], p["out"], p["total"], p["tile"], p["rows"], **knobs)


def _linear_row(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    tables = p["form"] == "vbmi"
    return linear_row(p["n"], p["k"], p["groups"], p["weight"], p["out"], p["total"], p["tile"], tables, **knobs)


def _is_row(op: str, p: Params) -> bool:
    return op == "linear" and linear_row_takes(p["k"], p["weight"], p["total"], p["rows"])


def _linear_fma(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    plain = plain_kernel(op, p)
    return schedule_linear(plain, p["weight"], p["tile"], p["rows"], p["groups"], **knobs).mod["main"]


def _attention_amx(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return sparse_attention_amx(Sizes(**{k: v for k, v in p.items() if k != "form"}), **knobs)


def _attention_vector(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    sizes = Sizes(**{k: v for k, v in p.items() if k != "form"})
    return sparse_attention_vector(sizes, p["form"], **knobs)


def _scores(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return index_scores_cpu(**p, **knobs)


def _scores_vnni(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return index_scores_vnni(**{k: v for k, v in p.items() if k != "form"}, **knobs)


def _block_scores(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return block_scores_cpu(p["size"])


def _topk(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return topk_cpu(p["k"], p["size"])


def _rowwise(op: str, p: Params, knobs: Knobs) -> PrimFunc:
    return schedule_rowwise(plain_kernel(op, p), **knobs).mod["main"]


class Rule(NamedTuple):
    """`takes`: whether the rule is for a kernel; `make`: its program; the knobs are in `knobs.space`."""

    name: str
    takes: Callable[[str, Params], bool]
    make: Callable[[str, Params, Knobs], PrimFunc]


# Tile registers, register-tiled products, gathered attention, index scores, selection; then rows in parallel.
RULES: tuple[Rule, ...] = (
    Rule("linear-amx", lambda op, p: op == "linear" and p["form"] == "amx", _linear_amx),
    Rule("linear-dot", lambda op, p: op == "linear" and p["form"] == "dot", _linear_dot),
    Rule("linear-row", _is_row, _linear_row),
    Rule("linear-fma", lambda op, p: op == "linear", _linear_fma),
    Rule("attention-amx", lambda op, p: op == "sparse_attention" and p["form"] == "amx", _attention_amx),
    Rule("attention-dot", lambda op, p: op == "sparse_attention" and p["form"] == "dot", _attention_vector),
    Rule("attention-avx512", lambda op, p: op == "sparse_attention" and p["form"] == "avx512", _attention_vector),
    Rule("attention-fma", lambda op, p: op == "sparse_attention", _attention_vector),
    Rule("index-scores-vnni", lambda op, p: op == "index_scores" and p.get("form") == "vnni", _scores_vnni),
    Rule("index-scores", lambda op, p: op == "index_scores", _scores),
    Rule("block-scores", lambda op, p: op == "block_scores" and p["size"] in SIZES, _block_scores),
    Rule("topk", lambda op, p: op == "topk_lowest_index", _topk),
    Rule("rowwise", lambda op, p: True, _rowwise),
)


def plain_kernel(op: str, params: Params) -> PrimFunc:
    """The unscheduled kernel, without the parameters that only choose a program."""
    only_program = {"linear": ("form",), "index_scores": ("form",), "sparse_attention": ("form", "split")}.get(op, ())
    return FACTORIES[op](**{k: v for k, v in params.items() if k not in only_program})


@functools.cache
def schedule(kernel: Kernel) -> tuple[str, PrimFunc]:
    """Name of the rule that took the kernel, and its program. Cached: half of a compilation is reading TVMScript."""
    rule, params = rule_of(kernel), dict(kernel.params)
    return rule.name, rule.make(kernel.op, params, dict(kernel.knobs))


def rule_of(kernel: Kernel) -> Rule:
    """The rule that takes the kernel."""
    params = dict(kernel.params)
    return next(rule for rule in RULES if rule.takes(kernel.op, params))


def space(kernel: Kernel) -> knobs.Space:
    """Knobs of a kernel's program and their values, the default first; none where there is nothing to choose."""
    return knobs.space(rule_of(kernel).name, kernel.op, dict(kernel.params))
