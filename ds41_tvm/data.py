"""Where the data files that come with the package lie."""

from __future__ import annotations

from pathlib import Path


def schedules_dir() -> Path:
    """The folder of tuning records: inside the installed package, or beside it in the repository.

    The wheel carries it as ``ds41_tvm/schedules``; in an editable install the package is the one in the
    repository, where ``schedules`` lies next to it. An absent folder means that there are no records.
    """
    package = Path(__file__).resolve().parent
    inside = package / "schedules"
    return inside if inside.is_dir() else package.parent / "schedules"
