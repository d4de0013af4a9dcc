"""A bundle is complete, the same every time, and runs where TVM is not installed."""

import json
import os
import subprocess
import sys
import tarfile
import venv

import pytest

from ds41_tvm import cli, errors
from ds41_tvm.artifact.bundle import bundle
from ds41_tvm.artifact.selftest import main, selftest


def test_contents_and_equal_bytes(tiny, tmp_path, capsys):
    size = bundle(tiny.path, tmp_path / "tiny.tar")
    assert cli.run(["bundle", str(tiny.path), "--out", str(tmp_path / "b" / "tiny.tar"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == size
    assert (tmp_path / "tiny.tar").read_bytes() == (tmp_path / "b" / "tiny.tar").read_bytes()
    with tarfile.open(tmp_path / "tiny.tar") as tar:
        names = set(tar.getnames())
        assert tar.extractfile("tiny/artifact/manifest.json").read() == (tiny.path / "manifest.json").read_bytes()
    assert {"tiny/run.py", "tiny/ds41_tvm/lib/libtvm_runtime.so", "tiny/msgspec/__init__.py"} <= names
    parts = {name.split("/")[2] for name in names if name.startswith("tiny/ds41_tvm/")}
    assert parts.isdisjoint({"compiler", "kernels", "schedule", "cli"})


def test_what_is_imported_is_in_the_bundle(tiny, tmp_path, python):
    """With nothing of the source tree or apache-tvm in reach: -I hides both, the venv's numpy and tvm_ffi stay."""
    bundle(tiny.path, tmp_path / "tiny.tar")
    with tarfile.open(tmp_path / "tiny.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    code = (
        "import sys, runpy\nclass Hide:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('tvm', 'torch'):\n            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\nsys.argv = [sys.argv[1]]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "tiny" / "run.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["digest"] == selftest(str(tiny.path))["digest"]
    assert not found["compiler_mapped"]


@pytest.mark.slow
@pytest.mark.parametrize("wheels", [False, True])
def test_a_fresh_environment_without_tvm(tiny, tmp_path, wheels):
    bundle(tiny.path, tmp_path / "tiny.tar", wheels)
    with tarfile.open(tmp_path / "tiny.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    venv.create(tmp_path / "venv", with_pip=True)
    interpreter = str(tmp_path / "venv" / "bin" / "python")
    run = [interpreter, "-I", str(tmp_path / "tiny" / "run.py")]
    without = subprocess.run(run, capture_output=True, text=True, check=False)
    assert without.returncode == 1
    assert "pip install" in without.stderr
    assert ("--no-index" in without.stderr) == wheels
    command = without.stderr.split("install it: ")[1].split()
    subprocess.run(command, check=True, capture_output=True)
    installed = subprocess.run([interpreter, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "apache-tvm-ffi" in installed
    assert "apache-tvm " not in installed
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digest"] == selftest(str(tiny.path))["digest"]


def test_refusals(tiny, copy, tmp_path, monkeypatch, capsys):
    with open(copy / "weights.layer-03.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    with pytest.raises(errors.DigestMismatch):
        bundle(copy, tmp_path / "out" / "x.tar")
    monkeypatch.setattr("ds41_tvm.artifact.bundle.abi", lambda: {"tvm": "0.99"})
    with pytest.raises(errors.BundleError, match=r"needs libtvm_runtime.so of TVM 0\.27"):
        bundle(tiny.path, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()
    assert main([str(copy)]) == 1
    assert capsys.readouterr().err.startswith("DigestMismatch: ")


def test_only_files_are_replaced(tiny, tmp_path):
    """A pipe or a device in the bundle's place stays what it is."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(errors.BundleError, match="expected the name of a file"):
            bundle(tiny.path, place)
    assert (tmp_path / "pipe").is_fifo()
