"""A processor that is newer than PoCL's compiler.

The LLVM inside PoCL names a processor that it does not know ``generic``, and its clang then refuses that very name for
x86 ("unknown target CPU 'generic'"); no option of PoCL 3 sets another. So the name is written over in the device's
record, before a program is built, by one of the level that this processor has.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from ds41_tvm.target import Target, parse_target

UNKNOWN = b"generic\0"
RECORD = 4096  # bytes of the device's record in which the pointer to its name is looked for


def name_processor(device: Any, target: Target | None = None) -> None:
    """Give a PoCL device whose processor is ``generic`` the name of one that has what `target` (this machine) has.

    Nothing happens to other devices, and on other machines than x86-64.
    """
    target = target or parse_target("cpu")
    unknown = "PoCL" in device.version and device.version.endswith("-x86_64-unknown-linux-gnu-generic")
    if not unknown or not os.path.exists("/proc/self/mem"):
        return
    # No longer than what they replace.
    name = b"skx\0" if target.has("avx512vl") else b"haswell\0" if target.has("fma") else b"x86-64\0"
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # a wrong address is an error here, not a crash
        record = _read(memory, device.int_ptr, RECORD)
        for at in range(0, len(record) - 7, 8):
            pointer = int.from_bytes(record[at : at + 8], "little")
            if _read(memory, pointer, len(UNKNOWN)) == UNKNOWN:
                ctypes.memmove(pointer, name, len(name))


def _read(memory: Any, address: int, count: int) -> bytes:
    try:
        return os.pread(memory.fileno(), count, address)
    except (OSError, OverflowError):
        return b""
