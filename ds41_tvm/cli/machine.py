"""What the machine has: processor, memory, compilers; read from the system, never guessed from names."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ds41_tvm.cpu_features import available_threads, host_features, host_level

# Run in a process of its own: versions of TVM that do not belong together crash.
_ASK_TVM = """
import tvm
from tvm.target import codegen
print(tvm.get_global_func("target.build.llvm", allow_missing=True) is not None, codegen.llvm_version_major())
"""


def cpu() -> dict[str, Any]:
    """Model, level and features as the processor states them; processors, and those this process may use."""
    return {
        "model": _cpu_model(),
        "machine": platform.machine(),
        "level": host_level() if host_features() else "generic",
        "features": list(host_features()),
        "processors": os.cpu_count() or 1,
        "threads": available_threads(),
    }


def _cpu_model() -> str:
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def memory() -> dict[str, int | None]:
    """Bytes in all and available now; ``limit`` is that of the control group, if any."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return {
        "total": int(found["MemTotal"]) * 1024 if "MemTotal" in found else None,
        "available": int(found["MemAvailable"]) * 1024 if "MemAvailable" in found else None,
        "limit": int(limit) if limit.isdigit() else None,
    }


def program(names: list[str]) -> dict[str, str] | None:
    """Path and version line of the first of ``names`` that is there, None if none is."""
    for name in filter(None, names):
        path = shutil.which(name)
        if path is not None:
            lines = _output([path, "--version"]).splitlines()
            telling = [line for line in lines if re.search(r"\d+\.\d+", line)]
            return {"path": path, "version": telling[0].strip() if telling else "unknown"}
    return None


def tvm_works() -> dict[str, Any]:
    """Whether TVM loads and has LLVM: ``{"works", "llvm", "error"}``."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TVM], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"works": False, "llvm": None, "error": str(error)}
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 2:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"works": False, "llvm": None, "error": lines[-1]}
    if words[0] != "True":
        return {"works": False, "llvm": None, "error": "this build of TVM has no LLVM"}
    return {"works": True, "llvm": int(words[1]), "error": None}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
