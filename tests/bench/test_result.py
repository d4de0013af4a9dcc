"""Results: JSON there and back, and the comparison of two of them."""

from __future__ import annotations

import json

import msgspec
import pytest

from ds41_tvm.bench.machine import describe
from ds41_tvm.bench.result import (
    PeerTime,
    Result,
    Row,
    changes,
    read_result,
    regressions,
    spread,
    write_result,
)
from ds41_tvm.bench.work import Work
from ds41_tvm.errors import UsageError


def row(name, seconds, share, **ratios):
    return Row(
        name=name,
        what="decode",
        layer=2,
        role="full",
        ratio=2,
        linear="bf16",
        context=1024,
        seconds=spread([seconds, 2 * seconds, 1.5 * seconds]),
        work=Work(1e9, 1e6, 1e8),
        share=share,
        limit="read",
        floor=share * 1.5 * seconds,
        of={"read": share},
        peers={peer: PeerTime(spread([1.0]), ratio) for peer, ratio in ratios.items()},
        skipped={"onnxruntime": "would take long"},
    )


def result(*rows, **more):
    fields = {"isa": "host", "target": "cpu:x86-64-v3"} | more
    return Result(
        version="0",
        date="2026-01-01",
        machine=describe(),
        config_digest="sha256:0",
        layers=(0, 2),
        linear=("bf16",),
        threads=2,
        libraries={"tvm": "0"},
        limits={"read": spread([1e10, 2e10])},
        memory={"ours": 1},
        rows=list(rows),
        skipped={"decode 1M": "the time limit was reached"},
        **fields,
    )


def test_spread():
    s = spread([3.0, 1.0, 2.0, 4.0])
    assert (s.median, s.q1, s.q3, s.low, s.high, s.samples) == (2.5, 1.75, 3.25, 1.0, 4.0, 4)
    assert spread([5.0]).q1 == 5.0


def test_json_there_and_back(tmp_path):
    made = result(row("a", 1.0, 0.5, torch=2.0))
    write_result(made, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == made
    assert json.loads((tmp_path / "r.json").read_text())["machine"]["features"] == list(describe().features)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.update(schema=2), "schema"),
        (lambda d: d["rows"][0].update(surprise=1), "surprise"),
        (lambda d: d["rows"][0]["seconds"].pop("median"), "median"),
        (lambda d: d["limits"].update(read=3), "limits"),
    ],
)
def test_files_of_another_form_are_refused_by_name(tmp_path, change, told):
    path = tmp_path / "r.json"
    data = msgspec.to_builtins(result(row("a", 1.0, 0.5)))
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=f"(?s)r.json.*{told}"):
        read_result(path)


def test_files_that_are_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="expected a result of bench --json"):
        read_result(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        write_result(result(), tmp_path / "no" / "r.json")


def test_a_regression_is_a_ratio_that_fell_by_more_than_the_factor():
    before = result(row("a", 1.0, 0.6, torch=4.0), row("b", 1.0, 0.5, torch=2.0))
    now = result(row("a", 50.0, 0.59, torch=2.9), row("b", 0.01, 0.3, torch=2.1))
    compared = changes(now, before)
    assert {(c.row, c.what) for c in compared} == {("a", "share"), ("a", "torch"), ("b", "share"), ("b", "torch")}
    worse = regressions(compared, 1.3)
    assert {(c.row, c.what) for c in worse} == {("a", "torch"), ("b", "share")}  # never the times
    assert not regressions(compared, 2.0)
    assert not regressions(changes(before, now), 1.3)  # the other way they are gains


def test_only_what_both_have_is_compared():
    before = result(row("a", 1.0, 0.6, torch=4.0), row("b", 1.0, 0.5))
    assert [c.what for c in changes(result(row("a", 1.0, 0.6, onnxruntime=1.0)), before)] == ["share"]
    # Peers held to other instructions are other peers.
    assert [c.what for c in changes(result(row("a", 1.0, 0.6, torch=4.0), isa="avx512"), before)] == ["share"]
    with pytest.raises(UsageError, match="no ratio in common"):
        changes(result(row("c", 1.0, 0.6)), before)
    with pytest.raises(UsageError, match="same target"):
        changes(result(row("a", 1.0, 0.6), target="cpu:x86-64-v4"), before)
