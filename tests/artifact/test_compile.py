"""What `compile` writes, and that it never leaves half of it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm import errors
from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.describe import describe
from ds41_tvm.artifact.elf import SharedLibrary
from ds41_tvm.compiler import publish
from ds41_tvm.compiler.artifact import is_artifact
from ds41_tvm.packed_file import PackedFile


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_and_manifest(tiny):
    manifest = tiny.manifest
    assert set(contents(tiny.path)) == {"manifest.json", *manifest.files}
    assert manifest == schema.decode((tiny.path / "manifest.json").read_bytes(), "here")
    assert [layer.role for layer in manifest.layers] == list(tiny.config.roles)
    assert tuple(k.name for k in manifest.kernels) == tuple(k.name for k in manifest.program().kernels())
    scores = next(k for k in manifest.kernels if k.op == "block_scores")
    assert [(a.dtype, a.shape, a.alignment) for a in scores.arguments] == [
        ("uint16", ("n", "width"), 64), ("int32", ("n",), 64), ("uint16", ("n", "blocks"), 64),
    ]  # fmt: skip
    assert {k.rule for k in manifest.kernels} >= {"index-scores", "rowwise"}
    assert {k.op for k in manifest.kernels if k.fallback}.isdisjoint({"linear", "sparse_attention", "index_scores"})
    assert json.loads((tiny.path / "manifest.json").read_text())["config_digest"] == tiny.config.digest()


def test_weight_files_are_safetensors_of_aligned_tensors(tiny):
    safetensors = pytest.importorskip("safetensors.numpy")
    for layer in tiny.manifest.layers:
        file = PackedFile(tiny.path / layer.weights, errors.BadWeightFile)
        file.verify()
        theirs = safetensors.load_file(tiny.path / layer.weights)
        for name in file.specs():
            assert file.tensor(name).ctypes.data % 64 == 0
            np.testing.assert_array_equal(file.tensor(name), theirs[name])


def test_two_builds_give_the_same_bytes(tiny, tmp_path):
    again = ds41_tvm.compile(tiny.config, tmp_path / "again", tiny.weights)
    assert contents(again.path) == contents(tiny.path)


@pytest.mark.slow
def test_a_build_in_another_process_gives_the_same_bytes(tiny, tmp_path, python):
    code = (
        "import sys, ds41_tvm\nfrom ds41_tvm.golden import load_case\ncase = load_case(sys.argv[1])\n"
        "print(ds41_tvm.compile(case.config, sys.argv[2], case.weights).digest)"
    )
    done = python(code, tiny.case.path, tmp_path / "again")
    assert done.stdout.strip() == tiny.digest, done.stderr
    assert contents(tmp_path / "again") == contents(tiny.path)


def test_some_layers_without_weights_share_the_kernels(tiny, tmp_path):
    seen = []
    made = ds41_tvm.compile(
        tiny.config, tmp_path / "part", layers=[0, 2, 3], pooling="f32", progress=lambda *a: seen.append(a)
    )
    assert set(contents(made.path)) == {"manifest.json", "kernels.cpu.so", "kernels.ir.json"}
    assert [layer.role.layer for layer in made.manifest.layers] == [0, 2, 3]
    assert {k.ir for k in made.manifest.kernels} < {k.ir for k in tiny.manifest.kernels}
    assert seen[0][::2] == ("kernels", len(made.manifest.kernels))  # some may be compiled already
    assert seen[-1] == ("kernels", len(made.manifest.kernels), len(made.manifest.kernels))
    with pytest.raises(errors.ConfigError, match="layer 2 is missing"):
        ds41_tvm.compile(tiny.config, tmp_path / "part", layers=[3])


def test_the_module_has_the_code_of_every_kernel(tiny):
    kernels = SharedLibrary(tiny.path / "kernels.cpu.so").kernels()
    assert set(kernels) == {k.name for k in tiny.manifest.kernels}
    text = next(s for s in SharedLibrary(tiny.path / "kernels.cpu.so").sections if s.name == ".text")
    spans = sorted(kernels.values())
    assert all(size > 500 for _, size in spans)
    assert all(a + size == b for (a, size), (b, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] == text.address + text.size
    assert sum(k["code_bytes"] for k in describe(tiny.path)["kernels"]) <= text.size


def test_refusals(tiny, tmp_path):
    for target, why in (("cuda", "unknown architecture"), ("cuda:sm_9", "sm_90"), ("opencl", "for proofs")):
        with pytest.raises(errors.TargetError, match=why):
            ds41_tvm.compile(tiny.config, tmp_path / "x", target=target)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(errors.NotAnArtifact, match="something else"):
        ds41_tvm.compile(tiny.config, tmp_path / "mine")
    with pytest.raises(errors.NotAnArtifact, match="no folder"):
        ds41_tvm.compile(tiny.config, tmp_path / "mine" / "thesis.txt")
    with pytest.raises(errors.MissingTensor):
        ds41_tvm.compile(tiny.config, tmp_path / "x", {})
    with pytest.raises(errors.MissingTensor):
        ds41_tvm.compile(tiny.config, tmp_path / "x", {"layers.0.attn.attn_sink": np.zeros(4, np.float32)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "do not lose"


def test_no_compiler_is_said(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.CompileError, match=r"no C\+\+ compiler"):
        ds41_tvm.compile(tiny.config, tmp_path / "x", pooling="f32")
    assert list(tmp_path.iterdir()) == []


# ---- folders appear whole


def test_an_older_artefact_is_replaced_also_where_folders_cannot_be_exchanged(tmp_path, monkeypatch):
    def fill(text):
        return lambda folder: (folder / "manifest.json").write_text(text)

    ours = '{"format": "ds41-tvm artifact", "n": %d}'
    out = tmp_path / "a"
    publish.publish(out, fill(ours % 1), is_artifact)
    publish.publish(out, fill(ours % 2), is_artifact)
    assert (out / "manifest.json").read_text() == ours % 2

    class NoExchange:
        pass

    monkeypatch.setattr(publish.ctypes, "CDLL", lambda *a, **k: NoExchange())
    publish.publish(out, fill(ours % 3), is_artifact)
    assert (out / "manifest.json").read_text() == ours % 3

    def fails(folder):
        (folder / "manifest.json").write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        publish.publish(out, fails, is_artifact)
    assert contents(out) == {"manifest.json": (ours % 3).encode()}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def killed_compile(tiny, out, seconds):
    """Compile in a forked child, which knows the kernels already, and kill it after some time."""
    child = os.fork()
    if child == 0:
        try:
            ds41_tvm.compile(tiny.config, out, tiny.weights)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_compilation_killed_at_any_time_leaves_the_old_artefact_or_none(tiny, tmp_path):
    start = time.perf_counter()
    ds41_tvm.compile(tiny.config, tmp_path / "old", tiny.weights)
    whole = time.perf_counter() - start
    rng, killed = random.Random(0), 0
    for round_number in range(12):
        out = tmp_path / ("new" if round_number % 2 else "old")
        existed = out.exists()
        killed += killed_compile(tiny, out, rng.uniform(0, 1.1 * whole))
        assert not existed or out.exists()
        if out.exists():
            assert ds41_tvm.open_artifact(out, expect=tiny.digest).digest == tiny.digest
    assert killed >= 3, "the compilations ended before they were killed"
    ds41_tvm.compile(tiny.config, tmp_path / "old", tiny.weights)
    ds41_tvm.compile(tiny.config, tmp_path / "new", tiny.weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"], "leftovers of the dead stay"


@pytest.mark.slow
def test_fifty_compilations_killed_from_outside(tiny, tmp_path):
    """The command itself, killed at random moments between its start and some time after its end."""
    folder = ds41_tvm.write_synthetic(tiny.config, tmp_path / "checkpoint", linear="bf16")
    root, out = tmp_path / "out", tmp_path / "out" / "tiny"
    command = [sys.executable, "-m", "ds41_tvm", "compile", "--checkpoint", str(folder), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment, capture_output=True)
    whole, digest = time.perf_counter() - start, ds41_tvm.open_artifact(out).digest
    rng = random.Random(1)
    for number in range(50):
        # Half of them near the end, where files are written.
        delay = whole * (rng.uniform(0, 1.1) if number % 2 else rng.uniform(0.8, 1.1))
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.kill()
        process.wait()
        assert ds41_tvm.open_artifact(out).digest == digest
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert [path.name for path in root.iterdir()] == ["tiny"]


def test_two_processes_compile_to_the_same_place(tiny, tmp_path):
    out = tmp_path / "same"
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ds41_tvm.compile(tiny.config, out, tiny.weights)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0, 0]
    assert contents(out) == contents(tiny.path)
    assert [path.name for path in tmp_path.iterdir()] == ["same"]
