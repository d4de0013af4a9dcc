"""Tuning runs: interrupted, killed, resumed; a wrong winner; limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds41_tvm.cli import run
from ds41_tvm.errors import TuneError, UsageError
from ds41_tvm.program import Kernel
from ds41_tvm.tune import finish, records, session, worker
from ds41_tvm.tune.database import RECORDS, WORKLOADS, open_database, work_folder
from ds41_tvm.tune.session import Options, chosen_units, tune

SOURCE = str(Path(__file__).parents[2])
KERNELS = "rope__heads_1_*,pack_rows*"  # five programs each
ARGUMENTS = ("--config", "tiny", "--layers", "0", "--target", "cpu:x86-64-v3", "--threads", "1", "--kernels", KERNELS)


def lines(work: Path) -> list[str]:
    path = work / RECORDS
    return path.read_text().splitlines() if path.exists() else []


def start(work: Path, out: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from ds41_tvm.cli import main; main()"
    more = ("--work", str(work), "--out", str(out), "--trials", "5")
    path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", code, "tune", *ARGUMENTS, *more], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def wait_for(work: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while len(lines(work)) < count:
        assert process.poll() is None, process.stderr.read() if process.stderr else b""
        assert time.monotonic() < end
        time.sleep(0.02)


def options(tmp_path: Path, **changes: Any) -> Options:
    fields: dict[str, Any] = {
        "trials": 5, "kernels": tuple(KERNELS.split(",")), "out": tmp_path / "out", "work": tmp_path / "work",
    }  # fmt: skip
    return Options(**fields | changes)


def test_killed_and_resumed(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels: one of them gets a program that computes something else."""
    out, work = tmp_path / "out", tmp_path / "work"
    killed = start(work, out)
    wait_for(work, 1, killed)
    killed.kill()
    killed.wait()
    after_kill = lines(work)
    assert all(json.loads(line) for line in after_kill[:-1])

    right = finish.Finish.built

    def wrong_rotation(self: Any, kernels: Any) -> Any:
        turned = [Kernel(k.op, tuple((n, 1 if n == "inverse" else v) for n, v in k.params), k.knobs) for k in kernels]
        return right(self, [kernels[0], *turned[1:]])

    monkeypatch.setattr(finish.Finish, "built", wrong_rotation)
    told: list[session.Progress] = []
    outcome = tune(program(), options(tmp_path), told.append)
    monkeypatch.undo()
    assert not outcome.out_of_time
    assert told[0].trials > 0, "the first kernel goes on where it was"
    measured = [json.loads(line) for line in lines(work)]
    assert len(measured) == 10, "two kernels of five programs: each measured once over all runs"
    assert len({json.dumps([record[0], record[1][0]]) for record in measured}) == 10
    assert not any((work / "built").iterdir())

    (message,) = outcome.refused
    assert "rope__heads_1" in message
    assert "gives other results than the default program" in message
    (made,) = outcome.saved
    assert made.op == "pack_rows"
    found = records.read(out / "x86-64-v3")
    assert found == records.Found({made.kernel: made}, ())
    assert made.checked
    assert made.trials == 5
    assert 0 < made.after <= made.before
    assert 0 < made.share_before <= made.share_after

    def no_bench(*_: Any) -> Any:
        raise AssertionError("a run whose records hold measures nothing")

    monkeypatch.setattr(session, "Bench", no_bench)
    again = tune(program(), options(tmp_path, kernels=("pack_rows*",)))
    assert (again.saved, again.held) == ([], [made])


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    """The command ends with its exit code for an interruption, and what it measured is there."""
    process = start(tmp_path / "work", tmp_path / "out")
    wait_for(tmp_path / "work", 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert all(json.loads(line) for line in lines(tmp_path / "work"))
    worker.prepare()
    database, report = open_database(tmp_path / "work")
    assert report == []
    assert len(database) == len(lines(tmp_path / "work"))


@pytest.mark.parametrize("damage", ["torn", "edited record", "edited workload", "not a trace"])
def test_a_damaged_database_is_reported_and_survives(tmp_path: Path, damage: str) -> None:
    worker.prepare()
    work = tmp_path
    (work / WORKLOADS).write_text("")
    good = '[0, [[[], []], [0.5], {"kind": "llvm"}, []]]'
    bad = {"torn": good[:20], "edited record": '{"a": 1}', "edited workload": good, "not a trace": '[0, ["x"]]'}[damage]
    (work / WORKLOADS).write_text("" if damage == "torn" else '["1", 7]\n' if damage == "not a trace" else "garbage\n")
    (work / RECORDS).write_text(bad)
    database, report = open_database(work)
    assert len(database) == 0
    assert report
    assert all(str(work) in line for line in report)
    assert open_database(work)[1] == []


def test_two_processes_do_not_share_a_work_folder(tmp_path: Path) -> None:
    with (
        work_folder(tmp_path / "w"),
        pytest.raises(TuneError, match="another process tunes in it"),
        work_folder(tmp_path / "w"),
    ):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match="--work"), work_folder(tmp_path / "file"):
        pass


def test_no_time_at_all(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun that the limit leaves no time for."""

    class NoBench:
        place = "here"

        def __init__(self, *_: Any) -> None:
            worker.prepare()

        def close(self) -> None:
            pass

    monkeypatch.setattr(session, "Bench", NoBench)
    outcome = tune(program(), options(tmp_path, seconds=0.001))
    assert outcome.out_of_time
    assert outcome.saved == []
    assert lines(tmp_path / "work") == []


def test_choosing_kernels(program: Any) -> None:
    p = program()
    every = chosen_units(p, ("*",))
    assert {t.kernel.op for u in chosen_units(p, ("linear",)) for t in u.tasks} == {"linear"}
    assert len(chosen_units(p, ("rope__heads_1_*",))) == 1
    assert sum(len(chosen_units(p, (op,))) for op in {u.tasks[0].kernel.op for u in every}) == len(every)
    with pytest.raises(UsageError, match="matches none of the"):
        chosen_units(p, ("rop",))


def test_a_target_that_is_not_here(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds41_tvm import target

    monkeypatch.setattr(target, "host_features", lambda: ())
    with pytest.raises(TuneError, match="this machine lacks"):
        tune(program(), options(tmp_path))


def test_the_command_lists_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["tune", *ARGUMENTS, "--dry-run", "--json", "--out", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["target"] == "cpu:x86-64-v3"
    assert len(listed["kernels"]) == 2
    assert all(k["knobs"] == {"lanes": [16, 4, 8, 32, 64]} and not k["record"] for k in listed["kernels"])
