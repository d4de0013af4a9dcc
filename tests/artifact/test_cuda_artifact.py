"""Artefacts for CUDA where there is no GPU: what `load` refuses and says first, what `inspect` shows of their code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import ds41_tvm
from ds41_tvm import cli, errors
from ds41_tvm.artifact import files
from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.describe import describe
from ds41_tvm.artifact.load import open_artifact
from ds41_tvm.artifact.occupancy import LIMITS, occupancy
from ds41_tvm.config import AttentionConfig
from ds41_tvm.runtime import cuda_driver
from ds41_tvm.target import CUDA_LEVELS, SMALL_SHARED, parse_target

CODE = schema.GpuCode(
    name="some_kernel", registers=64, stack_bytes=0, spill_stores=8, spill_loads=12, shared_bytes=1024,
    dynamic_shared_bytes=40000, threads=256,
)  # fmt: skip


@pytest.fixture
def artifact(tiny: SimpleNamespace, tmp_path: Path) -> Path:
    """As if `tiny` had been compiled for sm_90, with the processor's library in place of the code."""
    folder, target = Path(shutil.copytree(tiny.path, tmp_path / "cuda")), parse_target("cuda:sm_90")
    program = msgspec.structs.replace(tiny.manifest.program(), target=target)
    entry = tiny.manifest.kernels[0]
    module = schema.module_name(target)
    assert module == "kernels.cuda-sm_90.so"
    (folder / schema.MODULE).rename(folder / module)
    manifest = msgspec.structs.replace(
        tiny.manifest,
        target=target,
        requires=(),
        layers=tuple(msgspec.structs.replace(layer, weights=None) for layer in tiny.manifest.layers),
        kernels=tuple(
            msgspec.structs.replace(entry, name=k.name, op=k.op, params=k.params, gpu=(CODE,))
            for k in program.kernels()
        ),
        files={name: files.describe(folder / name, False) for name in sorted((module, schema.IR))},
    )
    (folder / schema.FILE).write_bytes(schema.encode(manifest))
    return folder


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-no-machine-has.so.1")
    cuda_driver.driver.cache_clear()
    yield
    cuda_driver.driver.cache_clear()


def test_without_a_driver_that_is_said_before_anything_else(artifact: Path, no_driver: Any, capsys: Any) -> None:
    (artifact / "kernels.cuda-sm_90.so").write_bytes(b"damaged")
    (artifact / schema.IR).unlink()
    for call in (ds41_tvm.load, open_artifact):
        with pytest.raises(errors.NoDriver, match="no NVIDIA driver; expected one, with a GPU") as caught:
            call(artifact)
        assert isinstance(caught.value, errors.ArtifactError)
    assert cli.run(["run", "--artifact", str(artifact)]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err


class Gpu:
    """Stands for a GPU that is there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def check_level(self, level: str, where: str) -> None:
        raise errors.UnsupportedGpu(f"{where}: {level} on {self.number}")


def test_another_gpu_is_said_before_files_are_read(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds41_tvm.runtime.device_cuda.CudaDevice", Gpu)
    (artifact / schema.IR).unlink()
    with pytest.raises(errors.UnsupportedGpu, match="sm_90 on 3"):
        ds41_tvm.load(artifact, gpu=3)


def test_then_files_are_checked_as_always(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "check_level", lambda *_: None)
    monkeypatch.setattr("ds41_tvm.runtime.device_cuda.CudaDevice", Gpu)
    with pytest.raises(errors.BadModule, match="has no symbol"):
        ds41_tvm.load(artifact)
    with open(artifact / "kernels.cuda-sm_90.so", "r+b") as file:
        file.write(b"\0")
    with pytest.raises(errors.DigestMismatch, match="kernels.cuda-sm_90.so"):
        ds41_tvm.load(artifact)


def test_code_for_proofs_cannot_be_loaded(artifact: Path) -> None:
    manifest = schema.decode((artifact / schema.FILE).read_bytes(), "x")
    target = parse_target("opencl")
    program = msgspec.structs.replace(manifest.program(), target=target)
    entry, module = manifest.kernels[0], schema.module_name(target)
    changed = msgspec.structs.replace(
        manifest,
        target=target,
        kernels=tuple(msgspec.structs.replace(entry, name=k.name, op=k.op, params=k.params) for k in program.kernels()),
        files={module: manifest.files["kernels.cuda-sm_90.so"], schema.IR: manifest.files[schema.IR]},
    )
    (artifact / schema.FILE).write_bytes(schema.encode(changed))
    with pytest.raises(errors.UnsupportedGpu, match="compiled for opencl:generic; expected cpu or cuda"):
        ds41_tvm.load(artifact)


def test_inspect_shows_what_the_assembler_reports(artifact: Path, no_driver: Any, capsys: Any) -> None:
    assert cli.run(["inspect", str(artifact), "--verify"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in (
        "cuda:sm_90",
        "registers",
        "spilled B",
        "some_kernel",
        "8 / 12",
        "41024",
        "256",
        "50%",
        "kernels.cuda-sm_90.so",
    ):
        assert word in text, word
    found = describe(artifact)
    assert found["kernels"][0]["gpu"] == [{**msgspec.structs.asdict(CODE), "blocks": 4, "occupancy": 0.5}]
    assert cli.run(["inspect", str(artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["gpu"][0]["registers"] == 64


def test_inspect_shows_the_least_times(artifact: Path, no_driver: Any, capsys: Any) -> None:
    assert cli.run(["inspect", str(artifact), "--floors"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    most = AttentionConfig.preset("tiny").max_seq_len
    for word in ("At 4.3 TB/s, 790 TFLOP/s", f"decode {most}", f"prefill {most}", "sparse_attention 4 x 32 k=6"):
        assert word in text, text
    assert cli.run(["inspect", str(artifact), "--floors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["digest"] == describe(artifact)["digest"]
    for case in found["floors"]["cases"]:
        for amount in ("bytes", "flops", "dots", "calls"):
            assert sum(k[amount] for k in case["kernels"]) == sum(x[amount] for x in case["layers"])
        assert all((k["registers"], k["shared"], k["occupancy"]) == (64, 41024, 0.5) for k in case["kernels"])
        assert all(x["seconds"] >= x["least"] > 0 for x in case["layers"])
        for k in case["kernels"]:
            assert k["seconds"] >= max(k["bytes"] / 4.3e12, (k["flops"] + k["dots"] / 2) / 790e12) * (1 - 1e-12)
    assert cli.run(["inspect", str(artifact), "--floors", "--json", "--read-tbs", "2", "--bf16-tflops", "1e9"]) == 0
    slow = json.loads(capsys.readouterr().out)["floors"]["cases"][0]["layers"][0]
    assert slow["seconds"] == pytest.approx(slow["bytes"] / 2e12)


def test_least_times_are_of_gpus_and_rates_of_least_times(artifact: Path, tiny: Any, capsys: Any) -> None:
    for words, said in (
        ([str(tiny.path), "--floors"], "floors are of artefacts for cuda:sm_NN"),
        ([str(artifact), "--read-tbs", "4"], "--read-tbs 4: expected a positive rate, with --floors"),
        ([str(artifact), "--floors", "--bf16-tflops", "0"], "--bf16-tflops 0: expected a positive rate"),
        ([str(artifact), "--floors", "--ir", "rope"], "at most one of"),
    ):
        assert cli.run(["inspect", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "blocks", "part"),
    [
        ({}, 4, 0.5),  # registers: 64 * 256 of 65536
        ({"registers": 33}, 5, 0.625),  # 40 a thread are handed out; then shared memory: 42048 of 233472
        ({"registers": 16, "dynamic_shared_bytes": 0}, 8, 1.0),  # warps
        ({"registers": 16, "dynamic_shared_bytes": 0, "threads": 32}, 32, 0.5),  # blocks
        ({"dynamic_shared_bytes": 226 << 10}, 1, 0.125),
        ({"dynamic_shared_bytes": (226 << 10) + 1}, 0, 0.0),
        ({"threads": 1056}, 0, 0.0),
        ({"registers": 255, "threads": 1024}, 0, 0.0),
        ({"threads": 0}, None, None),
    ],
)
def test_occupancy(changes: dict[str, int], blocks: int | None, part: float | None) -> None:
    assert occupancy(msgspec.structs.replace(CODE, **changes), "sm_90") == {"blocks": blocks, "occupancy": part}


def test_limits_differ_by_level() -> None:
    assert occupancy(CODE, "sm_90a") == occupancy(CODE, "sm_90")
    assert occupancy(CODE, "sm_86") == {"blocks": 2, "occupancy": round(16 / 48, 3)}
    assert occupancy(CODE, "sm_42") == {"blocks": None, "occupancy": None}
    assert set(LIMITS) == set(CUDA_LEVELS)
    assert {level for level, limits in LIMITS.items() if limits.shared_block < 128 << 10} == set(SMALL_SHARED)


def check_code(manifest: schema.Manifest) -> None:
    """Nothing spilled, and shared memory within what a block of this kind of GPU can have."""
    limits = LIMITS[manifest.target.level]
    for kernel in manifest.kernels:
        assert kernel.gpu, f"{kernel.name} launches nothing"
        for code in kernel.gpu:
            assert (code.spill_stores, code.spill_loads) == (0, 0), f"{code.name} spills: {code}"
            assert code.shared_bytes + code.dynamic_shared_bytes <= limits.shared_block, f"{code.name}: {code}"
            assert code.registers <= 255
            assert occupancy(code, manifest.target.level)["blocks"] != 0, f"not one block of {code.name} fits: {code}"


def test_compiled_code_spills_nothing(tmp_path: Path) -> None:
    """A layer of every operator but selection's; the released sizes are `slow`."""
    made = ds41_tvm.compile(AttentionConfig.preset("tiny"), tmp_path / "out", layers=[0], target="cuda:sm_90")
    check_code(made.manifest)
    assert describe(made.path, verify=True)["target"] == "cuda:sm_90"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("linear", ["bf16", "fp8"])
def test_released_sizes_spill_nothing(level: str, linear: Any, tmp_path: Path) -> None:
    config = AttentionConfig.preset("flash")
    layers = [0, 2, 20, 24]
    made = ds41_tvm.compile(config, tmp_path / "out", layers=layers, target=f"cuda:{level}", linear=linear)
    everything = msgspec.structs.replace(made.manifest.program(), layers=tuple(range(config.n_layers)))
    assert {k.name for k in made.manifest.kernels} == {k.name for k in everything.kernels()}, (
        "a kind of layer is missing"
    )
    check_code(made.manifest)
