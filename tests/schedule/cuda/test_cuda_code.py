"""Artefacts for CUDA, made without a GPU: native code of the right architecture, as TVM's runtime reads it."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ds41_tvm
from ds41_tvm.artifact.elf import SharedLibrary
from ds41_tvm.artifact.occupancy import LIMITS
from ds41_tvm.compiler import cuda, nvcc, objects
from ds41_tvm.compiler.cuda import module_table, read_module_table
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import CompileError, NoCudaCompiler, TargetError
from ds41_tvm.program import Kernel, Program, kernel
from ds41_tvm.runtime.ffi import runtime_library
from ds41_tvm.target import parse_target

CUDA_MACHINE, MACHINE_OFFSET, FLAGS_OFFSET = 190, 18, 48  # of ELF

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
WELL = REPORT.replace("12 bytes spill", "0 bytes spill").replace("16 bytes spill", "0 bytes spill")

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


TARGET = parse_target("cuda:sm_90")
FEW = (
    kernel("copy_rows", size=33),
    kernel("rms_norm", dim=16, eps=1e-20),
    kernel("scale_weights", heads=6, factor=0.3),
    kernel("topk_lowest_index", k=512, size=8),
    kernel("topk_torch_cpu", k=3),
)


def compile_few() -> list[objects.CompiledKernel]:
    return objects.compile_kernels(SimpleNamespace(kernels=lambda: FEW, target=TARGET))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A library of a few kernels for sm_90, and what is said about them."""
    library = tmp_path_factory.mktemp("cuda") / "kernels.so"
    compiled = compile_few()
    objects.link([k.code for k in compiled], library, [k.device for k in compiled if k.device is not None])
    return SimpleNamespace(library=library, compiled=compiled)


def table(library: Path) -> bytes:
    """The content of ``__tvm_ffi__library_bin``, 64-byte aligned: its size, then a tree, whose end `_lib` marks."""
    data = library.read_bytes()
    mark = data.index(struct.pack("<Q", 4) + b"_lib")
    for begin in range(mark // 64 * 64, 0, -64):
        (size,) = struct.unpack_from("<Q", data, begin)
        (rows,) = struct.unpack_from("<Q", data, begin + 8)
        if rows * 16 + 8 == mark - begin and size < len(data):
            return data[begin : begin + 8 + size]
    raise AssertionError("no table of modules")


def test_a_library_holds_code_of_host_and_device(made: SimpleNamespace) -> None:
    codes = read_module_table(table(made.library))
    assert len(codes) == len(FEW)
    for code, wanted in zip(codes, FEW, strict=True):
        assert struct.unpack_from("<H", code, MACHINE_OFFSET)[0] == CUDA_MACHINE
        assert 90 in struct.pack("<I", struct.unpack_from("<I", code, FLAGS_OFFSET)[0])
        assert f"{wanted.name}_kernel".encode() in code
    assert set(SharedLibrary(made.library).kernels()) >= {k.name for k in FEW}


def check_report(kernels: list[objects.CompiledKernel], shared_limit: int) -> None:
    for k in kernels:
        assert k.entry.gpu, k.entry.name
        for function in k.entry.gpu:
            assert function.name.startswith(k.entry.name)
            assert function.stack_bytes == function.spill_stores == function.spill_loads == 0, function
            assert 0 < function.registers <= 65536 // function.threads, function
            assert function.shared_bytes + function.dynamic_shared_bytes <= shared_limit, function
            assert function.threads % 32 == 0


def test_the_assemblers_report(made: SimpleNamespace) -> None:
    check_report(made.compiled, 48 << 10)
    assert [len(k.entry.gpu) for k in made.compiled] == [1, 1, 1, 1, 2]
    assert not any(k.entry.fallback for k in made.compiled)


FLASH = AttentionConfig.preset("flash")


def released(level: str) -> list[Kernel]:
    """Every kernel that the released sizes need, in any mode."""
    layers, target = tuple(range(FLASH.n_layers)), parse_target(f"cuda:{level}")
    modes: tuple[dict[str, Any], ...] = (
        {}, {"pooling": "f32"}, {"ties": "torch-cpu"}, {"linear": "fp8"}, {"linear": "fp8", "grouped": "fp8"},
    )  # fmt: skip
    programs = [Program(config=FLASH, layers=layers, target=target, **mode) for mode in modes]
    return sorted({k for program in programs for k in program.kernels()}, key=lambda k: k.name)


def check_released(level: str, kernels: list[Kernel]) -> None:
    """All compile; nothing is spilled, and shared memory suffices."""
    program: Any = SimpleNamespace(kernels=lambda: kernels, target=parse_target(f"cuda:{level}"))
    check_report(objects.compile_kernels(program), LIMITS[level].shared_block)


def test_the_largest_kernels_of_the_released_sizes() -> None:
    """Those nearest to the limits of registers and shared memory; all of them are `slow`."""
    named = [k for k in released("sm_90") if dict(k.params) | LARGEST.get(k.op, {"": None}) == dict(k.params)]
    heads = next(k for k in named if dict(k.params).get("n") == FLASH.n_heads * FLASH.head_dim)
    rows = next(k for k in named if dict(k.params).get("n") == FLASH.head_dim)  # whose registers ptxas once spilled
    few = [heads, rows, *(k for k in named if k.op != "linear")]
    assert len(few) == 4, few
    check_released("sm_90", few)


LARGEST: dict[str, dict[str, Any]] = {
    "linear": {"weight": "bf16", "total": "f32", "rows": 16, "groups": 1},
    "sparse_attention": {"split": 1, "k": FLASH.index_topk},
    "index_scores": {"candidate_block": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_kernels_of_the_released_sizes(level: str) -> None:
    check_released(level, released(level))


def test_spilled_code_is_compiled_again_with_more_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def compile_cuda(source: str, level: str, name: str) -> tuple[bytes, dict[str, Any]]:
        sources.append(source)
        return source.encode(), nvcc.report(REPORT if len(sources) == 1 else WELL)

    monkeypatch.setattr(cuda, "compile_cuda", compile_cuda)
    text = "void __launch_bounds__(256) one_kernel(); void __launch_bounds__(512) two_kernel();"
    launches = {"one_kernel": {"threadIdx.x": 256}, "two_kernel": {"threadIdx.x": 512}}
    lowered = cuda.Lowered(text, b"", b"", launches)
    large = text.replace("(512)", "(512, 1)")
    code, report = cuda.device_code("kernels", lowered, "sm_90")
    assert sources == [large, large.replace("(256)", "(256, 1)")]
    assert code == sources[1].encode()
    assert [f.spill_stores for f in report] == [0, 0]
    monkeypatch.setattr(nvcc, "report", lambda _: dict.fromkeys(launches, report[1]))
    cuda.device_code("kernels", lowered, "sm_90")
    assert sources[2:] == [large]


def test_a_block_that_no_gpu_of_the_kind_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "sm_86", LIMITS["sm_86"]._replace(shared_block=12 << 10))
    with pytest.raises(CompileError, match="asks for 12804 bytes of shared memory.*more than a block of sm_86 has"):
        check_released("sm_86", [kernel("topk_lowest_index", k=512, size=0)])


@pytest.mark.slow
def test_an_artifact(tmp_path: Path) -> None:
    made = ds41_tvm.compile(AttentionConfig.preset("tiny"), tmp_path / "tiny", layers=[0], target="cuda:sm_90")
    assert sorted(p.name for p in made.path.iterdir()) == ["kernels.cuda-sm_90.so", "kernels.ir.json", "manifest.json"]
    assert len(read_module_table(table(made.path / "kernels.cuda-sm_90.so"))) == len(made.manifest.kernels)
    assert all(k.gpu for k in made.manifest.kernels)


def test_equal_inputs_give_equal_bytes(made: SimpleNamespace, tmp_path: Path) -> None:
    for wanted in FEW[:2]:  # compiled again; the others are what this process already has
        del objects._compiled[next(key for key in objects._compiled if key[0] == TARGET and wanted in key)]
    again = compile_few()
    library = tmp_path / "kernels.so"
    objects.link([k.code for k in again], library, [k.device for k in again if k.device is not None])
    assert [k.entry for k in again] == [k.entry for k in made.compiled]
    assert library.read_bytes() == made.library.read_bytes()


def stub(folder: Path, library: str, symbols: list[str]) -> Path:
    """A library that has `symbols`, all of which fail."""
    (folder / "stub.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in symbols))
    (folder / "stub.map").write_text(f"{library} {{ global: *; }};\n")  # the version that these symbols have
    out = folder / library
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-Wl,--version-script=stub.map"]
    subprocess.run(
        [objects.compiler(), "-x", "c", *flags, "stub.c", "-o", str(out)],
        cwd=folder, check=True,
    )  # fmt: skip
    return out


def test_tvms_runtime_loads_it(made: SimpleNamespace, tmp_path: Path) -> None:
    """In a process where libraries without content stand in for driver and CUDA runtime: every kernel is found."""
    runtime = runtime_library()[0].with_name("libtvm_runtime_cuda.so")
    wanted = sorted(name for name in undefined(runtime) if name.startswith("cu"))
    assert "cuModuleLoadData" in wanted
    driver = stub(tmp_path, "libcuda.so.1", [n for n in wanted if n[2].isupper()])
    cudart = stub(tmp_path, "libcudart.so.13", [n for n in wanted if not n[2].isupper()])
    code = LOAD.replace("NAME", repr(FEW[0].name))
    done = subprocess.run(
        [sys.executable, "-c", code, str(made.library), str(driver), str(cudart)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{len(FEW)} {{'cuda'}} expected cuda"


def undefined(library: Path) -> set[str]:
    """Names that a library takes from others."""
    text = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in text.stdout.splitlines()}


def test_reports_are_read_function_by_function() -> None:
    found = nvcc.report(REPORT)
    assert list(found) == ["one_kernel", "two_kernel"]
    one, two = found.values()
    names = ("registers", "stack_bytes", "spill_stores", "spill_loads", "shared_bytes")
    assert [getattr(one, name) for name in names] == [64, 8, 12, 16, 17028]
    assert [getattr(two, name) for name in names] == [10, 0, 0, 0, 0]


def test_a_table_of_modules_is_read_back() -> None:
    codes = [b"\x7fELF" + bytes([i]) * (5 + i) for i in range(3)]
    data = module_table([(b"functions", code) for code in codes])
    assert read_module_table(data) == codes
    assert struct.unpack_from("<Q", data)[0] == len(data) - 8


ARITHMETIC = """
extern "C" __global__ void apart(float* a, float* b) { a[0] = a[1] * a[2] + a[3]; b[0] = sqrtf(a[4]) / a[5]; }
extern "C" __global__ void fused(float* a) { a[0] = fmaf(a[1], a[2], a[3]); }
"""


def test_nothing_is_contracted_that_does_not_say_so(tmp_path: Path) -> None:
    """With the flags that kernels are compiled with; division and root are IEEE's, subnormal numbers are kept."""
    (tmp_path / "kernel.cu").write_text(ARITHMETIC)
    flags = [flag for flag in nvcc.FLAGS if flag not in ("-cubin", "-Xptxas=-v")]
    command = [str(nvcc.find_nvcc()), "-ptx", *flags, "-arch=sm_90", "kernel.cu", "-o", "kernel.ptx"]
    subprocess.run(command, cwd=tmp_path, check=True)
    _, apart, fused = (tmp_path / "kernel.ptx").read_text().split(".entry ")
    assert "fma" not in apart
    assert all(word in apart for word in ("mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"))
    assert "fma.rn.f32" in fused


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


def test_cuda_is_not_built_in_the_process() -> None:
    config = AttentionConfig.preset("tiny")
    with pytest.raises(TargetError, match="make an artefact and load it"):
        ds41_tvm.build(config, {}, layers=[0], target="cuda:sm_90")


def test_the_target_of_proofs_makes_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="for proofs"):
        ds41_tvm.compile(AttentionConfig.preset("tiny"), tmp_path / "out", layers=[0], target="opencl")
