"""Which rule makes the program of a kernel."""

from __future__ import annotations

import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.kernels import FACTORIES
from ds41_tvm.program import Kernel, Program
from ds41_tvm.schedule.cpu import RULES, schedule
from ds41_tvm.target import parse_target

CONFIG = AttentionConfig.preset("tiny")


def kernels(target: str, **options: str) -> tuple[Kernel, ...]:
    return Program(config=CONFIG, layers=tuple(range(6)), target=parse_target(target), **options).kernels()  # type: ignore[arg-type]


def test_a_rule_for_every_operator_and_none_in_vain() -> None:
    """On a machine with tile registers every rule has something to do; without, all but those for tiles."""
    one_of_each = {
        k.op: k for k in (*kernels("cpu:x86-64-v4+amx", ties="torch-cpu", linear="bf16"), *kernels("cpu:x86-64-v3"))
    }
    one_of_each |= {"quantize_activation": Kernel("quantize_activation", (("dim", 64),))}
    assert set(one_of_each) == set(FACTORIES)
    used = {op: schedule(k)[0] for op, k in one_of_each.items()}
    assert used["index_scores"] == "index-scores"
    assert used["rms_norm"] == "rowwise"
    assert set(used.values()) <= {rule.name for rule in RULES}
    assert RULES[-1][0] == "rowwise"


@pytest.mark.parametrize(("target", "rule"), [("cpu:x86-64-v3", "linear-row"), ("cpu:x86-64-v4+amx", "linear-amx")])
def test_linear_layers_follow_the_target(target: str, rule: str) -> None:
    """The widest one: 128 columns of 16 inputs cannot use tiles, 64 of 32 can."""
    linear = next(k for k in kernels(target) if k.op == "linear" and dict(k.params)["k"] == 32)
    assert schedule(linear)[0] == rule


def test_programs_do_not_depend_on_when_they_are_made() -> None:
    for k in kernels("cpu:x86-64-v3")[:3]:
        assert str(schedule(k)[1]) == str(schedule(k)[1])
