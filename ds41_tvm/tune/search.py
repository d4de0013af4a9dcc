"""The search for one kernel: MetaSchedule's evolutionary search over our knobs, its database, its cost models.

The space is a schedule function that samples every knob and writes the choice as an annotation; a mutator changes one
choice. All programs of a space differ in annotations only, so the cost model ``xgb`` learns from the values themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ds41_tvm.program import Kernel
from ds41_tvm.schedule.cpu import plain_kernel
from ds41_tvm.target import Target
from ds41_tvm.tune.inputs import arguments, cases
from ds41_tvm.tune.measure import Bench, Job
from ds41_tvm.tune.task import Task, Values
from ds41_tvm.tune.worker import ENTRY, IDENTITY, KNOB, Identity, values_of

CostModel = Literal["random", "xgb"]
FAILED = 1e10  # seconds that MetaSchedule writes for a candidate that could not be built or run
BATCH = 8
WARMUP = 16  # measurements that the cost model needs before it says anything


class Search:
    """Candidates of one task, measured before or now. `database`: MetaSchedule's, see `open_database`."""

    def __init__(
        self, task: Task, identity: Identity, database: Any, bench: Bench, model: CostModel, seed: int = 0
    ) -> None:
        from tvm.s_tir import meta_schedule as ms

        from ds41_tvm.compiler.targets import tvm_target

        self.task, self.bench, self._database = task, bench, database
        self._module = workload(task, identity)
        self._target = tvm_target(identity.target)
        self._workload = database.commit_workload(self._module)
        self.times: dict[tuple[int, ...], float] = {}
        self._errors: dict[tuple[int, ...], str] = {}
        for record in database.get_all_tuning_records():
            if record.workload.same_as(self._workload):
                self.times[self._key(_trace_values(task, record.trace))] = _seconds(record.run_secs)
        self._random = random.Random(f"{seed} {len(self.times)}")
        self._model = _cost_model(task, model)
        small = max(1, min(BATCH, task.combinations - len(self.times)))
        self._context = ms.TuneContext(
            self._module,
            target=self._target,
            space_generator=ms.space_generator.ScheduleFn(self._sample, [], [], {_mutator(self._random): 1.0}),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=min(64, task.combinations), init_min_unmeasured=small, max_fail_count=20,
                genetic_num_iters=3,
            ),
            num_threads=1,
            rand_state=1 + self._random.randrange(2**30),
        )  # fmt: skip
        self._context.pre_tuning(10**6, BATCH, None, database, self._model)

    def _key(self, values: Values) -> tuple[int, ...]:
        return tuple(values[name] for name, _ in self.task.knobs)

    def _sample(self, schedule: Any) -> None:
        _sample(self.task, schedule)

    @property
    def exhausted(self) -> bool:
        """Whether every point of the space has been measured."""
        return len(self.times) >= self.task.combinations

    def best(self, only: Callable[[Values], bool] = lambda values: True) -> tuple[Values, float] | None:
        """The fastest measured values and their seconds, among those that `only` lets through."""
        found = self.ranked(only)
        return found[0] if found else None

    def ranked(self, only: Callable[[Values], bool] = lambda values: True) -> list[tuple[Values, float]]:
        """All measured values that ran and that `only` lets through, and their seconds, the fastest first."""
        names = [name for name, _ in self.task.knobs]
        ran = [(dict(zip(names, key, strict=True)), time) for key, time in self.times.items() if time < FAILED]
        return sorted(((values, time) for values, time in ran if only(values)), key=lambda pair: pair[1])

    def default_seconds(self) -> float | None:
        """Seconds of the default program, if it was measured and ran."""
        seconds = self.times.get(self._key(self.task.default), FAILED)
        return seconds if seconds < FAILED else None

    @property
    def first_error(self) -> str:
        """Why a candidate failed, if one did in this process."""
        return next(iter(self._errors.values()), "")

    def step(self, most: int) -> int:
        """Measure a batch of up to `most` new candidates, the default program first of all; how many there were."""
        if self._key(self.task.default) not in self.times:
            return self._measure([self._candidate(self.task.default)])
        for _ in range(4):  # a batch may hold only what an earlier run has measured
            batch = self._context.generate_measure_candidates()
            if not batch:
                break
            new = self._new(batch)[:most]
            if done := self._measure(new):
                return done
        return self._measure(self._rest(most))

    def _new(self, batch: Iterable[Any]) -> list[Any]:
        out: dict[tuple[int, ...], Any] = {}
        for candidate in batch:
            key = self._key(values_of(candidate.sch.mod))
            if key not in self.times:
                out.setdefault(key, candidate)
        return list(out.values())

    def _rest(self, most: int) -> list[Any]:
        """Points that evolution did not come by, at random: small spaces are measured whole."""
        left = [values for values in self.task.points() if self._key(values) not in self.times]
        return [self._candidate(values) for values in self._random.sample(left, min(most, len(left)))]

    def _candidate(self, values: Values) -> Any:
        from tvm.s_tir import Schedule
        from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

        schedule = Schedule(self._module)
        _sample(self.task, schedule, values)
        return MeasureCandidate(schedule, [])

    def _measure(self, candidates: list[Any]) -> int:
        """Build and run candidates and put each into the database as soon as its batch is through."""
        from tvm.s_tir import meta_schedule as ms

        if not candidates:
            return 0
        built = self.bench.build([ms.builder.BuilderInput(c.sch.mod, self._target) for c in candidates])
        values = [values_of(c.sch.mod) for c in candidates]
        paths = [None if b.error_msg else str(b.artifact_path) for b in built]
        kernels = [self.task.with_values(v) for v in values]
        jobs = [Job(p, k, cases(k)) for p, k in zip(paths, kernels, strict=True) if p is not None]
        ran = iter(self.bench.run(jobs))
        results = []
        for path, chosen, result in zip(paths, values, built, strict=True):
            outcome = next(ran) if path is not None else ms.runner.RunnerResult(None, str(result.error_msg))
            if outcome.run_secs is None or len(outcome.run_secs) == 0:
                self._errors[self._key(chosen)] = str(outcome.error_msg)
                outcome = ms.runner.RunnerResult([FAILED], None)
            results.append(outcome)
            remove(path)
        for candidate, chosen, result in zip(candidates, values, results, strict=True):
            self.times[self._key(chosen)] = _seconds(result.run_secs)
            self._database.commit_tuning_record(
                ms.database.TuningRecord(candidate.sch.trace, self._workload, result.run_secs, self._target, [])
            )
        self._model.update(self._context, candidates, results)
        return len(candidates)


def _seconds(run_secs: Any) -> float:
    return float(np.mean([float(x) for x in run_secs]))


def remove(path: str | None) -> None:
    """Delete a built artefact and the folder that MetaSchedule made for it."""
    if path is not None:
        for file in (path, path + ".so"):
            Path(file).unlink(missing_ok=True)
        try:
            Path(path).parent.rmdir()
        except OSError:
            return


def workload(task: Task, identity: Identity) -> Any:
    """The plain kernel with the sizes of its first situation, marked with what it is: MetaSchedule's workload."""
    import tvm
    from tvm import tirx

    kernel: Kernel = task.kernel
    func = plain_kernel(kernel.op, dict(kernel.params))
    arrays = arguments(kernel, cases(kernel)[0], packed=True)
    for index, array in enumerate(arrays):
        buffer = func.params[index]
        if any(isinstance(extent, tirx.Var) for extent in buffer.shape):
            shape = [
                tirx.IntImm("int64", size) if isinstance(extent, tirx.Var) else extent
                for extent, size in zip(buffer.shape, array.shape, strict=True)
            ]
            func = func.specialize({buffer: tirx.decl_buffer(shape, buffer.dtype, buffer.name)})
    mark = msgspec.json.encode(identity).decode()
    return tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY).with_attr(IDENTITY, mark)})


def marked(kernel: Kernel, target: Target) -> Any:
    """A module that `worker.build` makes this very kernel of, without a search."""
    import tvm
    from tvm import tirx

    identity = Identity(kernel=kernel, target=target, program="", tvm="", threads=0, place="", cases="")
    nothing = tirx.PrimFunc([], tirx.Evaluate(0)).with_attr("global_symbol", ENTRY)
    return tvm.IRModule({ENTRY: nothing.with_attr(IDENTITY, msgspec.json.encode(identity).decode())})


def _sample(task: Task, schedule: Any, values: Values | None = None) -> None:
    """Choose every knob, at random or as in `values`, and annotate the function's root block with the choices."""
    root = schedule.get_sblock("root")
    for name, choices in task.knobs:
        decision = None if values is None else choices.index(values[name])
        chosen = schedule.sample_categorical(list(choices), [1 / len(choices)] * len(choices), decision)
        schedule.annotate(root, KNOB + name, chosen)


def _trace_values(task: Task, trace: Any) -> Values:
    """The values in a recorded trace: its sampled choices, in the order of the knobs."""
    decisions = [int(trace.decisions[step]) for step in trace.insts if step in trace.decisions]
    return {name: choices[d] for (name, choices), d in zip(task.knobs, decisions, strict=True)}


def _mutator(source: random.Random) -> Any:
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.mutator import PyMutator

    @derived_object
    class ChangeOneKnob(PyMutator):  # type: ignore[misc]
        """Gives one sampled choice another value."""

        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, trace: Any, _seed: Any) -> Any:
            steps = [step for step in trace.insts if step in trace.decisions]
            step = source.choice(steps)
            others = [i for i in range(len(step.attrs[0])) if i != int(trace.decisions[step])]
            return trace.with_decision(step, source.choice(others), True)

        def clone(self) -> Any:
            return ChangeOneKnob()

    return ChangeOneKnob()


def _cost_model(task: Task, model: CostModel) -> Any:
    from tvm.s_tir import meta_schedule as ms

    if model == "random":
        return ms.cost_model.RandomModel()
    from ds41_tvm.tune.measure import require

    require("xgboost", "the cost model xgb", "xgb")
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor

    @derived_object
    class KnobFeatures(PyFeatureExtractor):  # type: ignore[misc]
        """One row of numbers for a candidate: the logarithms of its values."""

        def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
            import tvm

            names = [name for name, _ in task.knobs]
            rows = [[values_of(c.sch.mod)[name] for name in names] for c in candidates]
            return [tvm.runtime.tensor(np.log2(np.array([row], np.float32) + 1)) for row in rows]

    # A handful of numbers and of measurements: shallow trees, and few of them.
    small = ms.cost_model.xgb_model.XGBConfig(max_depth=4, nthread=1)
    return ms.cost_model.XGBModel(
        extractor=KnobFeatures(), config=small, num_warmup_samples=WARMUP, early_stopping_rounds=10
    )
