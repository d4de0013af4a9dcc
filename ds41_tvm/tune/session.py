"""A tuning run: kernel after kernel, search, choose, check, compare with the default program, save.

Whatever ends it (limit, interruption, kill), measurements are in the database and finished kernels in the records; the
next run goes on from there.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ds41_tvm.bench import machine
from ds41_tvm.errors import TuneError, UsageError, WrongProgram
from ds41_tvm.program import Kernel, Program
from ds41_tvm.tune import records, worker
from ds41_tvm.tune.apply import program_digest, stale
from ds41_tvm.tune.database import BUILT, open_database, work_folder
from ds41_tvm.tune.inputs import Case, cases, checks, flops
from ds41_tvm.tune.measure import Bench, Fleet, Job
from ds41_tvm.tune.records import Record
from ds41_tvm.tune.search import BATCH, CostModel, Search, remove
from ds41_tvm.tune.task import Task, Unit, Values, units

FINALISTS = 3  # choices that are measured again when a search has ended
ROUNDS = 5  # times that default and winner are timed, in turn, for the record
WORTH = 0.98  # a winner needs at most this part of the default's time; else the default stays
FEW = (2, 3, 4, 6, 8, 12, 16)  # tokens tried through the one-row kernel


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
            bench = Bench(self.options.threads, folder / BUILT, self.options.fleet)
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
        values, compared = self._final(searches, bench)
        try:
            for search, chosen in zip(searches, values, strict=True):
                self._check(search.task, chosen, bench)
        except WrongProgram as error:
            self.outcome.refused.append(str(error))
            return
        if unit.linear is not None:
            values[-1] = values[-1] | {"few": self._few(searches, values, bench)}
        environment = self._environment(bench)
        key = records.digest(environment)[7:23]
        limits = self._limits(bench)
        made = [
            self._record(search, chosen, times, limits, key)
            for search, chosen, times in zip(searches, values, compared, strict=True)
        ]
        records.save(self.folder, made, {key: environment})
        self.outcome.saved += made

    @contextmanager
    def _built(self, kernels: Sequence[Kernel], bench: Bench) -> Iterator[list[str]]:
        """Artefacts of kernels, for a while. Raises TuneError if one does not compile now although it did before."""
        from tvm.s_tir.meta_schedule.builder import BuilderInput

        from ds41_tvm.compiler.targets import tvm_target
        from ds41_tvm.tune.search import marked

        target = tvm_target(self.program.target)
        results = bench.build([BuilderInput(marked(kernel, self.program.target), target) for kernel in kernels])
        for kernel, result in zip(kernels, results, strict=True):
            if result.error_msg is not None:
                raise TuneError(f"{kernel.name} with {dict(kernel.knobs)} could not be compiled: {result.error_msg}")
        paths = [str(result.artifact_path) for result in results]
        try:
            yield paths
        finally:
            for path in paths:
                remove(path)

    def _run(self, jobs: Sequence[Job], bench: Bench, use: worker.Use) -> list[list[float]]:
        out = []
        for job, result in zip(jobs, bench.run(jobs, use), strict=True):
            if result.run_secs is None:
                raise TuneError(f"{job.kernel.name} with {dict(job.kernel.knobs)} could not be run: {result.error_msg}")
            out.append([float(x) for x in result.run_secs])
        return out

    def _final(self, searches: list[Search], bench: Bench) -> tuple[list[Values], list[tuple[float, float]]]:
        """Values of each task, and seconds of its default program and of the one with these values.

        The search measures everything once, at different times. The best of it are measured again, in turn with the
        default program, and the best of these is taken if it is worth it. The tiles of a linear layer are one choice
        for two kernels.
        """
        finalists = choose(searches)
        times = []
        for i, search in enumerate(searches):
            kernels = list(dict.fromkeys([search.task.kernel, *(search.task.with_values(v[i]) for v in finalists)]))
            with self._built(kernels, bench) as paths:
                jobs = [Job(path, kernel, cases(kernel)) for path, kernel in zip(paths, kernels, strict=True)]
                seconds = dict(zip(kernels, self._timed(jobs, bench), strict=True))
            times.append([seconds[search.task.kernel], *(seconds[search.task.with_values(v[i])] for v in finalists)])
        ratios = [math.prod(of_task[1 + n] / of_task[0] for of_task in times) for n in range(len(finalists))]
        best = min(range(len(finalists)), key=lambda n: ratios[n])
        if ratios[best] > WORTH:
            return [s.task.default for s in searches], [(of_task[0], of_task[0]) for of_task in times]
        return finalists[best], [(of_task[0], of_task[1 + best]) for of_task in times]

    def _timed(self, jobs: list[Job], bench: Bench, rounds: int = ROUNDS) -> list[float]:
        """Median seconds of each job, measured `rounds` times in turn."""
        times = self._run(jobs * rounds, bench, worker.evaluate)
        return [statistics.median(t[0] for t in times[i :: len(jobs)]) for i in range(len(jobs))]

    def _check(self, task: Task, chosen: Values, bench: Bench) -> None:
        """Raises WrongProgram unless the chosen program gives the bits of the default one."""
        kernels = [task.kernel, task.with_values(chosen)]
        with self._built(kernels, bench) as paths:
            jobs = [Job(path, kernel, checks(task.kernel)) for path, kernel in zip(paths, kernels, strict=True)]
            want, got = self._run(jobs, bench, worker.fingerprint)
        if want != got:
            raise WrongProgram(
                f"{task.name}: the program with {chosen} gives other results than the default program; it is refused "
                f"and nothing is saved for this kernel: report this, it is a defect of the schedule"
            )

    def _few(self, searches: list[Search], values: list[Values], bench: Bench) -> int:
        """Up to how many tokens the one-row kernel is as fast as the one for many rows."""
        kernels = [s.task.with_values(v) for s, v in zip(searches, values, strict=True)]
        few = 1
        with self._built(kernels, bench) as paths:
            for tokens in FEW:
                jobs = [Job(path, kernel, (Case(tokens),)) for path, kernel in zip(paths, kernels, strict=True)]
                one, many = self._timed(jobs, bench, 3)
                if one > many:
                    break
                few = tokens
        return few

    def _record(
        self, search: Search, values: Values, times: tuple[float, float], limits: dict[str, float], environment: str
    ) -> Record:
        task, target = search.task, self.program.target
        kernel, case = task.with_values(values), cases(task.kernel)[-1]
        limit, least = floor(kernel, limits)
        return Record(
            kernel=task.name,
            op=kernel.op,
            sizes=task.sizes,
            knobs=values,
            ir=program_digest(kernel, target.kind),
            target=target.name,
            tvm=self.tvm,
            case="; ".join(map(str, cases(task.kernel))) if case else "",
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
        return {
            "machine": here,
            "threads": self.options.threads,
            "tvm": self.tvm,
            "llvm": str(tvm.target.codegen.llvm_version_major()),
        }

    def _limits(self, bench: Bench) -> dict[str, float]:
        """What the machine can do, measured once a run; nothing is known of a fleet's machines."""
        if not hasattr(self, "_measured"):
            self._measured: dict[str, float] = {}
            if self.options.fleet is None:
                from ds41_tvm.bench.limits import Limits

                sampled = Limits(self.program.target, self.options.threads).sample(passes=3)
                self._measured = {kind: max(values) for kind, values in sampled.items()}
        return self._measured


def choose(searches: Sequence[Search]) -> list[list[Values]]:
    """The `FINALISTS` best choices: values of each task. A linear layer's two tasks have the same packing width.

    Of two tasks, the best by the product of their times, for every width from their best two.
    """
    if len(searches) == 1:
        return [[values] for values, _ in searches[0].ranked()[:FINALISTS]]
    default = searches[0].task.default.get("tile", 0)
    found: list[tuple[float, list[Values]]] = []
    for width in dict(searches[0].task.knobs).get("tile", (default,)):

        def has_width(values: Values, width: int = width) -> bool:
            return values.get("tile", default) == width

        pairs = itertools.product(*(s.ranked(has_width)[:2] for s in searches))
        found += [(math.prod(seconds for _, seconds in pair), [values for values, _ in pair]) for pair in pairs]
    return [values for _, values in sorted(found, key=lambda pair: pair[0])[:FINALISTS]]


def floor(kernel: Kernel, limits: dict[str, float]) -> tuple[str, float]:
    """What bounds a kernel in the last of its situations, and the least seconds that allows; ("", 0) if unknown."""
    if not limits:
        return "", 0.0
    from ds41_tvm.tune.inputs import arguments

    seconds: dict[str, list[float]] = {}
    for case in cases(kernel):
        compute = "amx" if "amx" in limits and dict(kernel.params).get("form") == "amx" else "fma"
        if kernel.op == "index_scores" and "vnni" in limits:
            compute = "vnni"
        moved = sum(array.nbytes for array in arguments(kernel, case, packed=True))
        seconds.setdefault("read", []).append(moved / limits["read"])
        seconds.setdefault(compute, []).append(flops(kernel, case) / limits[compute])
    means = {kind: math.exp(statistics.mean(math.log(max(t, 1e-12)) for t in times)) for kind, times in seconds.items()}
    kind = max(means, key=lambda name: means[name])
    return kind, means[kind]


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
