"""NVIDIA's compiler: CUDA source in, machine code and what ptxas says about it out."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from ds41_tvm.artifact.manifest import GpuCode
from ds41_tvm.errors import CompileError, NoCudaCompiler

# No contraction and nothing of fast math: see `schedule.cuda.common` on rounding points.
FLAGS = ("-cubin", "-O3", "-std=c++17", "-fmad=false", "-Xptxas=-v", "-w")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def find_nvcc() -> Path:
    """``nvcc`` on the PATH, of ``/usr/local/cuda``, or of the pip packages ``nvidia-cuda-nvcc`` and its companions.

    Raises NoCudaCompiler if there is none.
    """
    if path := shutil.which("nvcc"):
        return Path(path)
    folders = [Path("/usr/local/cuda")]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations if spec else None) or ():
        folders += [*sorted(Path(place).glob("cu[0-9]*"), reverse=True), Path(place) / "cuda_nvcc"]
    for folder in folders:
        if (folder / "bin" / "nvcc").is_file():
            return folder / "bin" / "nvcc"
    raise NoCudaCompiler(
        "nvcc was not found; compiling for CUDA needs it: install the CUDA toolkit 13.0, or the extra 'cuda' of this "
        "package, NVIDIA's own wheels: pip install 'ds41-tvm[cuda]'"
    )


def compile_cuda(source: str, level: str, name: str) -> tuple[bytes, dict[str, GpuCode]]:
    """Machine code (cubin) of CUDA source for an architecture, and ptxas's report by entry function.

    Raises NoCudaCompiler, and CompileError with what nvcc says against `name`.
    """
    nvcc = find_nvcc()
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder:
        # The same file name every time: it is part of the machine code's symbol table.
        (Path(folder) / "kernel.cu").write_text(source, encoding="utf-8")
        done = subprocess.run(
            [str(nvcc), *FLAGS, f"-arch={level}", "kernel.cu", "-o", "kernel.cubin"],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise CompileError(f"nvcc could not compile {name} for {level}: {(done.stderr + done.stdout)[-2000:]}")
        return (Path(folder) / "kernel.cubin").read_bytes(), report(done.stderr)


def report(text: str) -> dict[str, GpuCode]:
    """What ``ptxas -v`` wrote, by entry function."""
    found: dict[str, GpuCode] = {}
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        entry = _ENTRY.search(part)
        if entry is None:
            continue
        stack, used, shared = _STACK.search(part), _USED.search(part), _SHARED.search(part)
        found[entry.group(1)] = GpuCode(
            name=entry.group(1),
            registers=int(used.group(1)) if used else 0,
            stack_bytes=int(stack.group(1)) if stack else 0,
            spill_stores=int(stack.group(2)) if stack else 0,
            spill_loads=int(stack.group(3)) if stack else 0,
            shared_bytes=int(shared.group(1)) if shared else 0,
            dynamic_shared_bytes=0,
            threads=0,
        )
    return found
