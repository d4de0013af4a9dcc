"""Index scores of the tensor-core program, in software form on a processor: bit for bit those of the reference."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.packing import aligned, aligned_copy
from ds41_tvm.program import kernel
from ds41_tvm.proof.opencl import opencl_functions


def _scenes() -> Any:
    """The scenes of the CPU's tests: keys scattered over a poisoned pool."""
    path = Path(__file__).parents[2] / "kernels" / "test_indexer.py"
    spec = importlib.util.spec_from_file_location("indexer_scenes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["indexer_scenes"] = module
    spec.loader.exec_module(module)
    return module


scenes = _scenes()
DENSE = [(17, 128, 3), (3, 32, 4)]  # heads, dim, rows of a block
CANDIDATES = [(3, 32, 3, 0), (3, 32, 3, 1)]  # heads, dim, positions of a candidate block, spread


@functools.cache
def program(heads: int, dim: int, block_rows: int, candidate_block: int = 0, spread: int = 0) -> Any:
    wanted = kernel(
        "index_scores", heads=heads, dim=dim, block_rows=block_rows, candidate_block=candidate_block, spread=spread
    )
    return opencl_functions([wanted])[wanted.name]


def run(function: Any, inputs: list[np.ndarray], width: int) -> np.ndarray:
    out = aligned((len(inputs[5]), width), np.uint16)
    out[...] = 0x1234
    function(*(aligned_copy(a) for a in inputs), out)
    return out


@pytest.mark.parametrize("shape", DENSE)
def test_every_visible_position(shape: tuple[int, int, int]) -> None:
    """More positions than a block has, more queries than share its keys, sequences in turns."""
    longest = 140
    s = scenes.scene(*shape, [longest, 0, 1, 9, longest - 1, 7, 129, 128, longest, 2])
    for width in (longest, longest + 1):
        got = run(program(*shape), s.inputs, width)
        for t, scores in enumerate(s.expected):
            np.testing.assert_array_equal(got[t, : len(scores)], scores, err_msg=f"query {t}")
            assert (got[t, len(scores) :] == scenes.MASKED).all()


@settings(max_examples=6)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any), st.integers(0, 1 << 20))
def test_any_lengths(visible: list[int], seed: int) -> None:
    s = scenes.scene(*DENSE[1], visible, seed=seed)
    got = run(program(*DENSE[1]), s.inputs, max(visible))
    for t, scores in enumerate(s.expected):
        np.testing.assert_array_equal(got[t, : len(scores)], scores)
        assert (got[t, len(scores) :] == scenes.MASKED).all()


@pytest.mark.parametrize(("heads", "dim", "size", "spread"), CANDIDATES)
@pytest.mark.parametrize(("longest", "count"), [(20, 3), (300, 80), (5, 9)])
def test_positions_of_candidate_blocks(heads: int, dim: int, size: int, spread: int, longest: int, count: int) -> None:
    s = scenes.scene(heads, dim, 4, [longest, 0, 1, 5, longest - 1, longest - 3, longest // 2 + 1, 2], seed=longest)
    chosen = scenes.candidates(s, size, count, seed=count)
    width = longest + 1 if spread else count * size
    got = run(program(heads, dim, 4, size, spread), [*s.inputs, chosen], width)
    expected = np.full_like(got, scenes.MASKED)
    for t, blocks in enumerate(chosen):
        for c, block in enumerate(blocks[blocks >= 0]):
            for i in range(size):
                position = block * size + i
                if position < s.visible[t]:
                    expected[t, position if spread else c * size + i] = s.expected[t][position]
    np.testing.assert_array_equal(got, expected)


def test_bad_keys_and_queries_stay_in_their_columns_and_rows() -> None:
    s = scenes.scene(*DENSE[1], [30, 30, 30, 30])
    good = run(program(*DENSE[1]), s.inputs, 30)
    s.q[1] = 0xFF
    owner = int(s.sequence[2])
    s.keys[s.table[owner, 17 // 4] * 4 + 17 % 4] = 0xFF
    got = run(program(*DENSE[1]), s.inputs, 30)
    touched = np.zeros((4, 30), bool)
    touched[1] = True
    touched[s.sequence == owner, 17] = True
    np.testing.assert_array_equal(got[~touched], good[~touched])
    assert not got[s.sequence == owner, 17].any()  # relu(NaN) is 0


def test_no_queries() -> None:
    s = scenes.scene(*DENSE[1], [5])
    assert run(program(*DENSE[1]), [a[:0] if i in (0, 1, 4, 5) else a for i, a in enumerate(s.inputs)], 5).size == 0
