"""Progress bars on standard error while something long runs; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

# (what is being done, how much of it is done, how much there is)
Report = Callable[[str, int, int], None]


@contextmanager
def progress(prefix: str = "") -> Iterator[Report]:
    """Shows one bar per kind of work that is reported, in the order in which they come; gone when done."""
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not sys.stderr.isatty(),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(f"{prefix} {what}".strip(), total=total)
        bar.update(tasks[what], completed=done, total=total)

    with bar:
        yield report
