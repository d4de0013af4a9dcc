"""Machine code of one kernel as text, from the library in the artefact."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.describe import find_kernel, read_manifest
from ds41_tvm.artifact.elf import SharedLibrary
from ds41_tvm.artifact.files import check_file, largest
from ds41_tvm.errors import UsageError

_PROGRAMS = ("objdump", "llvm-objdump")


def assembly(path: str | os.PathLike[str], kernel: str) -> str:
    """Disassembly of a kernel by ``objdump``. Raises UsageError if that is not installed, or cannot read the code."""
    manifest, _ = read_manifest(path)
    name = find_kernel(manifest, kernel)
    module = schema.module_name(manifest.target)
    library = Path(path) / module
    check_file(library, manifest.files[module], False, largest(module))
    start, size = SharedLibrary(library, machine=None).kernels()[name]
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise UsageError(f"--asm needs {' or '.join(_PROGRAMS)}, which are absent: install binutils; --ir needs none")
    span = [f"--start-address={start}", f"--stop-address={start + size}"]
    done = subprocess.run(
        [program, "-d", "--no-show-raw-insn", *span, str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UsageError(f"{program} cannot disassemble {library}: {done.stderr.strip()}")
    return done.stdout
