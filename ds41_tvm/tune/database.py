"""MetaSchedule's database of measurements in a folder, opened safely: what a crash or an editor spoiled is left out."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds41_tvm.errors import TuneError

WORKLOADS, RECORDS, BUILT = "database_workload.json", "database_tuning_record.json", "built"


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """The folder, made if absent, for this process alone. Raises TuneError if another one tunes in it."""
    try:
        (folder / BUILT).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TuneError(f"{folder}: cannot be used ({error}); give another folder with --work") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TuneError(f"{folder}: another process tunes in it; wait for it, or give another --work") from error
        for left in (folder / BUILT).iterdir():  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield folder
    finally:
        os.close(descriptor)


def open_database(folder: Path) -> tuple[Any, list[str]]:
    """MetaSchedule's JSONDatabase of the folder, and a sentence about everything that was left out of it.

    Each file holds one JSON value a line, added line by line: a process that is killed leaves at most a torn last line.
    """
    from tvm.s_tir import meta_schedule as ms

    workloads, records = folder / WORKLOADS, folder / RECORDS
    known, problems = _lines(workloads, lambda value: isinstance(value, list) and len(value) == 2)
    count = len(known)
    # A record names its workload by number: behind a lost workload, numbers would mean others.
    first_lost = problems[0] - 1 if problems else count
    kept, lost = _lines(
        records, lambda v: isinstance(v, list) and len(v) == 2 and isinstance(v[0], int) and 0 <= v[0] < first_lost
    )
    for path, good, bad in ((workloads, known[:first_lost], problems), (records, kept, lost)):
        if bad or (path == workloads and first_lost < count) or _unfinished(path):
            _replace(path, good)
    report = [
        f"{path}:{number}: damaged measurement, left out"
        for path, bad in ((workloads, problems), (records, lost))
        for number in bad
    ]
    for path in (workloads, records):
        path.touch()
    try:
        return ms.database.JSONDatabase(work_dir=str(folder)), report
    except Exception as error:  # noqa: BLE001 - lines that are JSON but no trace fail in whatever way they do
        for path in (workloads, records):
            os.replace(path, path.with_name(path.name + ".damaged"))
            path.touch()
        reason = str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__
        report.append(f"{records}: cannot be read ({reason}); set aside as {records.name}.damaged, beginning anew")
        return ms.database.JSONDatabase(work_dir=str(folder)), report


def _unfinished(path: Path) -> bool:
    """Whether the last line lacks its end: the next one would be added to it."""
    return path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")


def _lines(path: Path, good: Callable[[Any], bool]) -> tuple[list[str], list[int]]:
    """(good lines, numbers of the others)."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    kept: list[str] = []
    lost: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fine = good(json.loads(line))
        except ValueError:
            fine = False
        if fine:
            kept.append(line)
        else:
            lost.append(number)
    return kept, lost


def _replace(path: Path, lines: list[str]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(new, path)
