"""Records on disk: whole, spoiled, written by several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ds41_tvm.errors import TuneError
from ds41_tvm.target import parse_target
from ds41_tvm.tune import records
from ds41_tvm.tune.records import Record

MACHINE = {"here": {"machine": {"cpu": "one"}}}


def made(kernel: str, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "kernel": kernel, "op": "rope", "sizes": {"heads": 2}, "knobs": {"lanes": 8}, "ir": "structural:00",
        "target": "cpu:x86-64-v3", "tvm": "0", "case": "256 token(s)", "before": 2e-6, "after": 1.5e-6, "limit": "read",
        "share_before": 0.25, "share_after": 0.5, "checked": True, "trials": 5, "environment": "here",
    }  # fmt: skip
    return Record(**fields | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three records, named a, b and c."""
    records.save(tmp_path / "x", [made(name) for name in "abc"], MACHINE)
    return tmp_path / "x"


def test_round_trip(folder: Path) -> None:
    found = records.read(folder)
    assert found.problems == ()
    assert found.records == {name: made(name) for name in "abc"}
    assert json.loads((folder / "environment.json").read_text()) == MACHINE
    assert [r["kernel"] for r in json.loads((folder / "records.json").read_text())] == ["a", "b", "c"]
    assert sorted(p.name for p in folder.iterdir()) == ["environment.json", "records.json"]


def test_new_records_replace_those_of_the_same_kernel(folder: Path) -> None:
    records.save(folder, [made("b", knobs={"lanes": 4}, environment="there")], {"there": {"machine": {"cpu": "two"}}})
    found = records.read(folder).records
    assert found["b"].knobs == {"lanes": 4}
    assert found["a"] == made("a")
    assert set(json.loads((folder / "environment.json").read_text())) == {"here", "there"}
    records.save(folder, [made(name, environment="there") for name in "ac"], {})
    assert set(json.loads((folder / "environment.json").read_text())) == {"there"}


def test_an_absent_folder_has_no_records(tmp_path: Path) -> None:
    assert records.read(tmp_path / "none") == records.Found({}, ())


def test_an_edited_record_is_named_and_left_out(folder: Path) -> None:
    path = folder / "records.json"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"lanes": 8', '"lanes": 4')
    path.write_text("\n".join(lines) + "\n")
    found = records.read(folder)
    assert set(found.records) == {"a", "c"}
    (problem,) = found.problems
    assert "records.json:3" in problem
    assert "record of b" in problem
    assert "changed after it was written" in problem


@pytest.mark.parametrize("change", ["unknown", "type", "no checksum"])
def test_a_record_of_another_form_is_named(folder: Path, change: str) -> None:
    path = folder / "records.json"
    values = json.loads(path.read_text())
    if change == "unknown":
        values[1]["more"] = 1
    elif change == "type":
        values[1]["trials"] = "many"
    else:
        del values[1]["checksum"]
    path.write_text("[\n" + ",\n".join(map(json.dumps, values)) + "\n]\n")
    found = records.read(folder)
    assert set(found.records) == {"a", "c"}
    assert "record of b" in found.problems[0]


@pytest.mark.parametrize("part", [0, 0.001, 0.1, 0.5, 0.9])
def test_a_file_cut_off_anywhere_keeps_its_whole_records(folder: Path, part: float) -> None:
    path = folder / "records.json"
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    found = records.read(folder)
    assert found.problems
    assert "records.json" in found.problems[0]
    assert list(found.records) == list("abc")[: int(3 * part)]
    assert all(found.records[name] == made(name) for name in found.records)
    records.save(folder, [made("d")], MACHINE)  # and it is whole again
    assert records.read(folder).problems == ()


def test_garbage_is_no_error(folder: Path) -> None:
    (folder / "records.json").write_bytes(bytes(range(256)) * 3)
    found = records.read(folder)
    assert found.records == {}
    assert found.problems


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match="--out"):
        records.save(tmp_path / "file" / "x", [made("a")], MACHINE)


def test_names() -> None:
    assert records.folder_name(parse_target("cpu:x86-64-v4+vnni")) == "x86-64-v4+avx512vnni"
    assert records.folder_name(parse_target("cuda:sm_90")) == "cuda-sm_90"
    assert made("a").name == f"x86-64-v3/a#{made('a').checksum[7:19]}"
    assert made("a").checksum != made("a", trials=6).checksum
    assert msgspec.convert(msgspec.to_builtins(made("a")), Record) == made("a")
