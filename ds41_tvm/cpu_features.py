"""What the processor says it can do, in LLVM's names, and leave to use tile registers."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

# Linux name -> LLVM name, for the features that generated code may use.
_X86 = {
    "sse3": "sse3", "pni": "sse3", "ssse3": "ssse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "popcnt": "popcnt",
    "cx16": "cx16", "lahf_lm": "sahf", "avx": "avx", "avx2": "avx2", "bmi1": "bmi", "bmi2": "bmi2", "f16c": "f16c",
    "fma": "fma",
    "abm": "lzcnt", "movbe": "movbe", "xsave": "xsave", "avx512f": "avx512f", "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512vbmi": "avx512vbmi", "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", "avx512_bf16": "avx512bf16", "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq", "avx512ifma": "avx512ifma", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}  # fmt: skip
_V2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# The x86-64 psABI's levels.
LEVELS = {"x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}


@functools.cache
def host_features() -> tuple[str, ...]:
    """LLVM names of this processor's features, sorted; AMX only if the kernel grants this process the tile registers.

    Asked from the processor (Linux lists what CPUID and the kernel allow), never guessed from its name: virtual
    machines hide features that the name implies. Empty where that list cannot be read.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    line = next((x for x in text.splitlines() if x.startswith("flags")), "")
    found = {_X86[flag] for flag in line.partition(":")[2].split() if flag in _X86}
    if not request_tiles():
        found -= {"amx-tile", "amx-bf16", "amx-int8"}
    return tuple(sorted(found))


def host_level() -> str:
    """The highest x86-64 level that this processor meets."""
    features = set(host_features())
    return [level for level, needs in LEVELS.items() if features.issuperset(needs)][-1]


@functools.cache
def request_tiles() -> bool:
    """Ask the kernel for AMX tile data for this process and its future threads; False where there is none.

    Linux keeps the 8 KiB of tile state switched off until a process asks (``arch_prctl(ARCH_REQ_XCOMP_PERM)``).
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        sys_arch_prctl, request_permission, tile_data = 158, 0x1023, 18
        return int(ctypes.CDLL(None).syscall(sys_arch_prctl, request_permission, tile_data)) == 0
    except (OSError, AttributeError):
        return False


def available_threads() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
