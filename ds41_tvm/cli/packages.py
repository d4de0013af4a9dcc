"""Which packages this one declares, which of them are installed, and whether their versions fit."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ds41_tvm.errors import UsageError

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?(?P<spec>[^;)]*)\)?(?:;(?P<marker>.*))?", re.ASCII)
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")


@dataclass(frozen=True)
class Requirement:
    """One declared package: ``wanted`` as in ``>=2.0``, ``extra`` None where every installation needs it."""

    name: str
    wanted: str
    extra: str | None

    @property
    def version(self) -> str | None:
        """The installed version, None where there is none."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    @property
    def fits(self) -> bool:
        """Whether a version is installed that ``wanted`` allows."""
        version = self.version
        return version is not None and allows(self.wanted, version)


def requirements() -> list[Requirement]:
    """What ``pyproject.toml`` declares: from the installed package or, in a source folder, from the file."""
    try:
        lines = metadata.requires("ds41-tvm") or []
    except metadata.PackageNotFoundError:
        lines = _from_source(Path(__file__).resolve().parents[2] / "pyproject.toml")
    return [parse_requirement(line) for line in lines]


def _from_source(file: Path) -> list[str]:
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    except OSError:
        raise UsageError("ds41-tvm is not installed, so what it needs is unknown: pip install ds41-tvm") from None
    lines: list[str] = list(project["dependencies"])
    for extra, needs in project["optional-dependencies"].items():
        lines += [f'{need}; extra == "{extra}"' for need in needs]
    return lines


def parse_requirement(line: str) -> Requirement:
    """A requirement as metadata spells it: ``name[extra]>=1; extra == "tune"``."""
    match = _REQUIREMENT.fullmatch(line.strip())
    if match is None:
        raise UsageError(f"requirement {line!r}: not understood; expected such as name>=1.0")
    extra = _EXTRA.search(match["marker"] or "")
    return Requirement(match["name"], match["spec"].strip(), extra[1] if extra else None)


def allows(wanted: str, version: str) -> bool:
    """Whether ``version`` fits all of ``wanted``: comma-separated clauses with ``==``, ``>=`` or ``<``."""
    for clause in filter(None, (part.strip() for part in wanted.split(","))):
        match = re.fullmatch(r"(==|>=|<)\s*([\w.+]+)", clause)
        if match is None:
            raise UsageError(f"version clause {clause!r}: not understood; expected ==, >= or < and a version")
        # A local label such as +cpu does not count unless it is asked for.
        mine = version if "+" in match[2] else version.partition("+")[0]
        if match[1] == "==":
            good = _release(mine) == _release(match[2])
        elif match[1] == ">=":
            good = _release(mine) >= _release(match[2])
        else:
            good = _release(mine) < _release(match[2])
        if not good:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, trailing zeros dropped: enough to order final and post releases."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
