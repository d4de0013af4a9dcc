"""Records in the making of a program: which kernel is made how, and why a record is not used."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from ds41_tvm.data import schedules_dir
from ds41_tvm.program import Kernel, Linear, Program
from ds41_tvm.target import Target
from ds41_tvm.tune import records
from ds41_tvm.tune.records import Record
from ds41_tvm.tune.task import Task, units


class Tuned(msgspec.Struct, frozen=True):
    """A program with what records choose for it.

    `kernels`: in the order of `program`, with their knobs; `used`: name of the record of each kernel that has one, by
    the kernel's name; `notes`: a sentence for every record or file that was not used although it was there.
    """

    program: Program
    kernels: tuple[Kernel, ...]
    used: dict[str, str]
    notes: tuple[str, ...]

    def record(self, kernel: Kernel) -> str | None:
        """Name of the record that a kernel was made by."""
        return self.used.get(kernel.name)


def untuned(program: Program) -> Tuned:
    """The program as it is without records."""
    return Tuned(program, program.kernels(), {}, ())


def tuned(program: Program, schedules: Path | None = None) -> Tuned:
    """The program with the records below `schedules` (the shipped ones by default) that hold for it.

    A record holds if it was made for this very target, this version of TVM, and still makes the program that was
    measured. A linear layer's two records only hold together. Results do not change.
    """
    import tvm

    folder = (schedules or schedules_dir()) / records.folder_name(program.target)
    found = records.read(folder)
    if not found.records:
        return Tuned(program, program.kernels(), {}, found.problems)
    notes = list(found.problems)
    choices: list[Linear] = []
    chosen: dict[str, tuple[Kernel, Record]] = {}
    for unit in units(program):
        held: list[tuple[Kernel, Record]] = []
        for task in unit.tasks:
            record = found.records.get(task.name)
            if record is None:
                continue
            if reason := stale(record, task, program.target, tvm.__version__):
                notes.append(f"{folder / records.FILE}: the record of {task.name} is stale and not used: {reason}")
            else:
                held.append((task.with_values(record.knobs), record))
        if unit.linear is None:
            chosen.update({kernel.name: (kernel, record) for kernel, record in held})
        elif (layer := _layer(unit.linear, held)) is not None:
            choices.append(layer)
            chosen.update({kernel.name: (kernel, record) for kernel, record in held})
        elif held:
            notes.append(
                f"{folder / records.FILE}: the record of {held[0][1].kernel} is not used: that of the other kernel of "
                f"the layer is missing or has other tiles; tune both"
            )
    made = msgspec.structs.replace(program, choices=tuple(sorted(choices, key=str)))
    kernels = tuple(chosen[k.name][0] if k.name in chosen else k for k in made.kernels())
    used = {k.name: chosen[k.name][1].name for k in kernels if k.name in chosen}
    return Tuned(made, kernels, used, tuple(notes))


def _layer(linear: Linear, held: list[tuple[Kernel, Record]]) -> Linear | None:
    """The layer as both of its kernels' records choose it; None unless there are two that agree."""
    if len(held) != 2:
        return None
    one, many = (record.knobs for _, record in held)
    tile = one.get("tile", linear.tile)
    if many.get("tile", linear.tile) != tile:
        return None
    return msgspec.structs.replace(
        linear, tile=tile, rows=many.get("rows", linear.rows), few=many.get("few", linear.few)
    )


def stale(record: Record, task: Task, target: Target, tvm_version: str) -> str:
    """Why a record does not hold for a task now; empty if it does."""
    if record.target != target.name:
        return f"made for {record.target}, not {target.name}; tune for this target"
    if record.tvm != tvm_version:
        return f"made with TVM {record.tvm}, this is {tvm_version}; tune again"
    if not record.checked:
        return "its program was not checked; tune again"
    space = dict(task.knobs)
    for name, value in record.knobs.items():
        if name == "few" and task.kernel.op == "linear":
            if value < 1:
                return f"{name} is {value}; expected at least 1; tune again"
        elif value not in space.get(name, ()):
            return f"{name} = {value} cannot be chosen any more; tune again"
    if missing := sorted(set(space) - set(record.knobs)):
        return f"it does not say {', '.join(missing)}; tune again"
    if program_digest(task.with_values(record.knobs), target.kind) != record.ir:
        return "the kernel's program has changed since; tune again"
    return ""


@functools.cache
def program_digest(kernel: Kernel, target_kind: str) -> str:
    """Digest of the program that is made of a kernel.

    TVM's structural hash: the text of a program numbers blocks by what the process has parsed before.
    """
    import tvm_ffi

    from ds41_tvm.schedule import schedule

    _, func = schedule(kernel, target_kind)
    return f"structural:{tvm_ffi.structural_hash(func, map_free_vars=True) % 2**64:016x}"


Select = Callable[[Program], Tuned]


def selection(use: bool | str | os.PathLike[str]) -> Select:
    """How `compile` and `build` come to their kernels: True for the shipped records, False for none, or a folder."""
    if isinstance(use, bool):
        return tuned if use else untuned
    return functools.partial(tuned, schedules=Path(use))
