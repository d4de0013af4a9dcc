"""Targets as text, and what this machine is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ds41_tvm.cpu_features import LEVELS, host_features, host_level
from ds41_tvm.errors import TargetError
from ds41_tvm.target import Target, parse_target


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cpu:x86-64", "cpu:x86-64"),
        ("cpu:x86-64-v3", "cpu:x86-64-v3"),
        ("cpu:x86-64-v4+vnni", "cpu:x86-64-v4+avx512vnni"),
        ("cpu:x86-64-v4+vbmi+vnni+vnni", "cpu:x86-64-v4+avx512vbmi+avx512vnni"),
        ("cpu:x86-64-v4+amx", "cpu:x86-64-v4+amx-bf16+amx-tile"),
        ("cpu:generic", "cpu:generic"),
        ("cuda:sm_80", "cuda:sm_80"),
        ("cuda:sm_90", "cuda:sm_90"),
        ("opencl", "opencl:generic"),
    ],
)
def test_canonical_names_parse_to_themselves(text: str, name: str) -> None:
    target = parse_target(text)
    assert target.name == name
    assert parse_target(name) == target


def test_this_machine() -> None:
    for text in ("cpu", "cpu:native", "cpu:"):
        target = parse_target(text)
        assert target.missing_here() == ()
        assert parse_target(target.name) == target
        assert set(target.features) <= set(host_features())


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gpu", "unknown kind 'gpu'"),
        ("", "unknown kind"),
        ("CPU", "unknown kind"),
        ("cpu:x86-64-v5", "did you mean 'x86-64-v"),
        ("cpu:x86-64-v4+vnnni", "did you mean"),
        ("cpu:x86-64-v4+", "unknown feature ''"),
        ("cpu:skylake", "expected one of"),
        ("cuda", "unknown architecture ''; expected one of sm_80"),
        ("cuda:sm_91", "did you mean 'sm_90'"),
        ("cuda:sm_75", "expected one of sm_80"),
        ("cuda:sm_90+wgmma", "unknown architecture"),
        ("opencl:1.2", "expected opencl, which has none"),
    ],
)
def test_unknown_words(text: str, hint: str) -> None:
    with pytest.raises(TargetError, match=hint):
        parse_target(text)


def test_levels_contain_each_other_and_are_what_has_says() -> None:
    levels = list(LEVELS.values())
    for lower, higher in pairwise(levels):
        assert set(lower) < set(higher)
    v3 = parse_target("cpu:x86-64-v3+vnni")
    assert v3.has("avx2")
    assert v3.has("avx512vnni")
    assert not v3.has("avx512f")
    assert not parse_target("cpu:generic").has("avx2")


def test_what_a_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds41_tvm.target.host_features", lambda: tuple(sorted(LEVELS["x86-64-v2"])))
    assert parse_target("cpu:x86-64-v2").missing_here() == ()
    assert "avx2" in parse_target("cpu:x86-64-v3").missing_here()
    assert Target("cpu", "x86-64-v2", ("amx-tile",)).missing_here() == ("amx-tile",)


def test_the_level_is_the_highest_that_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, features in LEVELS.items():
        monkeypatch.setattr("ds41_tvm.cpu_features.host_features", lambda f=features: f)
        assert host_level() == level
