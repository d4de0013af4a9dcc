"""Sparse attention of the tensor-core program, in software form on a processor, and against the CPU's own program."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.numerics.formats import bf16_decode
from ds41_tvm.packing import aligned, aligned_copy
from ds41_tvm.program import kernel
from ds41_tvm.proof.opencl import opencl_function, opencl_functions
from ds41_tvm.schedule.cpu import schedule as schedule_cpu
from ds41_tvm.schedule.cuda.attention import sparse_attention_mma
from ds41_tvm.schedule.cuda.attention_sizes import Sizes
from ds41_tvm.target import parse_target


def _scenes() -> Any:
    """The scenes of the CPU's tests: rings that wrap, blocks in random order, NaN in all that is not chosen."""
    path = Path(__file__).parents[2] / "kernels" / "test_attention.py"
    spec = importlib.util.spec_from_file_location("attention_scenes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["attention_scenes"] = module
    spec.loader.exec_module(module)
    return module


scenes = _scenes()
# heads, dim, window, k. Heads that do and do not fill tiles of 16; rows of whole words and not; windows and selections
# of more than one tile of 32; channels in one chain of scores and in two.
SHAPES = [(20, 64, 40, 37), (3, 32, 5, 5), (16, 128, 5, 0)]


def parameters(shape: tuple[int, ...], split: int = 1) -> dict[str, Any]:
    heads, dim, window, k = shape
    return {
        "heads": heads, "dim": dim, "window": window, "ring_rows": window + 6, "block_rows": scenes.BLOCK_ROWS, "k": k,
        "form": "cuda", "split": split,
    }  # fmt: skip


def sizes_of(shape: tuple[int, ...], split: int = 1) -> dict[str, Any]:
    return {name: value for name, value in parameters(shape, split).items() if name != "form"}


@functools.cache
def program(shape: tuple[int, ...], split: int = 1) -> Any:
    wanted = kernel("sparse_attention", **parameters(shape, split))
    return opencl_functions([wanted])[wanted.name]


@functools.cache
def cpu_program(shape: tuple[int, ...]) -> Any:
    func = schedule_cpu(kernel("sparse_attention", **parameters(shape) | {"form": "fma"}))[1]
    target = tvm_target(parse_target("cpu:x86-64-v3"))
    return tvm.compile(func.with_attr("global_symbol", "main"), target=target)["main"]


def run(function: Any, s: Any) -> np.ndarray:
    out = aligned(s.inputs[0].shape, np.uint16)
    out[...] = 0xFFFF
    function(*(aligned_copy(a) for a in s.inputs), out)
    return out


@functools.cache
def scene(shape: tuple[int, ...], seed: int = 0, scale: float = 2.0) -> Any:
    heads, dim, window, k = shape
    return scenes.scene(heads, dim, window, window + 6, k, scale=scale, seed=seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_out_of_rings_and_blocks(shape: tuple[int, ...]) -> None:
    """Within float32 arithmetic, like the CPU's program; again and again the same bits."""
    s = scene(shape)
    got = run(program(shape), s)
    scenes.assert_rounded(got, s, shape[1])
    np.testing.assert_array_equal(run(program(shape), s), got)
    cpu = run(cpu_program(shape), s)
    scenes.assert_rounded(cpu, s, shape[1])
    same = np.mean(got == cpu)
    assert same > 0.998, f"{same:.4f} of the outputs are those of the CPU's program"


@pytest.mark.parametrize("split", [2, 8])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_parts_of_the_heads_and_of_the_rows_have_the_same_bits(shape: tuple[int, ...], split: int) -> None:
    """Split 8 also shares out the rows, and the channels of the output."""
    s = scene(shape)
    np.testing.assert_array_equal(run(program(shape, split), s), run(program(shape), s))
    assert (Sizes(**sizes_of(shape, split), mma="software").split_rows) == (split == 8)


def test_shared_rows_leave_bad_rows_and_missing_ones_alone() -> None:
    """A NaN in one query, a query that sees nothing: the same bits as in one block."""
    shape = SHAPES[0]
    s = scenes.scene(*shape[:3], shape[2] + 6, shape[3], seed=4)
    s.inputs[0][3, 1] = 0x7FC0
    s.inputs[1][20] = 0xFF
    s.inputs[4][5] = -1
    s.inputs[11][5] = -1
    np.testing.assert_array_equal(run(program(shape, 8), s), run(program(shape), s))


@settings(max_examples=5)
@given(st.integers(0, 20), st.integers(1, 21), st.sampled_from([0.0, 2.0, 30.0]))
def test_a_query_does_not_see_the_others(first: int, count: int, scale: float) -> None:
    """Some of the queries of a step alone: the same bits. Their rows stay in the step."""
    shape = SHAPES[0]
    s = scene(shape, 1, scale)
    whole = run(program(shape), s)
    last = min(first + count, len(whole))
    # Tokens before `first` stay as rows; queries are cut by giving their places to repeats of the last one.
    order = np.r_[first:last, np.full(len(whole) - (last - first), last - 1)]
    moved = [a[order] if i in (0, 4, 5, 11) else a for i, a in enumerate(s.inputs)]
    got = run(program(shape), scenes.Scene(moved, s.rows))
    np.testing.assert_array_equal(got, whole[order])


def test_bad_rows_and_queries_stay_alone() -> None:
    shape = SHAPES[1]
    s = scenes.scene(*shape[:3], shape[2] + 6, shape[3], seed=4)
    good = run(program(shape), s)
    s.inputs[0][3, 1] = 0x7FC0  # one head of one query
    s.inputs[1][20] = 0xFF  # the last query's own row
    got = run(program(shape), s)
    same = np.ones(good.shape[:2], bool)
    same[3, 1] = False
    same[20] = False
    np.testing.assert_array_equal(got[same], good[same])
    assert np.isnan(bf16_decode(got[20])).all()
    assert np.isnan(bf16_decode(got[3, 1])).all()


@pytest.mark.parametrize("sink", [-np.inf, -200.0, 87.0, 1e30, np.inf])
def test_sinks_of_any_size(sink: float) -> None:
    shape = SHAPES[1]
    s = scenes.scene(*shape[:3], shape[2] + 6, shape[3], scale=0.5, seed=2)
    s.inputs[3][:] = [sink, 0.0, sink]
    got = run(program(shape), s)
    with np.errstate(invalid="ignore"):
        exact, size = s.exact(shape[1])
    if sink == np.inf:
        exact[:, [0, 2]] = 0
        size[:, [0, 2]] = 0
    half_step = np.ldexp(1.0, np.frexp(np.maximum(abs(exact), 1e-30))[1] - 9)
    np.testing.assert_array_less(abs(bf16_decode(got) - exact), half_step + 2.0**-17 * size)


def test_a_query_with_no_row_gives_zeros() -> None:
    """Position -1 sees nothing."""
    shape = SHAPES[1]
    s = scenes.scene(*shape[:3], shape[2] + 6, shape[3], seed=6)
    good = run(program(shape), s)
    s.inputs[4][5] = -1
    s.inputs[11][5] = -1
    got = run(program(shape), s)
    assert not (got[5] & 0x7FFF).any()
    kept = np.arange(len(good)) != 5
    np.testing.assert_array_equal(got[kept], good[kept])


def test_one_part_of_the_weights_is_the_official_rounding() -> None:
    """With bf16 weights the output moves, by at most 2^-8 of the magnitudes that make it up."""
    shape = SHAPES[1]
    coarse = opencl_function(sparse_attention_mma(Sizes(**sizes_of(shape), mma="software", weight_parts=1)))
    s = scene(shape, 3, 0.3)  # flat weights: a greatest one, e^0, would be exact in either form
    got, fine = bf16_decode(run(coarse, s)), bf16_decode(run(program(shape), s))
    exact, size = s.exact(shape[1])
    half_step = np.ldexp(1.0, np.frexp(abs(exact) + 2.0**-8 * size)[1] - 9)
    assert (abs(got - exact) <= half_step + 2.0**-8 * size).all()
    assert np.linalg.norm(got - exact) > 1.1 * np.linalg.norm(fine - exact)


def test_no_queries() -> None:
    shape = SHAPES[1]
    s = scene(shape)
    inputs = [a[:0] if i in (0, 1, 4, 5, 11) else a for i, a in enumerate(s.inputs)]
    assert run(program(shape), scenes.Scene(inputs, [])).size == 0
