"""No knob changes a bit of any result."""

from __future__ import annotations

from typing import Any

import pytest

from ds41_tvm.program import Kernel, kernel
from ds41_tvm.target import parse_target
from ds41_tvm.tune.task import Task, Values, task_of

LINEAR = {"n": 128, "k": 64, "groups": 2}
ATTENTION = {"heads": 24, "dim": 64, "window": 16, "ring_rows": 20, "block_rows": 16}
SCORES = {"heads": 5, "dim": 128, "block_rows": 16}


def linear(rows: int, weight: str = "bf16", total: str = "f32", form: str = "fma") -> Kernel:
    tile = 32 if weight == "fp8" or form != "fma" else 64
    return kernel("linear", **LINEAR, weight=weight, out="bf16", total=total, tile=tile, form=form, rows=rows)


# Kernel, and whether its program gives the bits of the plain kernel (attention sums in another order than that).
KERNELS: dict[str, tuple[Kernel, bool]] = {
    "one row": (linear(1), True),
    "one row, fp8": (linear(1, "fp8"), True),
    "many rows": (linear(6), True),
    "many rows, fp8, f64": (linear(6, "fp8", "f64"), True),
    "many rows, f32": (linear(6, "f32", "f64"), True),
    "one row, amx": (linear(1, "fp8", form="amx"), False),
    "many rows, amx": (linear(16, "fp8", form="amx"), False),
    "one row, dot": (linear(1, "fp8", form="dot"), False),
    "many rows, dot": (linear(12, "fp8", form="dot"), False),
    "attention, dot": (kernel("sparse_attention", **ATTENTION, k=24, form="dot", split=1), False),
    "attention, avx512": (kernel("sparse_attention", **ATTENTION, k=24, form="avx512", split=1), False),
    "attention": (kernel("sparse_attention", **ATTENTION, k=24, form="fma", split=1), False),
    "attention, parts": (kernel("sparse_attention", **ATTENTION, k=0, form="fma", split=3), False),
    "attention, amx": (kernel("sparse_attention", **ATTENTION, k=24, form="amx", split=1), False),
    "scores": (kernel("index_scores", **SCORES, candidate_block=0, spread=0), True),
    "scores, candidates": (kernel("index_scores", **SCORES, candidate_block=3, spread=0), True),
    "rope": (kernel("rope", heads=2, dim=96, rope_dim=32, inverse=0), True),
    "norm": (kernel("rms_norm", dim=96, eps=1e-20), True),
    "pack": (kernel("pack_rows", kind="latent", heads=1, dim=64), True),
    "quantise": (kernel("quantize_activation", dim=96), True),
    "pool": (kernel("pool_groups", dim=96, ratio=3), True),
    "copy": (kernel("copy_rows", size=96), True),
}


TARGETS = {"amx": "cpu:x86-64-v4+amx+vbmi", "avx512": "cpu:x86-64-v4", "dot": "cpu:x86-64-v4+bf16+vbmi"}


def target_of(k: Kernel) -> Any:
    return parse_target(TARGETS.get(str(dict(k.params).get("form")), "cpu:x86-64-v3"))


def assert_same(name: str, points: list[Values], outputs: Any, task: Task) -> None:
    k, exact = KERNELS[name]
    target = target_of(k)
    if target.missing_here():
        pytest.skip(f"this machine lacks {target.missing_here()}")
    (want,) = outputs([k], target)
    if exact:
        assert outputs([k], target, plain=True) == [want], "the default program differs from the plain kernel"
    for start in range(0, len(points), 16):
        some = points[start : start + 16]
        for values, got in zip(some, outputs([task.with_values(v) for v in some], target), strict=True):
            assert got == want, values


# The others have the same knobs; with all their combinations they are in the slow test.
LONG = ("attention, parts", "many rows, f32", "scores", "one row, amx", "one row, dot", "quantise")
QUICK = [name for name in KERNELS if name not in LONG]


@pytest.mark.parametrize("name", QUICK)
def test_every_value_of_every_knob(name: str, outputs: Any, each_value: Any) -> None:
    task = task_of(KERNELS[name][0], "cpu")
    assert task.knobs
    assert_same(name, each_value(task), outputs, task)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_combination(name: str, outputs: Any) -> None:
    task = task_of(KERNELS[name][0], "cpu")
    assert_same(name, list(task.points()), outputs, task)


def test_the_first_value_is_what_is_used_without_tuning() -> None:
    """A kernel with all knobs at their first value makes the program of the kernel without knobs."""
    from ds41_tvm.tune.apply import program_digest

    for k, _ in KERNELS.values():
        task = task_of(k, "cpu")
        assert task.with_values(task.default) == k
        sizes = ("tile", "rows") if k.op == "linear" else ()
        explicit = Kernel(k.op, k.params, tuple((n, v) for n, v in task.default.items() if n not in sizes))
        assert program_digest(explicit, "cpu") == program_digest(k, "cpu"), k.name
