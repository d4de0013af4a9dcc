"""The reference against the recorded outputs, in both tie modes and both linear modes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds41_tvm.golden import judge, load_case, play, reference_forward
from ds41_tvm.golden.play import reference_caches

FOLDER = Path(__file__).parents[1] / "golden"
FAST = sorted(p.name for p in FOLDER.glob("*.npz") if p.name.startswith(("tiny_", "mid_", "checkpoint_")))


@pytest.mark.parametrize("name", FAST)
def test_case(name: str) -> None:
    case = load_case(FOLDER / name)
    forward, sequences = reference_forward(case)
    produced = play(case, forward)
    produced.update(reference_caches(case, sequences))
    assert [str(finding) for finding in judge(case, produced)] == []
    # Stronger than the rule: what is selected and what is stored is the same bits.
    for what, layer, step in case.recorded():
        if what in ("selection", "window", "o", "out", "q"):
            continue
        got = produced[f"{what}.{layer}" if step is None else f"{what}.{layer}.{step}"]
        np.testing.assert_array_equal(got, case.get(what, layer, step), err_msg=f"{what}.{layer}.{step}")


def test_both_tie_modes_and_both_linear_modes_are_among_the_cases() -> None:
    cases = [load_case(FOLDER / name) for name in FAST]
    assert len(cases) == 10
    assert {case.ties for case in cases} == {"lowest-index", "torch-cpu"}
    assert {case.linear for case in cases} == {"bf16", "fp8"}


def test_the_wrong_tie_rule_is_found() -> None:
    case = load_case(FOLDER / "mid_prefill150_decode10.npz")
    case.ties = "lowest-index"
    forward, _ = reference_forward(case)
    assert any(finding.kind == "selection" for finding in judge(case, play(case, forward)))


@pytest.mark.slow
def test_released_sizes() -> None:
    case = load_case(FOLDER / "flash_dims_prefill200_decode4.npz")
    forward, _ = reference_forward(case)
    assert [str(finding) for finding in judge(case, play(case, forward))] == []
