"""Whole layers of GPU programs, run on the processor as OpenCL, against the recorded outputs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.golden import judge, load_case, play
from ds41_tvm.golden.runner import runner_caches, runner_forward

FOLDER = Path(__file__).parents[2] / "golden"
NAMES = sorted(p.name for p in FOLDER.glob("*.npz") if p.name.startswith(("tiny_", "mid_", "checkpoint_")))
CASES = [name for name in NAMES if name.startswith(("tiny_", "mid_"))]
LONG = [name for name in NAMES if name not in CASES]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_case(name: str) -> None:
    """As for the CPU's own kernels: prefill, decode and batches, the same tolerance."""
    case = load_case(FOLDER / name)
    runner = ds41_tvm.build(
        case.config, case.weights, target="opencl", linear=case.linear, ties=case.ties, keys="published", block_rows=4,
        draft=6,
    )  # fmt: skip
    forward, sequences = runner_forward(case, runner)
    produced = play(case, forward)
    produced.update(runner_caches(case, runner, sequences))
    assert len(produced) > len(runner.layers)
    assert [str(finding) for finding in judge(case, produced)] == []


def test_bits_do_not_depend_on_steps_or_batch() -> None:
    """One prompt at once, in pieces and beside another sequence, over scratch memory full of NaN."""
    config = ds41_tvm.AttentionConfig.preset("tiny")
    runner = ds41_tvm.build(config, ds41_tvm.synthetic_weights(config, "gpu"), target="opencl", block_rows=4, draft=6)
    x = np.stack([ds41_tvm.random_input("gpu", i, 0, 1, 21, config.dim)[0] for i in runner.layers])
    other = np.stack([ds41_tvm.random_input("gpu", i, 1, 1, 7, config.dim)[0] for i in runner.layers])

    def play_in(cuts: list[int], beside: bool) -> list[np.ndarray]:
        sequence, neighbour = runner.new_sequence(), runner.new_sequence()
        outputs = []
        for begin, end in pairwise(cuts):
            runner.workspace.fill(0xFF)
            parts = [(neighbour, 7), (sequence, end - begin)] if beside else [(sequence, end - begin)]
            step = runner.step(parts)
            rows = []
            for i, layer in enumerate(runner.layers):
                given = np.concatenate([other[i], x[i, begin:end]]) if beside else x[i, begin:end]
                rows.append(runner.forward(layer, given, step)[-(end - begin) :].copy())
            runner.commit(step)
            outputs.append(np.stack(rows))
        caches = [sequence.window_cache(layer) for layer in runner.layers]
        caches += [sequence.compress_kv_cache(i) for i in runner.layers if config.role(i).kind == "full"]
        return [np.concatenate(outputs, axis=1), *caches]

    whole = play_in([0, 21], False)
    assert (whole[0] & 0x7FFF).max() < 0x7F80
    for cuts, beside in (([0, 1, 2, 18, 21], False), ([0, 20, 21], True)):
        for got, expected in zip(play_in(cuts, beside), whole, strict=True):
            np.testing.assert_array_equal(got, expected)
