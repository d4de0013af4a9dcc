"""What the verbs print: tables for people, JSON for programs; never markup made from data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 120  # characters a line where the output is no terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises, where rich would exit with code 1, which here means that a check failed."""
        raise BrokenPipeError


def console() -> Console:
    """A console on standard output. Square brackets in text stay as they are."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return _Console(markup=False, highlight=False, emoji=False, width=width)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """A table of ``rows``; columns of numbers are aligned to the right, ``None`` is an empty cell."""
    rows = list(rows)
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        cells = [row[number] for row in rows if row[number] is not None]
        numeric = bool(cells) and all(isinstance(cell, int | float) for cell in cells)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*("" if cell is None else _cell(cell) for cell in row))
    return made


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_json(value: Mapping[str, Any]) -> None:
    """``value`` as one JSON object on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def byte_size(count: int) -> str:
    """``count`` bytes for people: ``890 B``, ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
