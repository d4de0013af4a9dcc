"""Which records hold for a program, and what a program becomes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.artifact.manifest import FILE, decode
from ds41_tvm.program import Program
from ds41_tvm.tune import records
from ds41_tvm.tune.apply import tuned
from ds41_tvm.tune.task import Unit, Values, units

V3 = "cpu:x86-64-v3"


def unit_of(program: Program, start: str) -> Unit:
    return next(u for u in units(program) if u.name.startswith(start))


def save(folder: Path, made: list[records.Record]) -> None:
    records.save(folder / records.folder_name(made[0].target), made, {"here": {}})


def other(unit: Unit) -> list[Values]:
    """Values that are not the default anywhere; the two kernels of a linear layer share the packing width."""
    return [{name: values[-1] for name, values in task.knobs} for task in unit.tasks]


def test_a_record_is_used(program: Any, record: Any, tmp_path: Path) -> None:
    p = program()
    unit = unit_of(p, "rms_norm")
    made = record(unit.tasks[0], other(unit)[0], p.target)
    save(tmp_path, [made])
    got = tuned(p, tmp_path)
    assert got.notes == ()
    (kernel,) = (k for k in got.kernels if k.knobs)
    assert kernel.name == unit.tasks[0].kernel.name
    assert dict(kernel.knobs) == other(unit)[0]
    assert got.used == {kernel.name: made.name}
    assert got.program == p


def test_a_linear_layer_takes_tiles_and_threshold(program: Any, record: Any, tmp_path: Path) -> None:
    p = program()
    unit = unit_of(p, "linear")
    one, many = other(unit)
    many |= {"few": 4}
    save(tmp_path, [record(t, v, p.target) for t, v in zip(unit.tasks, (one, many), strict=True)])
    got = tuned(p, tmp_path)
    assert got.notes == ()
    (choice,) = got.program.choices
    assert (choice.tile, choice.rows, choice.few) == (many["tile"], many["rows"], 4)
    assert choice.sizes == unit.linear.sizes
    names = {k.name for k in got.program.kernels()}
    assert set(got.used) == {k.name for k in choice.kernels().values()} <= names
    assert [k.name for k in got.kernels] == [k.name for k in got.program.kernels()]


STALE = {
    "target": ({"target": "cpu:x86-64-v3+avxvnni"}, "made for cpu:x86-64-v3+avxvnni"),
    "tvm": ({"tvm": "0.26.0"}, "made with TVM 0.26.0"),
    "digest": ({"ir": "structural:0123456789abcdef"}, "program has changed"),
    "knob gone": ({"knobs": {"lanes": 16, "height": 2}}, "height = 2 cannot be chosen"),
    "value gone": ({"knobs": {"lanes": 5}}, "lanes = 5 cannot be chosen"),
    "knob missing": ({"knobs": {}}, "does not say lanes"),
    "unchecked": ({"checked": False}, "not checked"),
}


@pytest.mark.parametrize("case", STALE)
def test_a_stale_record_is_reported_and_not_used(program: Any, record: Any, tmp_path: Path, case: str) -> None:
    p = program()
    task = unit_of(p, "rms_norm").tasks[0]
    changes, words = STALE[case]
    made = record(task, {"lanes": 8}, p.target, **changes)
    records.save(tmp_path / "x86-64-v3", [made], {})
    got = tuned(p, tmp_path)
    assert got.used == {}
    assert all(not k.knobs for k in got.kernels)
    (note,) = got.notes
    assert task.name in note
    assert "stale" in note
    assert words in note


@pytest.mark.parametrize("missing", ["partner", "other tile"])
def test_a_linear_layer_needs_both_records(program: Any, record: Any, tmp_path: Path, missing: str) -> None:
    p = program()
    unit = unit_of(p, "linear")
    one, many = other(unit)
    made = [record(unit.tasks[1], many, p.target)]
    if missing == "other tile":
        made.append(record(unit.tasks[0], one | {"tile": unit.linear.tile}, p.target))
    save(tmp_path, made)
    got = tuned(p, tmp_path)
    assert got.program.choices == ()
    assert got.used == {}
    assert "the other kernel of the layer" in got.notes[0]


@pytest.fixture(scope="module")
def weights() -> Any:
    from ds41_tvm.config import AttentionConfig

    return ds41_tvm.synthetic_weights(AttentionConfig.preset("tiny"), "tuned", layers=(0, 1))


def forward(runner: Any) -> np.ndarray:
    """Outputs of a prompt, of some tokens (fewer than `few`) and of single ones."""
    sequence, outs = runner.new_sequence(), []
    for tokens in (13, 3, 1):
        step = runner.step([(sequence, tokens)])
        for layer in runner.layers:
            x = ds41_tvm.random_input("tuned", layer, tokens, 1, tokens, runner.config.dim)[0]
            outs.append(runner.forward(layer, x, step))
        runner.commit(step)
    return np.concatenate(outs)


def test_compile_uses_records_and_results_do_not_change(
    program: Any, record: Any, tmp_path: Path, weights: Any
) -> None:
    p = program(layers=(0, 1))
    made = []
    chosen = [u for u in units(p) if u.tasks[0].kernel.op != "rope"]
    for unit in chosen:
        for task, values in zip(unit.tasks, other(unit), strict=True):
            more = {"few": 5} if unit.linear is not None and task is unit.tasks[-1] else {}
            made.append(record(task, values | more, p.target))
    save(tmp_path, made)
    config = p.config
    plain = ds41_tvm.build(config, weights, layers=(0, 1), target=V3, records=False)
    with_records = ds41_tvm.build(config, weights, layers=(0, 1), target=V3, records=tmp_path)
    assert with_records.program.choices
    want = forward(plain)
    assert forward(with_records).tobytes() == want.tobytes()

    compiled = ds41_tvm.compile(config, tmp_path / "a", weights, layers=(0, 1), target=V3, records=tmp_path)
    assert compiled.notes == ()
    manifest = decode((tmp_path / "a" / FILE).read_bytes(), "here")
    by_name = {made_.name for made_ in made}
    tunable = {t.kernel.op for u in chosen for t in u.tasks}
    assert all((k.record in by_name) == (k.op in tunable) for k in manifest.kernels)
    assert any(k.record is None for k in manifest.kernels)
    assert manifest.program() == with_records.program
    assert forward(ds41_tvm.load(tmp_path / "a")).tobytes() == want.tobytes()


def test_damaged_records_leave_the_defaults(program: Any, tmp_path: Path) -> None:
    folder = tmp_path / "x86-64-v3"
    folder.mkdir()
    (folder / "records.json").write_text('[\n{"kernel": "rope__heads_1", "op"')
    got = tuned(program(), tmp_path)
    assert got.used == {}
    assert any("rope__heads_1" in note for note in got.notes)
