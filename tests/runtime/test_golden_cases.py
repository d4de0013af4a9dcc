"""The recorded outputs, through compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.compiler.build import compile_program
from ds41_tvm.errors import UsageError
from ds41_tvm.golden import judge, load_case, play
from ds41_tvm.golden.runner import runner_caches, runner_forward
from ds41_tvm.runtime.device_emulated import Emulated
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.target import parse_target

FOLDER = Path(__file__).parents[1] / "golden"
CASES = sorted(p.name for p in FOLDER.glob("*.npz") if p.name.startswith(("tiny_", "mid_", "checkpoint_")))
V3 = "cpu:x86-64-v3"
OLDER = [V3] if not parse_target(V3).missing_here() else []
RUNS = [("cpu", name) for name in CASES]
RUNS += [(target, name) for target in OLDER for name in CASES if not name.startswith("checkpoint")]
DEVICES = {"host": lambda: None, "device": Emulated}


def build(case: Any, target: str, device: Any = None) -> Any:
    """Small cache blocks: what is recorded does not depend on them."""
    runner = ds41_tvm.build(
        case.config,
        case.weights,
        target=target,
        linear=case.linear,
        ties=case.ties,
        keys="published",
        block_rows=4,
        draft=6,
    )
    if device is None:
        return runner
    program = runner.program
    return Runner(program, compile_program(program), case.weights, keys="published", device=device)


def findings(name: str, target: str, device: Any = None) -> list[str]:
    case = load_case(FOLDER / name)
    runner = build(case, target, device)
    forward, sequences = runner_forward(case, runner)
    produced = play(case, forward)
    produced.update(runner_caches(case, runner, sequences))
    recorded = {f"{w}.{layer}" if s is None else f"{w}.{layer}.{s}" for w, layer, s in case.recorded()}
    assert recorded <= set(produced), "the adapter leaves something out"
    return [str(finding) for finding in judge(case, produced)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("target", "name"), RUNS)
def test_case(name: str, target: str, device: str) -> None:
    assert findings(name, target, DEVICES[device]()) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", *OLDER])
def test_released_sizes(target: str) -> None:
    assert findings("flash_dims_prefill200_decode4.npz", target) == []


def test_a_runner_for_something_else_is_refused() -> None:
    case = load_case(FOLDER / "tiny_batch2.lowest-index.npz")
    runner = build(case, "cpu")
    for other in ("mid_prefill150_decode10.npz", "tiny_batch2.npz"):
        with pytest.raises(UsageError, match=r"the runner's .* was recorded with"):
            runner_forward(load_case(FOLDER / other), runner)


def test_own_keys_differ_from_published_ones_in_the_middle_of_a_group_only() -> None:
    """At a decode step that completes no group of layer 2, the official code scores the keys of layer 4."""
    case = load_case(FOLDER / "tiny_prefill12_decode2.lowest-index.npz")
    outputs = []
    for keys in ("own", "published"):
        runner = ds41_tvm.build(case.config, case.weights, keys=keys, block_rows=4, draft=6)
        forward, _ = runner_forward(case, runner)
        outputs.append(play(case, forward))
    own, published = outputs
    differ = {name for name in own if not np.array_equal(own[name], published[name])}
    assert "index_score.2.1" in differ  # token 12, first of its pair
    assert all(name.split(".")[1] in "23" and name.split(".")[2] == "1" for name in differ)
