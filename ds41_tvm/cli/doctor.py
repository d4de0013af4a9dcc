"""``ds41-tvm doctor``: what is installed, what the machine has, and what to do about what is missing."""

from __future__ import annotations

import os
import platform
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from ds41_tvm.cli import machine
from ds41_tvm.cli.output import byte_size, console, print_json, table
from ds41_tvm.cli.packages import Requirement, requirements

LEAST_PYTHON = (3, 11)


def doctor(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Tell whether this installation and this machine can run the package. Exit code 1 if they cannot.

    Parameters
    ----------
    json
        Print the findings as JSON.
    """
    found = examine()
    if json:
        print_json(found)
    else:
        _show(found)
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """All findings, as ``--json`` prints them; ``problems`` say what is wrong and what to do, in words."""
    declared = requirements()
    extras: dict[str, list[Requirement]] = {}
    for need in declared:
        if need.extra is not None:
            extras.setdefault(need.extra, []).append(need)
    required = [_package(need) for need in declared if need.extra is None]
    problems = [_problem(package) for package in required if not package["ok"]]
    if sys.version_info < LEAST_PYTHON:
        problems.append(f"Python {platform.python_version()}: expected {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or newer")
    tvm = machine.tvm_works()
    if not tvm["works"]:
        problems.append(f"TVM does not load: {tvm['error']}; install it anew: pip install --force-reinstall ds41-tvm")
    return {
        "ok": not problems,
        "problems": problems,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "required": required,
        "tvm": tvm,
        "extras": {
            extra: {
                "ok": all(need.fits for need in needs),
                "packages": [_package(need) for need in needs],
                "install": f"pip install 'ds41-tvm[{extra}]'",
            }
            for extra, needs in extras.items()
        },
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "cxx": machine.program([os.environ.get("CXX", ""), "g++", "clang++", "c++"]),
        "nvcc": machine.program(["nvcc", "/usr/local/cuda/bin/nvcc"]),
    }


def _package(need: Requirement) -> dict[str, Any]:
    return {"name": need.name, "version": need.version, "wanted": need.wanted, "ok": need.fits}


def _problem(package: dict[str, Any]) -> str:
    state = "is missing" if package["version"] is None else f"{package['version']} does not fit"
    wanted = f"{package['name']}{package['wanted']}"
    return f"{package['name']} {state}; expected {wanted}: pip install '{wanted}'"


def _show(found: dict[str, Any]) -> None:
    out = console()
    rows: list[tuple[object, ...]] = [("python", found["python"]["version"], ">=3.11", "ok")]
    rows += [(p["name"], p["version"] or "-", p["wanted"], "ok" if p["ok"] else "WRONG") for p in found["required"]]
    out.print(table(("required", "version", "wanted", "state"), rows))

    rows = []
    for extra, its in found["extras"].items():
        for number, package in enumerate(its["packages"]):
            state = "ok" if package["ok"] else "missing" if package["version"] is None else "does not fit"
            hint = its["install"] if number == 0 and not its["ok"] else ""
            rows.append((extra if number == 0 else "", package["name"], package["version"] or "-", state, hint))
    out.print(table(("extra", "package", "version", "state", "to install"), rows))

    cpu, memory, tvm = found["cpu"], found["memory"], found["tvm"]
    sizes = [byte_size(memory[key]) if memory[key] else None for key in ("total", "available", "limit")]
    rows = [
        ("processor", f"{cpu['model']} ({cpu['machine']}, {cpu['level']})"),
        ("features", " ".join(cpu["features"]) or "unknown"),
        ("threads", f"{cpu['threads']} of {cpu['processors']}"),
        ("memory", f"{sizes[0]}, {sizes[1]} available" + (f", limited to {sizes[2]}" if sizes[2] else "")),
        ("TVM", f"loads, LLVM {tvm['llvm']}" if tvm["works"] else f"DOES NOT LOAD: {tvm['error']}"),
        (
            "C++ compiler",
            _found(found["cxx"], "none; needed to save compiled artefacts: install g++ or clang++"),
        ),
        ("nvcc", _found(found["nvcc"], "none; needed for CUDA targets")),
    ]
    out.print(table(("machine", ""), rows))
    out.print("\n".join(found["problems"]) if found["problems"] else "Everything that is required is there.")


def _found(program: dict[str, str] | None, absent: str) -> str:
    return absent if program is None else f"{program['path']}: {program['version']}"
