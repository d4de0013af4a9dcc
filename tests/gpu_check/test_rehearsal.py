"""The check for GPUs, rehearsed with kernels of the processor: the same bundle, script and report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ds41_tvm import cli
from ds41_tvm.artifact import manifest as schema
from ds41_tvm.bench import kernel_work
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import BundleError, UsageError
from ds41_tvm.gpu_check import pack as packing

ROOT = Path(__file__).parents[2]
GOLDEN, SCRIPT = ROOT / "tests" / "golden", ROOT / "tools" / "gpu_check.sh"
PARTS = "machine,golden,invariance,speed"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A check of small sizes for this processor."""
    out = tmp_path_factory.mktemp("check") / "check.tar"
    size = packing.pack(
        out, "cpu:x86-64-v3", GOLDEN, AttentionConfig.preset("tiny"), tuple(range(6)), 24, ("tiny_batch2",),
        ("bf16",), copy_bytes=1 << 20, least=1e-4,
    )  # fmt: skip
    assert size == out.stat().st_size < packing.LIMIT
    return out


def run(bundle: Path, report: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As on a machine that has Python, NumPy and tvm-ffi only: the package and TVM are hidden."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(SCRIPT), str(bundle), str(report), *options], capture_output=True, text=True, check=False,
        env={**environment, "PYTHON": sys.executable}, cwd=report.parent,
    )  # fmt: skip


def everything(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text().split("```json\n")[1].split("\n```")[0])
    return found


@pytest.mark.parametrize("options", [(), ("--emulate",)])
def test_all_parts_run_and_are_right(bundle: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(bundle, tmp_path / "report.md", "--parts", PARTS, *options)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "report.md").read_text()
    found = everything(tmp_path / "report.md")
    parts = found["parts"]
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(PARTS.split(","), "good")
    (machine,) = parts["machine"]["rows"]
    assert machine["device"] == ("an emulated device" if options else "the host")
    assert machine["copy"] > 0
    assert machine["matrix_own"] > 0
    assert [row["case"] for row in parts["golden"]["rows"]] == ["tiny_batch2.lowest-index", "tiny_batch2"]
    assert [row["selections"] for row in parts["golden"]["rows"]] == [328, 328]
    assert [(row["how"], row["ok"]) for row in parts["invariance"]["rows"]] == [
        ("pieces", True), ("batch", True), ("nothing of the poison arrives", True),
    ] * 2  # fmt: skip
    speed = parts["speed"]["rows"]
    with tarfile.open(bundle) as tar:
        file = tar.extractfile("check/artifacts/speed-bf16/manifest.json")
        assert file is not None
        program = schema.decode(file.read(), "manifest.json").program()
    assert [(row["phase"], row["layer"]) for row in speed] == [(p, i) for p in ("prefill", "decode") for i in range(6)]
    for row in speed:
        assert row["seconds"] > 0
        assert row["tokens"] == (1 if row["phase"] == "decode" else 24)
        names = [kernel["kernel"] for kernel in row["kernels"]]
        assert sum(name.startswith("sparse_attention") for name in names) == 1
        assert sum(name.startswith("linear") for name in names) >= 5
        start, count = row["context"] - row["tokens"], row["tokens"]
        counted = list(kernel_work.calls(program, row["layer"], start, count, machine["tasks"]))
        assert [c.kernel for c in counted if not c.kernel.startswith("copy_rows")] == names  # those are the commit's
        for kernel, call in zip(row["kernels"], [c for c in counted if c.kernel[:9] != "copy_rows"], strict=True):
            assert (kernel["bytes"], kernel["flops"]) == (call.work.bytes, call.work.flops + call.work.dots)
    text = (tmp_path / "report.md").read_text()
    assert "| linear | phase | layer | kernel | µs | GB/s | TFLOP/s |" in text
    assert "| tiny_batch2.lowest-index | lowest-index | bf16 | yes | 328 |" in text
    assert "| bf16 | decode | 5 (reindex, ratio 1) | 1 |" in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_wrong_values_and_broken_parts_are_told(bundle: Path, tmp_path: Path) -> None:
    with tarfile.open(bundle) as tar:
        tar.extractall(tmp_path, filter="data")
    folder = tmp_path / "check"
    plan = json.loads((folder / "plan.json").read_text())
    judge = folder / "ds41_tvm" / "golden" / "judge.py"
    judge.write_text(
        judge.read_text().replace("FLOOR = 2e-3", "FLOOR = 1e-9").replace("SPREADS = 4.0", "SPREADS = 0.0")
    )
    plan["invariance"][0][0] = "not-there"
    (folder / "plan.json").write_text(json.dumps(plan))
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(folder, "check")
    report = tmp_path / "report.md"
    done = run(tmp_path / "bad.tar", report, "--parts", "golden,invariance")
    assert done.returncode == 1
    parts = everything(report)["parts"]
    assert parts["golden"]["state"] == "wrong: 2 of 2"
    assert parts["golden"]["rows"][0]["findings"]
    assert parts["invariance"]["state"] == "failed: exit code 1"
    assert "MissingFile" in parts["invariance"]["said"]
    assert "MissingFile" in report.read_text()
    late = run(tmp_path / "bad.tar", report, "--parts", "golden", "--seconds", "0")
    assert late.returncode == 1
    assert everything(report)["parts"]["golden"]["state"] == "not run: no time left"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "absent.tar", tmp_path / "r.md").returncode == 2
    with pytest.raises(UsageError, match="no recorded case begins with nothing"):
        packing.pack(tmp_path / "x.tar", "cpu", GOLDEN, cases=("nothing",))
    assert cli.run(["gpu-check", "--target", "cuda:sm_1", "--out", str(tmp_path / "x.tar")]) == 2
    assert cli.run(["gpu-check", "--target", "cpu", "--out", str(tmp_path / "x.tar"), "--golden", str(tmp_path)]) == 2


def test_a_bundle_above_the_limit_is_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LIMIT", 1000)
    with pytest.raises(BundleError, match="expected at most 1000"):
        packing.pack(
            tmp_path / "x.tar", "cpu:x86-64-v3", GOLDEN, AttentionConfig.preset("tiny"), tuple(range(6)), 24,
            ("tiny_batch2.low",), ("bf16",),
        )  # fmt: skip
    assert not (tmp_path / "x.tar").exists()
