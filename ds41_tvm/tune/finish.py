"""From measurements to a choice: the best candidates against the default program, bit by bit and in time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ds41_tvm.errors import TuneError, WrongProgram
from ds41_tvm.program import Kernel
from ds41_tvm.target import Target
from ds41_tvm.tune import worker
from ds41_tvm.tune.inputs import Case, arguments, cases, checks, flops
from ds41_tvm.tune.measure import Bench, Job
from ds41_tvm.tune.search import Search, marked, remove
from ds41_tvm.tune.task import Task, Values

FINALISTS = 3  # choices that are measured again when a search has ended
ROUNDS = 3  # times that default and finalists are timed, in turn
WORTH = 0.98  # a winner needs at most this part of the default's time; else the default stays
_PRODUCTS = {"amx": "amx", "dot": "bf16"}  # limit of the products of a form; of all others fma
FEW = (2, 3, 4, 6, 8, 12, 16)  # tokens tried through the one-row kernel


class Finish:
    """Measurements that decide, on the machine of a `Bench`."""

    def __init__(self, target: Target, bench: Bench) -> None:
        self.target, self.bench = target, bench

    @contextmanager
    def built(self, kernels: Sequence[Kernel]) -> Iterator[list[str]]:
        """Artefacts of kernels, for a while. Raises TuneError if one does not compile now although it did before."""
        from tvm.s_tir.meta_schedule.builder import BuilderInput

        from ds41_tvm.compiler.targets import tvm_target

        target = tvm_target(self.target)
        results = self.bench.build([BuilderInput(marked(kernel, self.target), target) for kernel in kernels])
        for kernel, result in zip(kernels, results, strict=True):
            if result.error_msg is not None:
                raise TuneError(f"{kernel.name} with {dict(kernel.knobs)} could not be compiled: {result.error_msg}")
        paths = [str(result.artifact_path) for result in results]
        try:
            yield paths
        finally:
            for path in paths:
                remove(path)

    def run(self, jobs: Sequence[Job], use: worker.Use) -> list[list[float]]:
        out = []
        for job, result in zip(jobs, self.bench.run(jobs, use), strict=True):
            if result.run_secs is None:
                raise TuneError(f"{job.kernel.name} with {dict(job.kernel.knobs)} could not be run: {result.error_msg}")
            out.append([float(x) for x in result.run_secs])
        return out

    def final(self, searches: list[Search]) -> tuple[list[Values], list[tuple[float, float]]]:
        """Values of each task, and seconds of its default program and of the one with these values.

        The search measures everything once, at different times. The best of it are measured again, in turn with the
        default program, and the best of these is taken if it is worth it. The tiles of a linear layer are one choice
        for two kernels.
        """
        finalists = choose(searches)
        times = []
        for i, search in enumerate(searches):
            kernels = list(dict.fromkeys([search.task.kernel, *(search.task.with_values(v[i]) for v in finalists)]))
            with self.built(kernels) as paths:
                jobs = [Job(path, kernel, cases(kernel)) for path, kernel in zip(paths, kernels, strict=True)]
                seconds = dict(zip(kernels, self.timed(jobs), strict=True))
            times.append([seconds[search.task.kernel], *(seconds[search.task.with_values(v[i])] for v in finalists)])
        ratios = [math.prod(of_task[1 + n] / of_task[0] for of_task in times) for n in range(len(finalists))]
        best = min(range(len(finalists)), key=lambda n: ratios[n])
        if ratios[best] > WORTH:
            return [s.task.default for s in searches], [(of_task[0], of_task[0]) for of_task in times]
        return finalists[best], [(of_task[0], of_task[1 + best]) for of_task in times]

    def timed(self, jobs: list[Job], rounds: int = ROUNDS) -> list[float]:
        """Median seconds of each job, measured `rounds` times in turn."""
        times = self.run(jobs * rounds, worker.evaluate)
        return [statistics.median(t[0] for t in times[i :: len(jobs)]) for i in range(len(jobs))]

    def check(self, task: Task, chosen: Values) -> None:
        """Raises WrongProgram unless the chosen program gives the bits of the default one."""
        kernels = [task.kernel, task.with_values(chosen)]
        with self.built(kernels) as paths:
            jobs = [Job(path, kernel, checks(task.kernel)) for path, kernel in zip(paths, kernels, strict=True)]
            want, got = self.run(jobs, worker.fingerprint)
        if want != got:
            raise WrongProgram(
                f"{task.name}: the program with {chosen} gives other results than the default program; it is refused "
                f"and nothing is saved for this kernel: report this, it is a defect of the schedule"
            )

    def few(self, searches: list[Search], values: list[Values]) -> int:
        """Up to how many tokens the one-row kernel is as fast as the one for many rows."""
        kernels = [s.task.with_values(v) for s, v in zip(searches, values, strict=True)]
        few = 1
        with self.built(kernels) as paths:
            for tokens in FEW:
                jobs = [Job(path, kernel, (Case(tokens),)) for path, kernel in zip(paths, kernels, strict=True)]
                one, many = self.timed(jobs, 1)
                if one > many:
                    break
                few = tokens
        return few


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
    seconds: dict[str, list[float]] = {}
    for case in cases(kernel):
        compute = _PRODUCTS.get(str(dict(kernel.params).get("form")), "fma")
        if kernel.op == "index_scores":
            compute = "vnni"
        compute = compute if compute in limits else "fma"
        moved = sum(array.nbytes for array in arguments(kernel, case, packed=True))
        seconds.setdefault("read", []).append(moved / limits["read"])
        seconds.setdefault(compute, []).append(flops(kernel, case) / limits[compute])
    means = {kind: math.exp(statistics.mean(math.log(max(t, 1e-12)) for t in times)) for kind, times in seconds.items()}
    kind = max(means, key=lambda name: means[name])
    return kind, means[kind]
