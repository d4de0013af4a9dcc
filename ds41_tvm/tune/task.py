"""What is tuned: a kernel, the knobs of its program, and for a linear layer the shape of its tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ds41_tvm.program import Kernel, Linear, Program, Value, packing_widths

Values = dict[str, int]
# Knobs that are sizes of the kernel: packed weights and the runtime follow them.
STRUCTURE = ("tile", "rows")
ROWS = (6, 2, 3, 4, 8, 12)  # row tiles of the many-row kernels in form fma; the first is the default
NARROWEST = 8  # columns of a packed tile that are worth a try: fewer do not fill a vector


class Task(NamedTuple):
    """One kernel to tune. `kernel`: as it is without tuning; `knobs`: values to choose from, the default first."""

    kernel: Kernel
    knobs: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def name(self) -> str:
        """The kernel without what may be chosen: a record is found by it."""
        return Kernel(self.kernel.op, tuple(self.sizes.items())).name

    @property
    def sizes(self) -> dict[str, Value]:
        """Sizes that are not chosen; of a linear layer also whether it is the kernel for many rows."""
        params = dict(self.kernel.params)
        if self.kernel.op == "linear":
            params["many"] = int(params["rows"] != 1)
        return {name: value for name, value in params.items() if self.kernel.op != "linear" or name not in STRUCTURE}

    @property
    def default(self) -> Values:
        """The values used without tuning."""
        return {name: values[0] for name, values in self.knobs}

    @property
    def combinations(self) -> int:
        """Points of the space."""
        count = 1
        for _, values in self.knobs:
            count *= len(values)
        return count

    def points(self) -> Iterator[Values]:
        """All points of the space, the default first."""
        names = [name for name, _ in self.knobs]
        for point in itertools.product(*(values for _, values in self.knobs)):
            yield dict(zip(names, point, strict=True))

    def with_values(self, values: Values) -> Kernel:
        """The kernel with these values: sizes go into its parameters, the rest, if not the default, into its knobs."""
        sizes = STRUCTURE if self.kernel.op == "linear" else ()
        params = tuple((name, values.get(name, v) if name in sizes else v) for name, v in self.kernel.params)
        rest = tuple(
            (name, values[name])
            for name, choices in self.knobs
            if name not in sizes and values.get(name, choices[0]) != choices[0]
        )
        return Kernel(self.kernel.op, params, rest)


def task_of(kernel: Kernel, target_kind: str) -> Task:
    """The task of a kernel; one without knobs has nothing to tune."""
    from ds41_tvm.schedule import space

    knobs: list[tuple[str, tuple[int, ...]]] = []
    if kernel.op == "linear":
        params = dict(kernel.params)
        knobs += [("tile", _widths(kernel)), ("rows", _rows(str(params["form"]), int(params["rows"])))]
    knobs += space(kernel, target_kind).items()
    return Task(kernel, tuple((name, values) for name, values in knobs if len(values) > 1))


def _rows(form: str, rows: int) -> tuple[int, ...]:
    return (rows, *(r for r in ROWS if r != rows)) if rows != 1 and form == "fma" else (rows,)


def _widths(kernel: Kernel) -> tuple[int, ...]:
    params = {name: value for name, value in kernel.params if name != "rows"}
    tile = int(params["tile"])
    if params["form"] == "cuda":
        return (tile,)
    widths = packing_widths(Linear(**params, rows=6, few=1))  # type: ignore[arg-type]
    return (tile, *(w for w in widths if w != tile and w >= NARROWEST))


class Unit(NamedTuple):
    """Kernels that are chosen together: the two of a linear layer, which share its packed weights, or a single one."""

    tasks: tuple[Task, ...]
    linear: Linear | None

    @property
    def name(self) -> str:
        """The name of the first kernel."""
        return self.tasks[0].name


def units(program: Program) -> tuple[Unit, ...]:
    """Everything that can be tuned in a program without choices, the costliest kinds of kernel first."""
    return tuple(sorted(_units(program), key=_importance))


def _units(program: Program) -> Iterator[Unit]:
    kind = program.target.kind
    linears = {linear for layer in program.layers for linear in program.linears(program.config.role(layer)).values()}
    for linear in linears:
        tasks = tuple(task_of(kernel, kind) for kernel in linear.kernels().values())
        if any(task.knobs for task in tasks):
            yield Unit(tasks, linear)
    for kernel in program.kernels():
        if kernel.op != "linear" and (task := task_of(kernel, kind)).knobs:
            yield Unit((task,), None)


def _importance(unit: Unit) -> tuple[int, int, str]:
    """Sorting key: linear layers by their weights, attention, index scores, the rest."""
    order = {"linear": 0, "sparse_attention": 1, "index_scores": 2, "topk_lowest_index": 3}
    weights = unit.linear.n * unit.linear.k if unit.linear else 0
    return order.get(unit.tasks[0].kernel.op, 4), -weights, unit.name
