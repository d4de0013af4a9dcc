"""GPU programs: an ordered list of rules, the first that takes a kernel makes its program; the last takes all.

The target kind is ``cuda``, or ``opencl`` for the proof on a processor: the same programs, except that OpenCL has no
dynamic shared memory and no tensor-core instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm.tirx import PrimFunc

from ds41_tvm.program import Kernel
from ds41_tvm.schedule.cpu import plain_kernel
from ds41_tvm.schedule.cuda import (
    attention,
    indexer,
    knobs,
    linear_mma,
    norm,
    quantize,
    rope,
    rows,
    topk,
    topk_torch,
)
from ds41_tvm.schedule.cuda.fallback import thread_bound

Params = dict[str, Any]
Knobs = dict[str, int]
# (operator, its parameters, target kind, knobs) -> its program, None if the rule is not for it.
Rule = Callable[[str, Params, str, Knobs], PrimFunc | None]


def _program_of(factory: Callable[..., PrimFunc], operator: str) -> Rule:
    """The rule of an operator with a program of its own, which takes the operator's parameters."""
    return lambda op, p, kind, knobs: factory(**p) if op == operator else None


def _fallback(op: str, p: Params, kind: str, knobs: Knobs) -> PrimFunc | None:
    return thread_bound(plain_kernel(op, p))


_OWN: dict[str, Callable[..., PrimFunc]] = {
    "rms_norm": norm.rms_norm,
    "rope": rope.rope,
    "pack_rows": quantize.pack_rows,
    "quantize_activation": quantize.quantize_activation,
    "pool_groups": rows.pool_groups,
    "scale_weights": rows.scale_weights,
    "block_scores": rows.block_scores,
    "candidate_limit": rows.candidate_limit,
    "copy_rows": rows.copy_rows,
    "topk_lowest_index": topk.topk_lowest_index,
    "topk_torch_cpu": topk_torch.topk_torch_cpu,
}
RULES: tuple[tuple[str, Rule], ...] = (
    *linear_mma.RULES,
    *indexer.RULES,
    *attention.RULES,
    *((op.replace("_", "-"), _program_of(factory, op)) for op, factory in _OWN.items()),
    ("rowwise", _fallback),
)


@functools.cache
def schedule(kernel: Kernel, kind: str) -> tuple[str, PrimFunc]:
    """Name of the rule that took the kernel, and its program for targets of `kind`. Cached."""
    params = dict(kernel.params)
    for name, rule in RULES:
        func = rule(kernel.op, params, kind, dict(kernel.knobs))
        if func is not None:
            return name, func
    raise AssertionError("the last rule takes every kernel")


def space(kernel: Kernel, kind: str) -> knobs.Space:
    """Knobs of a kernel's program and their values, the default first; none where there is nothing to choose."""
    return knobs.space(schedule(kernel, kind)[0], dict(kernel.params))
