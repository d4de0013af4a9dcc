"""Tuning records as files: one folder per target with ``records.json`` and ``environment.json``.

``records.json`` is a JSON array with one record a line, each with a checksum of its own: what a crash or an editor
spoils is found by name, and the other records stay usable. ``environment.json`` says on what machine they were made.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ds41_tvm.errors import TuneError
from ds41_tvm.program import Value
from ds41_tvm.target import Target

FILE, ENVIRONMENT = "records.json", "environment.json"
_KERNEL = re.compile(r'"kernel":\s*"([^"]{1,300})"')


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The knobs that were fastest for one kernel.

    `kernel`: name without what may be chosen, see `Task.name`; `ir`: digest of the program that `knobs` make;
    `target`, `tvm`: for and with which it was measured; `before`, `after`: seconds of the default program and of this
    one, taken in turn, on inputs as in `case`; `limit`: what bounds such a kernel, see `bench.limits`, of which the two
    programs reach `share_before` and `share_after`; `checked`: it gave the same bits as the default program;
    `environment`: key in ``environment.json``.
    """

    kernel: str
    op: str
    sizes: dict[str, Value]
    knobs: dict[str, int]
    ir: str
    target: str
    tvm: str
    case: str
    before: float
    after: float
    limit: str
    share_before: float
    share_after: float
    checked: bool
    trials: int
    environment: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the record in canonical JSON."""
        return digest(msgspec.to_builtins(self))

    @property
    def name(self) -> str:
        """How artefacts name the record: its target's folder, kernel and the beginning of its checksum."""
        return f"{folder_name(self.target)}/{self.kernel}#{self.checksum[7:19]}"


class Found(msgspec.Struct, frozen=True):
    """What a folder holds: records by kernel, and a sentence for everything that could not be used."""

    records: dict[str, Record]
    problems: tuple[str, ...]


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def folder_name(target: Target | str) -> str:
    """Name of a target's folder, such as ``x86-64-v4+avx512vnni``; ``cuda-sm_90`` for GPUs."""
    kind, _, level = (target if isinstance(target, str) else target.name).partition(":")
    return level if kind == "cpu" else f"{kind}-{level}"


def read(folder: Path) -> Found:
    """Records of a folder; of an absent one none. What is damaged is left out and named, never fatal."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return Found({}, ())
    except OSError as error:
        return Found({}, (f"{path}: cannot be read ({error}); no tuning record is used",))
    records: dict[str, Record] = {}
    problems = []
    lines = text.splitlines()
    whole = bool(lines) and lines[0].strip() == "[" and lines[-1].strip() == "]"
    if not whole:
        problems.append(f"{path}: is cut off or was changed; expected an array with one record a line; tune again")
    for number, line in enumerate(lines, 1):
        stripped = line.strip().rstrip(",")
        if stripped in ("", "[", "]"):
            continue
        record = _parse(stripped)
        if isinstance(record, str):
            named = _KERNEL.search(stripped)
            which = f"record of {named[1]}" if named else "a record"
            problems.append(f"{path}:{number}: {which}: {record}; it is not used: tune that kernel again")
        else:
            records[record.kernel] = record
    return Found(records, tuple(problems))


def _parse(text: str) -> Record | str:
    """The record, or what is wrong with it."""
    try:
        values = msgspec.json.decode(text)
        stated = values.pop("checksum", None) if isinstance(values, dict) else None
        record = msgspec.convert(values, Record)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return f"damaged ({error})"
    if stated != record.checksum:
        return f"changed after it was written (its checksum is {record.checksum[:19]}…, it states {str(stated)[:19]}…)"
    return record


def save(folder: Path, new: Iterable[Record], environment: Mapping[str, Any]) -> None:
    """Put records into a folder's files, in place of older ones of the same kernels; each file changes at once.

    Several processes may save into one folder; damaged records that were there are dropped.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            records = read(folder).records | {record.kernel: record for record in new}
            known = _environments(folder) | dict(environment)
            used = {record.environment for record in records.values()}
            kept = {key: value for key, value in sorted(known.items()) if key in used}
            _write(folder / ENVIRONMENT, json.dumps(kept, indent=1) + "\n")
            lines = (
                json.dumps({**msgspec.to_builtins(record), "checksum": record.checksum})
                for _, record in sorted(records.items())
            )
            _write(folder / FILE, "[\n" + ",\n".join(lines) + "\n]\n")
    except OSError as error:
        raise TuneError(f"{folder}: records cannot be written ({error}); give another folder with --out") from error


def _environments(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
