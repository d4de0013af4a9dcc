"""``ds41-tvm bundle``: packs an artefact with what runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ds41_tvm.cli.output import byte_size, print_json


def bundle(
    path: Path,
    /,
    *,
    out: Path,
    wheels: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Pack an artefact, this package's runtime and TVM's into one tar file.

    It runs on a machine with the same version of Python, NumPy and apache-tvm-ffi; no compiler, no apache-tvm.

    Parameters
    ----------
    path
        Folder of the artefact.
    out
        Tar file to write.
    wheels
        Add the wheels of NumPy and apache-tvm-ffi, for machines without a network; pip downloads them now.
    json
        Print the result as JSON.
    """
    from ds41_tvm.artifact.bundle import bundle as pack

    size = pack(path, out, wheels)
    if json:
        print_json({"path": str(out), "bytes": size, "wheels": wheels})
    else:
        print(f"{out}: {byte_size(size)}; unpack it and run: python {out.name.removesuffix('.tar')}/run.py")
    return 0
