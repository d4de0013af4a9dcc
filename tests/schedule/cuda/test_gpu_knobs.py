"""No knob of a GPU's programs changes a bit of any result, and every candidate of a space can be compiled."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41_tvm.compiler import objects
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import TuneError
from ds41_tvm.program import Kernel, Program, kernel
from ds41_tvm.proof.opencl import opencl_function
from ds41_tvm.runtime import cuda_driver
from ds41_tvm.schedule import schedule
from ds41_tvm.target import parse_target
from ds41_tvm.tune import worker
from ds41_tvm.tune.apply import program_digest
from ds41_tvm.tune.candidates import Candidate, compile_candidates
from ds41_tvm.tune.inputs import arguments, checks, output_rows
from ds41_tvm.tune.session import Options, tune
from ds41_tvm.tune.task import task_of

ATTENTION = {"heads": 20, "dim": 64, "window": 40, "ring_rows": 48, "block_rows": 16, "form": "cuda"}
SCORES = {"heads": 5, "dim": 64, "block_rows": 16, "candidate_block": 0, "spread": 0}


def linear(rows: int, weight: str, total: str) -> Kernel:
    """Four tiles of columns of one group; eight chunks of inner indices, or sixteen where they are short."""
    sizes = {"n": 128, "k": 2048, "groups": 1, "tile": 32}
    return kernel("linear", **sizes, weight=weight, out="bf16", total=total, form="cuda", rows=rows)


KERNELS: dict[str, Kernel] = {
    "one row": linear(1, "bf16", "f32"),
    "one row, fp8, f64": linear(1, "fp8", "f64"),
    "many rows": linear(16, "bf16", "f64"),
    "many rows, fp8": linear(16, "fp8", "f32"),
    "attention": kernel("sparse_attention", **ATTENTION, k=70, split=1),
    "attention of the window, parts": kernel("sparse_attention", **ATTENTION, k=0, split=2),
    "attention, rows shared out": kernel("sparse_attention", **ATTENTION, k=70, split=8),
    "scores": kernel("index_scores", **SCORES),
}


def output(k: Kernel) -> bytes:
    """What a kernel writes for the inputs that winners are checked with."""
    function = opencl_function(schedule(k, "opencl")[1])
    out = b""
    for case in checks(k):
        arrays = arguments(Kernel(k.op, k.params), case)
        function(*arrays)
        out += np.ascontiguousarray(output_rows(k, case, arrays[-1])).tobytes()
    return out


# Attention takes long to compile: the form that shares rows out keeps tiles on their way as the others do, and these
# are in the slow test.
LONG = ("attention", "attention of the window, parts")
QUICK = [name for name in KERNELS if name not in LONG]


@pytest.mark.parametrize("name", QUICK)
def test_every_value_of_every_knob(name: str, each_value: Any) -> None:
    task = task_of(KERNELS[name], "opencl")
    assert task.knobs
    want = output(task.kernel)
    assert len(set(want)) > 100
    for values in each_value(task):
        assert output(task.with_values(values)) == want, values


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_combination(name: str) -> None:
    task = task_of(KERNELS[name], "opencl")
    want = output(task.kernel)
    for values in task.points():
        assert output(task.with_values(values)) == want, values


def test_programs_of_two_values_differ() -> None:
    """Otherwise the tests above compare a program with itself."""
    for k in (KERNELS[name] for name in QUICK):
        task = task_of(k, "opencl")
        for name, values in task.knobs:
            two = [program_digest(task.with_values(task.default | {name: value}), "opencl") for value in values[:2]]
            assert two[0] != two[1], (k.name, name)


def test_candidates_are_compiled_and_judged() -> None:
    """All that a small space offers, in its order; a GPU with little shared memory refuses what asks for more."""
    released = {"heads": 64, "dim": 512, "window": 128, "ring_rows": 192, "block_rows": 128, "form": "cuda"}
    small = task_of(kernel("index_scores", **SCORES | {"dim": 128}), "cuda")
    large = task_of(kernel("sparse_attention", **released, k=512, split=2), "cuda")
    large = large._replace(knobs=(("stages", (2, 6)),))
    told: list[tuple[str, int, int]] = []
    found = list(compile_candidates(parse_target("cuda:sm_86"), [small, large], lambda *told_: told.append(told_)))
    assert [c.knobs for c in found] == [*small.points(), {"stages": 2}, {"stages": 6}]
    assert [c.state for c in found] == ["compiled"] * small.combinations + ["compiled", "too large"]
    assert [c.default for c in found] == [True, *[False] * (small.combinations - 1), True, False]
    assert not any(c.wrong for c in found)
    assert "more than a block of sm_86 has" in found[-1].message
    assert min(c.registers for c in found[:-1]) > 16
    assert told[-1] == ("sparse_attention", len(found), len(found))


def test_a_candidate_that_does_not_compile_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("no such program")

    monkeypatch.setattr(objects, "schedule", broken)
    task = task_of(KERNELS["scores"], "cuda")
    found = list(compile_candidates(parse_target("cuda:sm_90"), [task]))
    assert len(found) == task.combinations
    assert all(c.state == "failed" and c.wrong and "no such program" in c.message for c in found)


def test_what_is_wrong() -> None:
    """A default must compile, fit and not spill; of other values only failures are defects."""
    for state, default in itertools.product(("compiled", "spills", "too large", "failed"), (True, False)):
        candidate = Candidate(kernel="k", knobs={}, default=default, state=state)  # type: ignore[arg-type]
        assert candidate.wrong == (state == "failed" or (default and state != "compiled"))


def test_a_candidate_for_a_gpu_becomes_a_library_with_machine_code(tmp_path: Any) -> None:
    made = worker.compile_kernel(KERNELS["scores"], parse_target("cuda:sm_90"))
    data = Path(worker.export_into(str(tmp_path))(made)).read_bytes()
    assert data.startswith(b"\x7fELF")
    assert b"__tvm_ffi__library_bin" in data
    assert b"main_kernel" in data


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-absent.so.1")
    cuda_driver.driver.cache_clear()
    config = AttentionConfig.preset("tiny")
    for target, said in (("cuda:sm_90", r"no NVIDIA driver.*--rpc; --dry-run compiles"), ("opencl", "for proofs")):
        with pytest.raises(TuneError, match=said):
            tune(Program(config=config, layers=(0,), target=parse_target(target)), Options(out=tmp_path, work=tmp_path))
    assert list(tmp_path.iterdir()) == []
