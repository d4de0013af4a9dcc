"""A tuning run: kernel after kernel, search, choose, check, compare with the default program, save.

Whatever ends it (limit, interruption, kill), measurements are in the database and finished kernels in the records; the
next run goes on from there.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ds41_tvm.bench import machine
from ds41_tvm.errors import DeviceError, TuneError, UsageError
from ds41_tvm.program import Program
from ds41_tvm.target import Target
from ds41_tvm.tune import records, worker
from ds41_tvm.tune.apply import program_digest, stale
from ds41_tvm.tune.database import BUILT, open_database, work_folder
from ds41_tvm.tune.finish import Finish, floor
from ds41_tvm.tune.inputs import cases
from ds41_tvm.tune.measure import Bench, Fleet
from ds41_tvm.tune.records import Record
from ds41_tvm.tune.search import BATCH, CostModel, Search
from ds41_tvm.tune.task import Task, Unit, Values, units


class Progress(NamedTuple):
    """`trials` of `wanted` measurements of a kernel, seconds of its default and of its best program so far."""

    kernel: str
    trials: int
    wanted: int
    default: float | None
    best: float | None


@dataclass(frozen=True)
class Options:
    """Limits and places of a run. `trials`: measurements of a kernel over all runs; `seconds`: of this run."""

    trials: int = 32
    seconds: float = math.inf
    kernels: tuple[str, ...] = ("*",)
    out: Path | None = None
    work: Path | None = None
    threads: int = 1
    model: CostModel = "random"
    fleet: Fleet | None = None
    seed: int = 0
    again: bool = False  # also kernels whose records hold


@dataclass
class Outcome:
    """What a run did: new records, kernels whose records held already, what went wrong, whether time was up."""

    saved: list[Record] = field(default_factory=list)
    held: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    out_of_time: bool = False


def chosen_units(program: Program, patterns: Sequence[str]) -> tuple[Unit, ...]:
    """Units with a kernel that one of the shell patterns matches. Raises UsageError if there is none."""
    every = units(program)
    found = tuple(
        unit
        for unit in every
        if any(fnmatch.fnmatchcase(task.name, p) or task.kernel.op == p for task in unit.tasks for p in patterns)
    )
    if not found:
        raise UsageError(
            f"--kernels {','.join(patterns)}: matches none of the {len(every)} kernels and layers that can be tuned; "
            f"expected names or patterns such as linear or 'linear__*many_1'; --dry-run lists them"
        )
    return found


class Session:
    """One run of tuning for a program."""

    def __init__(self, program: Program, options: Options, folder: Path, report: Callable[[Progress], None]) -> None:
        import tvm

        if options.fleet is None and program.target.is_gpu:
            _check_gpu(program.target)
        if options.fleet is None and (missing := program.target.missing_here()):
            raise TuneError(
                f"target {program.target.name}: this machine lacks {', '.join(missing)}; tune where it is present, or "
                f"on a fleet with --rpc"
            )
        self.program, self.options, self.report = program, options, report
        self.folder = folder
        self.tvm = str(tvm.__version__)
        self.outcome = Outcome()
        self._deadline = time.monotonic() + options.seconds
        self._measured: dict[str, float] = {}
        self._pace = 2.0  # seconds a candidate takes; learnt on the way

    def run(self) -> Outcome:
        """Tune every chosen kernel. Raises TuneError and KeyboardInterrupt, with all that was measured kept."""
        todo = []
        found = records.read(self.folder)
        self.outcome.notes += found.problems
        for unit in chosen_units(self.program, self.options.kernels):
            old = [found.records.get(task.name) for task in unit.tasks]
            holds = all(
                r is not None and not stale(r, t, self.program.target, self.tvm) and r.trials >= self._wanted(t)
                for r, t in zip(old, unit.tasks, strict=True)
            )
            if holds and not self.options.again:
                self.outcome.held += [record for record in old if record is not None]
            else:
                todo.append(unit)
        if not todo:
            return self.outcome
        with self._bench() as (bench, database):
            for unit in todo:
                if not self._tune(unit, bench, database):
                    self.outcome.out_of_time = True
                    break
        return self.outcome

    @contextmanager
    def _bench(self) -> Iterator[tuple[Bench, Any]]:
        work = self.options.work or default_work(records.folder_name(self.program.target))
        with work_folder(work) as folder:
            bench = Bench(self.options.threads, folder / BUILT, self.options.fleet, self.program.target.kind)
            try:
                database, problems = open_database(folder)
                self.outcome.notes += problems
                yield bench, database
            finally:
                bench.close()

    def _wanted(self, task: Task) -> int:
        return min(self.options.trials, task.combinations)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _tune(self, unit: Unit, bench: Bench, database: Any) -> bool:
        """Search and finish one unit; False if time was up before."""
        searches = [self._search(task, bench, database) for task in unit.tasks]
        in_time = True
        for search in searches:
            in_time = in_time and self._fill(search)
        if all(search.default_seconds() is not None for search in searches):
            if in_time or self._left() > 0:
                self._finish(unit, searches, bench)
        elif in_time:
            errors = [s.first_error for s in searches if s.first_error]
            reason = errors[0].strip().splitlines()[-1][:300] if errors else "it failed in an earlier run"
            self.outcome.refused.append(f"{unit.name}: its default program could not be measured: {reason}")
        return in_time

    def _search(self, task: Task, bench: Bench, database: Any) -> Search:
        identity = worker.Identity(
            kernel=task.kernel,
            target=self.program.target,
            program=program_digest(task.kernel, self.program.target.kind),
            tvm=self.tvm,
            threads=self.options.threads,
            place=bench.place,
            cases="; ".join(map(str, cases(task.kernel))),
        )
        return Search(task, identity, database, bench, self.options.model, self.options.seed)

    def _fill(self, search: Search) -> bool:
        """Measure until the trials are used up; False if time is up before."""
        wanted = self._wanted(search.task)
        self._tell(search)
        while len(search.times) < wanted:
            most = min(BATCH, wanted - len(search.times))
            if (left := self._left()) < most * self._pace:
                most = int(left / self._pace)
            if most < 1:
                return False
            start = time.monotonic()
            done = search.step(most)
            if done == 0:
                break
            self._pace = max(0.1, (time.monotonic() - start) / done)
            self._tell(search)
        return True

    def _tell(self, search: Search) -> None:
        best = search.best()
        self.report(
            Progress(
                search.task.name, len(search.times), self._wanted(search.task), search.default_seconds(),
                best[1] if best else None,
            )
        )  # fmt: skip

    # ---- from measurements to records

    def _finish(self, unit: Unit, searches: list[Search], bench: Bench) -> None:
        """Choose, check and save; what cannot be is reported as refused."""
        finish = Finish(self.program.target, bench)
        try:
            values, compared = finish.final(searches)
            for search, chosen in zip(searches, values, strict=True):
                finish.check(search.task, chosen)
            if unit.linear is not None:
                values[-1] = values[-1] | {"few": finish.few(searches, values)}
        except TuneError as error:
            self.outcome.refused.append(str(error))
            return
        environment = self._environment(bench)
        key = records.digest(environment)[7:23]
        limits = self._limits(bench)
        made = [
            self._record(search, chosen, times, limits, key)
            for search, chosen, times in zip(searches, values, compared, strict=True)
        ]
        records.save(self.folder, made, {key: environment})
        self.outcome.saved += made

    def _record(
        self, search: Search, values: Values, times: tuple[float, float], limits: dict[str, float], environment: str
    ) -> Record:
        task, target = search.task, self.program.target
        kernel = task.with_values(values)
        limit, least = floor(kernel, limits)
        return Record(
            kernel=task.name,
            op=kernel.op,
            sizes=task.sizes,
            knobs=values,
            ir=program_digest(kernel, target.kind),
            target=target.name,
            tvm=self.tvm,
            case="; ".join(map(str, cases(task.kernel))),
            before=times[0],
            after=times[1],
            limit=limit,
            share_before=least / times[0],
            share_after=least / times[1],
            checked=True,
            trials=len(search.times),
            environment=environment,
        )

    def _environment(self, bench: Bench) -> dict[str, Any]:
        import tvm

        here = msgspec.to_builtins(machine.describe()) if self.options.fleet is None else {"fleet": bench.place}
        if self.options.fleet is None and self.program.target.is_gpu:
            from ds41_tvm.runtime.cuda_driver import driver

            here["gpu"] = driver().device_name(0)
        return {
            "machine": here,
            "threads": self.options.threads,
            "tvm": self.tvm,
            "llvm": str(tvm.target.codegen.llvm_version_major()),
        }

    def _limits(self, bench: Bench) -> dict[str, float]:
        """The most that the machine was seen to do in this run; nothing is known of a fleet or a GPU."""
        if self.options.fleet is None and not self.program.target.is_gpu:
            from ds41_tvm.bench.limits import Limits

            sampled = Limits(self.program.target, self.options.threads).sample(passes=3)
            for kind, values in sampled.items():
                self._measured[kind] = max(self._measured.get(kind, 0.0), *values)
        return self._measured


def _check_gpu(target: Target) -> None:
    """Raises TuneError unless this machine can run code for `target`, a kind of GPU."""
    from ds41_tvm.runtime.cuda_driver import MAJOR, MINOR, driver

    if target.kind != "cuda":
        raise TuneError(f"target {target.name} is for proofs and cannot be tuned; expected cpu or cuda:sm_NN")
    try:
        major, minor = (driver().number("cuDeviceGetAttribute", which, 0) for which in (MAJOR, MINOR))
    except DeviceError as error:
        raise TuneError(
            f"target {target.name}: {error}; tune where such a GPU is, or on a fleet with --rpc; --dry-run compiles "
            f"every candidate without one"
        ) from error
    level = f"sm_{major}{minor}"
    if level != target.level:
        raise TuneError(f"target {target.name}: GPU 0 here is of {level}; expected --target cuda:{level}, or --rpc")


def default_work(name: str) -> Path:
    """Where measurements are kept between runs: the user's cache folder."""
    import os

    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ds41-tvm" / "tune" / name


def tune(program: Program, options: Options, report: Callable[[Progress], None] = lambda progress: None) -> Outcome:
    """Tune the kernels of a program and save records of those that were finished; see `Options`.

    Raises TuneError (a package, a machine or a folder is missing), UsageError (no such kernel).
    """
    from ds41_tvm.data import schedules_dir

    folder = (options.out or schedules_dir()) / records.folder_name(program.target)
    return Session(program, options, folder, report).run()
