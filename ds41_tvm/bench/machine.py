"""The machine that a result was measured on, as the system describes it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import msgspec

from ds41_tvm.cpu_features import available_threads, host_features, host_level

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Processor, memory and kernel. `caches`: bytes by level (``L1d``); `processors`: those this process may use."""

    cpu: str
    level: str
    features: tuple[str, ...]
    processors: int
    caches: dict[str, int]
    memory: int
    kernel: str
    huge_pages: str


def describe() -> Machine:
    """This machine. What the system does not say is 0 or empty."""
    return Machine(
        cpu=_first(r"^(?:model name|Model)\s*:\s*(.+)$", "/proc/cpuinfo") or platform.machine(),
        level=host_level() if host_features() else "generic",
        features=host_features(),
        processors=available_threads(),
        caches=caches(),
        memory=int(_first(r"^MemTotal:\s+(\d+) kB$", "/proc/meminfo") or 0) * 1024,
        kernel=f"{platform.system()} {platform.release()}",
        huge_pages=_first(r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"),
    )


def caches() -> dict[str, int]:
    """Bytes of the caches that the first processor uses, by level and kind: ``L1d``, ``L1i``, ``L2``, ``L3``."""
    out = {}
    for folder in sorted(_CACHES.glob("index*")):
        level, kind, size = (_read(folder / name).strip() for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if match:
            out["L" + level + {"Data": "d", "Instruction": "i"}.get(kind, "")] = int(match[1]) * _UNITS[match[2]]
    return out


def last_cache() -> int:
    """Bytes of the largest cache; 32 MiB where the system does not say."""
    return max(caches().values(), default=32 << 20)


def resident(process: int | None = None) -> dict[str, int]:
    """Resident bytes of a process (this one by default): ``now`` and ``peak``; empty where the system does not say."""
    text = _read(Path(f"/proc/{process or os.getpid()}/status"))
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", text, re.MULTILINE))
    names = {"now": "VmRSS", "peak": "VmHWM"}
    return {name: int(found[key]) * 1024 for name, key in names.items() if key in found}


def _first(pattern: str, path: str) -> str:
    found = re.search(pattern, _read(Path(path)), re.MULTILINE)
    return found[1].strip() if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
