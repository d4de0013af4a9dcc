"""``ds41-tvm tune``: searches faster programs for kernels and saves records of what it found."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Parameter

from ds41_tvm.cli.options import load_config, parse_layers
from ds41_tvm.cli.output import console, print_json, table
from ds41_tvm.errors import UsageError

if TYPE_CHECKING:
    from ds41_tvm.program import Program
    from ds41_tvm.tune.session import Outcome
    from ds41_tvm.tune.session import Progress as Told

_UNITS = {"s": 1, "m": 60, "h": 3600, "": 1}


def tune(
    *,
    artifact: Path | None = None,
    config: str | None = None,
    layers: str = "all",
    target: str | None = None,
    linear: Literal["bf16", "fp8"] | None = None,
    trials: int = 32,
    time: str | None = None,
    kernels: str = "*",
    rpc: str | None = None,
    key: str | None = None,
    out: Path | None = None,
    work: Path | None = None,
    threads: int | None = None,
    model: Literal["random", "xgb"] = "random",
    plot: Path | None = None,
    again: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Search the knobs of every kernel's program on this machine, or on a fleet, and save what is faster.

    Results do not change: each winner is checked bit by bit before it is saved. Interrupt or kill it as you like: the
    next run goes on where this one stopped. compile and build use the records for their target.

    Parameters
    ----------
    artifact
        Tune the kernels of this artefact: its configuration, layers and target.
    config
        Instead of an artefact: flash, tiny, or a path to a config.json.
    layers
        Layers whose kernels are tuned, such as 0,2,20-24; with --config.
    target
        cpu (this machine, the default), cpu:LEVEL+feature+..., or cuda:sm_NN; with --config.
    linear
        Arithmetic of the linear layers: bf16 (the default) or fp8; with --config.
    trials
        Measurements of a kernel, over all runs.
    time
        Limit of this run, such as 90s, 10m or 2h.
    kernels
        Operators, names or patterns of kernels, separated by commas.
    rpc
        HOST:PORT of an RPC tracker whose servers measure instead of this machine.
    key
        Key that the servers registered with.
    out
        Folder for the records of all targets; by default the one that compile reads.
    work
        Folder for measurements, to go on from; by default one of this target in the user's cache.
    threads
        Threads that kernels run on; by default all.
    model
        What guesses which candidates are worth measuring: random, or xgb, which learns (needs xgboost).
    plot
        Write a chart of all records of the chosen kernels into this file.
    again
        Tune kernels anew whose records hold.
    dry_run
        Only list kernels, knobs and records; for a GPU, which need not be there, also compile every candidate: exit
        code 1 if one does not compile.
    json
        Print the result as JSON.
    """
    if (artifact is None) == (config is None):
        raise UsageError("expected either --artifact PATH or --config NAME")
    if artifact is not None and (layers != "all" or target is not None or linear is not None):
        raise UsageError("--layers, --target and --linear are the artefact's; expected them with --config only")
    if trials < 1:
        raise UsageError(f"--trials {trials}: expected at least 1")
    if key is not None and rpc is None:
        raise UsageError("--key without --rpc: expected the tracker's address too, as --rpc HOST:PORT")
    seconds = parse_time(time)
    patterns = tuple(filter(None, (p.strip() for p in kernels.split(","))))
    program = _program(artifact, config or "", layers, target or "cpu", linear or "bf16")

    from ds41_tvm.runtime.threads import check_threads
    from ds41_tvm.tune import session
    from ds41_tvm.tune.measure import Fleet, require

    if plot is not None:
        require("matplotlib", "--plot", "plot")
    if dry_run and program.target.is_gpu:
        return _compile_all(program, session.chosen_units(program, patterns), json)
    if dry_run:
        return _list(program, session.chosen_units(program, patterns), out, json)
    options = session.Options(
        trials=trials, seconds=seconds, kernels=patterns, out=out, work=work, threads=check_threads(threads),
        model=model, fleet=Fleet.parse(rpc, key) if rpc else None, again=again,
    )  # fmt: skip
    with _bars() as report:
        outcome = session.tune(program, options, report)
    records = sorted([*outcome.saved, *outcome.held], key=lambda r: r.kernel)
    if plot is not None and records:
        from ds41_tvm.tune.plot import plot as draw

        draw(records, plot)
    _show(outcome, records, json)
    return 1 if outcome.refused else 0


def parse_time(text: str | None) -> float:
    """Seconds of ``90s``, ``10m``, ``2h`` or a plain number; infinity for None. Raises UsageError."""
    if text is None:
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--time {text!r}: expected a time above 0, such as 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def _program(artifact: Path | None, config: str, layers: str, target: str, linear: Literal["bf16", "fp8"]) -> Program:
    """The program without earlier choices: they are what is tuned."""
    import msgspec

    if artifact is not None:
        from ds41_tvm.artifact.describe import read_manifest

        return msgspec.structs.replace(read_manifest(artifact)[0].program(), choices=())
    from ds41_tvm.config import closure
    from ds41_tvm.program import Program
    from ds41_tvm.target import parse_target

    aim = parse_target(target)
    sizes = load_config(config)
    return Program(
        config=sizes, layers=closure(sizes, parse_layers(layers)), target=aim, linear=sizes.check_linear(linear)
    )


@contextmanager
def _bars() -> Iterator[Callable[[Told], None]]:
    """A bar for the kernel that is being measured, and lines of what was found; lines only where no terminal is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"), console=screen, disable=not sys.stderr.isatty(), redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}

    def report(told: Told) -> None:
        best = ""
        if told.best is not None and told.default is not None:
            best = f"best {told.best * 1e6:,.0f} us, default {told.default * 1e6:,.0f} us"
        if told.kernel not in tasks:
            tasks[told.kernel] = bar.add_task(told.kernel[:70], total=told.wanted, best=best)
        bar.update(tasks[told.kernel], completed=told.trials, best=best)
        if bar.disable and told.trials >= told.wanted:
            print(f"{told.kernel}: {told.trials} measured; {best or 'none ran'}", file=sys.stderr)

    with bar:
        yield report


def _list(program: Program, units: Any, out: Path | None, json: bool) -> int:
    from ds41_tvm.data import schedules_dir
    from ds41_tvm.tune import records

    folder = (out or schedules_dir()) / records.folder_name(program.target)
    found = records.read(folder)
    tasks = [task for unit in units for task in unit.tasks]
    if json:
        print_json(
            {
                "target": program.target.name,
                "kernels": [
                    {"kernel": t.name, "knobs": {k: list(v) for k, v in t.knobs}, "record": t.name in found.records}
                    for t in tasks
                ],
                "notes": list(found.problems),
            }
        )
        return 0
    rows = [
        (
            task.name,
            " ".join(f"{name}={','.join(map(str, values))}" for name, values in task.knobs),
            task.combinations,
            "yes" if task.name in found.records else "no",
        )
        for task in tasks
    ]
    console().print(table(("kernel", "knobs, default first", "programs", "record"), rows))
    for note in found.problems:
        print(f"note: {note}")
    return 0


def _compile_all(program: Program, units: Any, json: bool) -> int:
    """Compile every candidate for a GPU and show, by kernel, what the compiler made of them."""
    import msgspec

    from ds41_tvm.cli.progress import progress
    from ds41_tvm.tune.candidates import State, compile_candidates

    if program.target.kind != "cuda":
        raise UsageError(f"--target {program.target.name} is for proofs; expected cpu or cuda:sm_NN")
    tasks = [task for unit in units for task in unit.tasks]
    with progress("compile candidates of") as report:
        made = list(compile_candidates(program.target, tasks, report))
    wrong = [candidate for candidate in made if candidate.wrong]
    if json:
        print_json({"target": program.target.name, "candidates": msgspec.to_builtins(made), "wrong": len(wrong)})
        return 1 if wrong else 0
    rows = []
    for task in tasks:
        mine = [c for c in made if c.kernel == task.name]
        count = {state: sum(c.state == state for c in mine) for state in get_args(State)}
        ran = [c for c in mine if c.registers]
        registers = f"{min(c.registers for c in ran)}..{max(c.registers for c in ran)}" if ran else None
        shared = f"{max(c.shared for c in ran) / 1024:.1f}" if ran else None
        rows.append((task.name, len(mine), *count.values(), registers, shared))
    names = ("kernel", "programs", "compiled", "spills", "too large", "failed", "registers", "shared KiB, most")
    console().print(table(names, rows))
    print(f"{len(made)} candidates for {program.target.name}, {len(wrong)} of them wrong")
    for candidate in wrong:
        print(f"WRONG: {candidate.kernel} with {candidate.knobs}: {candidate.message or candidate.state}")
    return 1 if wrong else 0


def _show(outcome: Outcome, records: Any, json: bool) -> None:
    from ds41_tvm.tune.summary import geometric_mean, rows

    if json:
        print_json(
            {
                "records": rows(records),
                "saved": [record.name for record in outcome.saved],
                "geometric_mean": geometric_mean(records),
                "notes": outcome.notes,
                "refused": outcome.refused,
                "out_of_time": outcome.out_of_time,
            }
        )
        return
    shown = [
        (
            r["kernel"], r["knobs"], round(r["before"], 1), round(r["after"], 1), round(r["ratio"], 2), r["limit"],
            f"{r['share before']:.0f}%", f"{r['share after']:.0f}%",
        )
        for r in rows(records)
    ]  # fmt: skip
    names = ("kernel", "knobs", "before us", "after us", "ratio", "limit", "share before", "share after")
    if shown:
        console().print(table(names, shown))
        print(f"{len(outcome.saved)} new record(s); geometric mean of all: {geometric_mean(records):.2f}x")
    for note in (*outcome.notes, *(f"REFUSED: {text}" for text in outcome.refused)):
        print(f"note: {note}")
    if outcome.out_of_time:
        print("time was up before all kernels were finished: run the same command again to go on")
