"""Which rule makes a GPU program, and that the last one makes a right one of any operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.kernels import FACTORIES
from ds41_tvm.numerics.formats import bf16_encode
from ds41_tvm.packing import aligned_copy
from ds41_tvm.program import Kernel, Program, kernel
from ds41_tvm.proof import opencl_functions
from ds41_tvm.proof.opencl import opencl_function
from ds41_tvm.schedule import fallback, schedule
from ds41_tvm.schedule.cpu import plain_kernel
from ds41_tvm.schedule.cuda.fallback import thread_bound
from ds41_tvm.target import parse_target


def test_every_operator_of_the_released_sizes_has_a_program_of_its_own() -> None:
    """None is left to the fallback."""
    config = AttentionConfig.preset("flash")
    found: dict[str, Kernel] = {}
    for options in ({"linear": "fp8"}, {"ties": "torch-cpu"}):
        program = Program(config=config, layers=(0, 2, 20, 24), target=parse_target("cuda:sm_90"), **options)  # type: ignore[arg-type]
        found = {k.op: k for k in program.kernels()} | found
    assert set(found) == set(FACTORIES)
    assert [op for op, k in found.items() if schedule(k, "cuda")[0] == fallback("cuda")] == []


def test_kernels_are_those_of_the_opencl_target() -> None:
    """What is shown to be right on a processor is what CUDA compiles."""
    config = AttentionConfig.preset("tiny")
    cuda, opencl = (
        Program(config=config, layers=tuple(range(6)), target=parse_target(t)) for t in ("cuda:sm_90", "opencl")
    )
    assert cuda.kernels() == opencl.kernels()
    assert {k.form for role in config.roles for k in cuda.linears(role).values()} == {"cuda"}


def data(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bf16":
        return aligned_copy(bf16_encode(rng.normal(size=shape).astype(np.float32)))
    if dtype == "f32":
        return aligned_copy(rng.normal(size=shape).astype(np.float32))
    return aligned_copy(rng.integers(0, 3, size=shape).astype(dtype))


VISIBLE = aligned_copy(np.random.default_rng(1).integers(0, 26, size=70).astype(np.int32))
FALLBACKS = {
    "a thread for a row": (
        kernel("block_scores", size=3), [data((70, 25), "bf16", 0), VISIBLE], (70, 9), np.uint16,
    ),
    "stages": (
        kernel("pool_groups", dim=32, ratio=2),
        [data((9, 32), "f32", 0), data((9, 32), "f32", 1), data((4, 2, 32), "f32", 2), data((5, 2), "int64", 3)],
        (5, 32), np.uint16,
    ),
    "elements": (
        kernel("scale_weights", heads=6, factor=0.3), [data((33, 6), "bf16", 0)], (33, 6), np.uint16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", FALLBACKS)
def test_the_fallback_has_the_bits_of_the_rule_that_comes_before_it(call: Any, which: str) -> None:
    wanted, inputs, shape, dtype = FALLBACKS[which]
    own = call(opencl_functions([wanted])[wanted.name], inputs, shape, dtype)
    plain = call(opencl_function(thread_bound(plain_kernel(wanted.op, dict(wanted.params)))), inputs, shape, dtype)
    np.testing.assert_array_equal(plain, own)
    assert len(np.unique(own)) > 3
