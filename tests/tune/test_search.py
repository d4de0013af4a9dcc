"""The search itself, with made-up times instead of measured ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ds41_tvm.program import kernel
from ds41_tvm.target import parse_target
from ds41_tvm.tune import worker
from ds41_tvm.tune.database import RECORDS, open_database
from ds41_tvm.tune.finish import choose
from ds41_tvm.tune.search import Search
from ds41_tvm.tune.task import Values, task_of

MANY = kernel("linear", n=64, k=64, groups=1, weight="bf16", out="bf16", total="f32", tile=64, form="fma", rows=6)
ONE = kernel("linear", n=64, k=64, groups=1, weight="bf16", out="bf16", total="f32", tile=64, form="fma", rows=1)


def seconds(values: Values) -> float:
    """Least at tile 16, and at the default of every other knob."""
    distance = abs(math.log2(values.get("tile", 16) / 16)) + abs(math.log2(values.get("rows", 6) / 6))
    return 1e-3 * (1 + distance)


class Bench:
    """Takes `seconds` for every candidate; those of tile 8 do not build."""

    def __init__(self) -> None:
        worker.prepare()
        self.seen: list[Values] = []

    def build(self, inputs: list[Any]) -> list[Any]:
        from tvm.s_tir.meta_schedule.builder import BuilderResult

        out = []
        for one in inputs:
            values = worker.values_of(one.mod)
            self.seen.append(values)
            wrong = values["tile"] == 8
            out.append(BuilderResult(None, "no such tile") if wrong else BuilderResult(f"/none/{len(self.seen)}", None))
        return out

    def run(self, jobs: list[Any], use: Any = None) -> list[Any]:
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        return [RunnerResult([seconds(self.seen[int(path.rpartition("/")[2]) - 1])], None) for path, *_ in jobs]


def search(folder: Path, bench: Any, k: Any = MANY, model: Any = "random") -> Search:
    folder.mkdir(exist_ok=True)
    identity = worker.Identity(k, parse_target("cpu:x86-64-v3"), "program", "tvm", 1, "here", "cases")
    return Search(task_of(k, "cpu"), identity, open_database(folder)[0], bench, model)


@pytest.mark.parametrize("model", ["random", "xgb"])
def test_a_search_finds_the_best_and_goes_on_where_it_was(tmp_path: Path, model: str) -> None:
    if model == "xgb":
        pytest.importorskip("xgboost")
    bench = Bench()
    first = search(tmp_path / "db", bench, model=model)
    assert first.step(8) == 1
    assert bench.seen == [first.task.default], "the default program comes first"
    while len(first.times) < 25:
        assert first.step(8)
    second = search(tmp_path / "db", bench, model=model)
    assert second.times == first.times
    while len(second.times) < 60:
        assert second.step(8)
    points = [tuple(v.items()) for v in bench.seen]
    assert len(points) == len(set(points)) == len(second.times), "nothing is measured twice"
    best = second.best()
    assert best is not None
    assert best[1] <= seconds({"tile": 16, "rows": 8})
    assert all(values["tile"] != 8 for values, _ in second.ranked()), "what did not build is no choice"
    assert second.default_seconds() == seconds(second.task.default)
    assert "no such tile" in second.first_error


def test_a_small_space_is_measured_whole(tmp_path: Path) -> None:
    bench = Bench()
    made = search(tmp_path / "db", bench, ONE)
    while made.step(8):
        pass
    assert made.exhausted
    assert len(bench.seen) == made.task.combinations


@pytest.mark.parametrize("end", ["torn", "no newline"])
def test_what_a_kill_leaves_of_a_line_costs_that_line_only(tmp_path: Path, end: str) -> None:
    bench = Bench()
    made = search(tmp_path / "db", bench)
    made.step(8)
    made.step(8)
    path = tmp_path / "db" / RECORDS
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:50] if end == "torn" else whole.rstrip("\n"))
    _, report = open_database(tmp_path / "db")
    assert len(report) == (end == "torn")
    assert path.read_text() == whole
    again = search(tmp_path / "db", bench)
    assert again.times == made.times
    again.step(8)
    assert search(tmp_path / "db", bench).times == again.times


def test_another_program_is_another_search(tmp_path: Path) -> None:
    bench = Bench()
    made = search(tmp_path / "db", bench)
    made.step(8)
    identity = worker.Identity(MANY, parse_target("cpu:x86-64-v3"), "changed", "tvm", 1, "here", "cases")
    other = Search(task_of(MANY, "cpu"), identity, open_database(tmp_path / "db")[0], bench, "random")
    assert other.times == {}


def test_two_kernels_of_a_layer_get_one_packing_width(tmp_path: Path) -> None:
    """One row is fastest with 32 columns, many rows with 16 by far: both get 16."""
    bench = Bench()
    one, many = (search(tmp_path / name, bench, k) for name, k in (("one", ONE), ("many", MANY)))
    key = [name for name, _ in one.task.knobs].index("tile")
    for point in ((32,), (16,)):
        values = one.task.default | {"tile": point[0]}
        one.times[tuple(values.values())] = 1.0 if point[0] == 32 else 1.1
        many.times[tuple((many.task.default | {"tile": point[0]}).values())] = 3.0 if point[0] == 32 else 1.0
    assert one.best()[0]["tile"] == 32  # type: ignore[index]
    assert key == 0
    first = choose([one, many])[0]
    assert [values["tile"] for values in first] == [16, 16]
