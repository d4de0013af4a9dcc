"""Artefacts for CUDA, made without a GPU: native code of the right architecture, as TVM's runtime reads it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ds41_tvm
from ds41_tvm.compiler import nvcc, objects
from ds41_tvm.compiler.cuda import module_table, read_module_table
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import CompileError, NoCudaCompiler, TargetError

CUDA_MACHINE, MACHINE_OFFSET, FLAGS_OFFSET = 190, 18, 48  # of ELF
SHARED_LIMIT = 227 << 10  # bytes of a block on sm_90

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_kernel' for 'sm_90'
ptxas info    : Function properties for one_kernel
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size, 17028 bytes smem
ptxas info    : Compile time = 3.1 ms
ptxas info    : Compiling entry function 'two_kernel' for 'sm_90'
ptxas info    : Function properties for two_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""

LOAD = """
import ctypes, sys
import numpy as np
from pathlib import Path
from ds41_tvm.runtime.ffi import load_runtime, runtime_library
for stub in sys.argv[2:]:
    ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)
ffi = load_runtime()
ctypes.CDLL(str(runtime_library()[0].with_name("libtvm_runtime_cuda.so")), ctypes.RTLD_GLOBAL)
module = ffi.load_module(sys.argv[1])
kinds = [part.kind for part in module.imports]
function = module["rms_norm__dim_16__eps_1em20"]
assert module.imports[0].get_function(NAME + "_kernel") is not None
a, w, b = np.zeros((1, 16), np.uint16), np.zeros(16, np.uint16), np.zeros((1, 16), np.uint16)
try:
    function(a, w, b)
except ValueError as error:
    print(len(kinds), set(kinds), str(error).splitlines()[-1].strip())
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Layer 0 of the preset `tiny` for sm_90."""
    out = tmp_path_factory.mktemp("cuda") / "tiny"
    made = ds41_tvm.compile(AttentionConfig.preset("tiny"), out, layers=[0], target="cuda:sm_90")
    return SimpleNamespace(path=out, manifest=made.manifest, digest=made.digest)


def table(library: Path) -> bytes:
    """The content of ``__tvm_ffi__library_bin``: it begins eight bytes before a tree, whose end `_lib` marks."""
    data = library.read_bytes()
    mark = data.index(struct.pack("<Q", 4) + b"_lib")
    for begin in range(mark - 8, 0, -8):
        (size,) = struct.unpack_from("<Q", data, begin)
        (rows,) = struct.unpack_from("<Q", data, begin + 8)
        if rows * 16 + 8 == mark - begin and size < len(data):
            return data[begin : begin + 8 + size]
    raise AssertionError("no table of modules")


def test_an_artifact_is_code_of_host_and_device(artifact: SimpleNamespace) -> None:
    assert {p.name for p in artifact.path.iterdir()} == {"manifest.json", "kernels.cuda-sm_90.so", "kernels.ir.json"}
    codes = read_module_table(table(artifact.path / "kernels.cuda-sm_90.so"))
    assert len(codes) == len(artifact.manifest.kernels) > 10
    for code, kernel in zip(codes, artifact.manifest.kernels, strict=True):
        assert struct.unpack_from("<H", code, MACHINE_OFFSET)[0] == CUDA_MACHINE
        assert 90 in struct.pack("<I", struct.unpack_from("<I", code, FLAGS_OFFSET)[0])
        assert f"{kernel.name}_kernel".encode() in code


def test_the_assemblers_report_is_in_the_manifest(artifact: SimpleNamespace) -> None:
    assert json.loads((artifact.path / "manifest.json").read_text())["kernels"][0]["gpu"]
    for kernel in artifact.manifest.kernels:
        assert kernel.gpu, kernel.name
        for function in kernel.gpu:
            assert function.name.startswith(kernel.name)
            assert function.spill_stores == function.spill_loads == 0, function.name
            assert 0 < function.registers <= 65536 // function.threads
            assert function.shared_bytes + function.dynamic_shared_bytes <= SHARED_LIMIT, function.name
            assert function.threads % 32 == 0


def test_equal_inputs_give_equal_bytes(artifact: SimpleNamespace, tmp_path: Path) -> None:
    """A layer's kernels compiled again; the others are what this process already has."""
    config = AttentionConfig.preset("tiny")
    for key in [k for k in objects._compiled if k[0].kind == "cuda" and k[1].op in ("copy_rows", "rms_norm")]:
        del objects._compiled[key]
    again = ds41_tvm.compile(config, tmp_path / "again", layers=[0], target="cuda:sm_90")
    assert again.digest == artifact.digest
    for file in artifact.path.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def stub(folder: Path, library: str, symbols: list[str]) -> Path:
    """A library that has `symbols`, all of which fail."""
    (folder / "stub.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in symbols))
    out = folder / library
    subprocess.run(
        [objects.compiler(), "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{library}", "stub.c", "-o", str(out)],
        cwd=folder, check=True,
    )  # fmt: skip
    return out


def test_tvms_runtime_loads_it(artifact: SimpleNamespace, tmp_path: Path) -> None:
    """In a process where libraries without content stand in for driver and CUDA runtime: every kernel is found."""
    from ds41_tvm.artifact.elf import SharedLibrary
    from ds41_tvm.runtime.ffi import runtime_library

    runtime = runtime_library()[0].with_name("libtvm_runtime_cuda.so")
    wanted = sorted(name for name in undefined(runtime) if name.startswith("cu"))
    assert "cuModuleLoadData" in wanted
    driver = stub(tmp_path, "libcuda.so.1", [n for n in wanted if n[2].isupper()])
    cudart = stub(tmp_path, "libcudart.so.13", [n for n in wanted if not n[2].isupper()])
    library = artifact.path / "kernels.cuda-sm_90.so"
    code = LOAD.replace("NAME", repr(artifact.manifest.kernels[0].name))
    done = subprocess.run(
        [sys.executable, "-c", code, str(library), str(driver), str(cudart)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{len(artifact.manifest.kernels)} {{'cuda'}} expected cuda"
    assert set(SharedLibrary(library).kernels()) >= {k.name for k in artifact.manifest.kernels}


def undefined(library: Path) -> set[str]:
    """Names that a library takes from others."""
    text = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in text.stdout.splitlines()}


def test_reports_are_read_function_by_function() -> None:
    found = nvcc.report(REPORT)
    assert list(found) == ["one_kernel", "two_kernel"]
    one, two = found.values()
    assert (one.registers, one.stack_bytes, one.spill_stores, one.spill_loads, one.shared_bytes) == (
        64,
        8,
        12,
        16,
        17028,
    )
    assert (two.registers, two.stack_bytes, two.spill_stores, two.spill_loads, two.shared_bytes) == (10, 0, 0, 0, 0)


def test_a_table_of_modules_is_read_back() -> None:
    codes = [b"\x7fELF" + bytes([i]) * (5 + i) for i in range(3)]
    data = module_table([(b"functions", code) for code in codes])
    assert read_module_table(data) == codes
    assert struct.unpack_from("<Q", data)[0] == len(data) - 8


def test_source_that_nvcc_refuses() -> None:
    with pytest.raises(CompileError, match=r"could not compile some_kernel for sm_90: .*error"):
        nvcc.compile_cuda('extern "C" __global__ void k() { nonsense }', "sm_90", "some_kernel")


def test_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said before anything is compiled, and nothing is left behind."""
    monkeypatch.setattr(shutil, "which", lambda name, *more: None)
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: self.name != "nvcc" and is_file(self))
    with pytest.raises(NoCudaCompiler, match="pip install 'ds41-tvm"):
        ds41_tvm.compile(AttentionConfig.preset("tiny"), tmp_path / "out", layers=[0], target="cuda:sm_100")
    assert list(tmp_path.iterdir()) == []


def test_the_target_of_proofs_makes_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="for proofs"):
        ds41_tvm.compile(AttentionConfig.preset("tiny"), tmp_path / "out", layers=[0], target="opencl")
