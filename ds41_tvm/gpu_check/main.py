"""The check: parts one after the other, each in a process of its own with a time limit, and a report after each.

python gpu_check.py [--out REPORT.md] [--parts machine,golden,...] [--emulate] [--seconds 280]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds41_tvm.gpu_check.report import write_report

# Where a part stops being useful; all together are held by --seconds.
LIMITS = {"machine": 60, "golden": 120, "invariance": 90, "speed": 150, "torch": 60}


def main(folder: Path, arguments: list[str] | None = None) -> int:
    """The command line. Exit code 0: everything ran and is right."""
    parser = argparse.ArgumentParser(description="Check compiled kernels on this machine's GPU and measure them.")
    parser.add_argument("--out", default="gpu_check.md", help="the report")
    parser.add_argument("--parts", default=",".join(LIMITS), help="which parts to run")
    parser.add_argument("--emulate", action="store_true", help="kernels of the processor: rehearse as on a GPU")
    parser.add_argument("--seconds", type=float, default=280, help="time for everything")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        return _run_part(folder, given.part, given.emulate, Path(given.out))
    begin = time.monotonic()
    found: dict[str, Any] = {"parts": {}, "plan": _plan(folder)}
    for part in given.parts.split(","):
        if part not in LIMITS:
            parser.error(f"part {part!r}: expected one of {', '.join(LIMITS)}")
        left = given.seconds - (time.monotonic() - begin)
        found["parts"][part] = _in_process(folder, part, given.emulate, min(LIMITS[part], left), found)
        found["seconds"] = time.monotonic() - begin
        write_report(Path(given.out), found)
        print(f"{part}: {found['parts'][part]['state']}, {found['seconds']:.0f} s", flush=True)
    print(f"report: {given.out}")
    return 0 if all(p["state"] == "good" for p in found["parts"].values()) else 1


def _plan(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return plan


def _in_process(folder: Path, part: str, emulate: bool, limit: float, found: dict[str, Any]) -> dict[str, Any]:
    """Run a part; what it wrote even if it died or ran out of time."""
    if limit < 5:
        return {"state": "not run: no time left", "rows": [], "seconds": 0}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        out, begin = Path(temporary) / "rows.json", time.monotonic()
        (Path(temporary) / "earlier.json").write_text(json.dumps(found["parts"]))
        command = [sys.executable, str(folder / "gpu_check.py"), "--part", part, "--out", str(out)]
        command += ["--emulate"] if emulate else []
        try:
            done = subprocess.run(
                [*command, *(["--emulate"] if emulate else [])],
                timeout=limit,
                capture_output=True,
                text=True,
                check=False,
            )
            said, state = done.stderr[-3000:], "" if done.returncode == 0 else f"failed: exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            said, state = str(error.stderr or "")[-3000:], f"stopped after {limit:.0f} s"
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    wrong = sum(row.get("ok") is False for row in rows)
    return {
        "state": state or (f"wrong: {wrong} of {len(rows)}" if wrong else "good" if rows else "failed: nothing found"),
        "rows": rows, "seconds": time.monotonic() - begin, "said": said if state else "",
    }  # fmt: skip


def _run_part(folder: Path, part: str, emulate: bool, out: Path) -> int:
    """In the part's own process: one line of JSON per row, as soon as it is there."""
    plan = _plan(folder)
    earlier = json.loads((out.parent / "earlier.json").read_text())
    try:
        with open(out, "w") as file:
            for row in _PARTS[part](folder, plan, earlier, emulate):
                file.write(json.dumps(row) + "\n")
                file.flush()
    except Exception:  # noqa: BLE001 - whatever it is belongs into the report
        traceback.print_exc()
        return 1
    return 0


def _machine(folder: Path, plan: dict[str, Any], earlier: dict[str, Any], emulate: bool) -> Any:
    import numpy as np

    from ds41_tvm.gpu_check.devices import open_part
    from ds41_tvm.gpu_check.speed import copy_rate, matrix_rate
    from ds41_tvm.runtime.ffi import abi

    artifact = plan["speed"][0]
    opened, device = open_part(folder, artifact, emulate)
    torch = _torch_version()
    row: dict[str, Any] = {
        "device": device.name, "target": opened.program.target.name, "tasks": device.parallel,
        "memory": getattr(device, "memory", None), "python": platform.python_version(), "numpy": np.__version__,
        **abi(), "torch": torch, "system": platform.platform(), "processors": os.cpu_count(),
        "copy": copy_rate(device, plan["copy_bytes"]),
        "matrix_own": matrix_rate(folder, artifact, plan["prompt"], emulate),
    }  # fmt: skip
    if torch:
        from ds41_tvm.gpu_check.torch_peer import rates

        found = rates(_torch_device())
        row |= {"matrix_torch": found["matrix"], "copy_torch": found["copy"]}
    yield row


def _golden(folder: Path, plan: dict[str, Any], earlier: dict[str, Any], emulate: bool) -> Any:
    from ds41_tvm.gpu_check.correct import golden

    return golden(folder, plan["golden"], emulate)


def _invariance(folder: Path, plan: dict[str, Any], earlier: dict[str, Any], emulate: bool) -> Any:
    from ds41_tvm.gpu_check.correct import invariance

    for artifact, tokens in plan["invariance"]:
        yield from invariance(folder, artifact, tokens, emulate)


def _speed(folder: Path, plan: dict[str, Any], earlier: dict[str, Any], emulate: bool) -> Any:
    from ds41_tvm.gpu_check.speed import layers

    rows = earlier.get("machine", {}).get("rows", [])
    measured = rows[0] if rows else {}
    rates = {
        "copy": max(measured.get("copy", 0.0), measured.get("copy_torch", 0.0)) or 1e12,
        "matrix": max(measured.get("matrix_own", 0.0), measured.get("matrix_torch", 0.0)),
    }
    for artifact in plan["speed"]:
        yield from layers(folder, artifact, plan["prompt"], rates, plan["least"], emulate)


def _torch(folder: Path, plan: dict[str, Any], earlier: dict[str, Any], emulate: bool) -> Any:
    if not _torch_version():
        yield {"torch": None}
        return
    from ds41_tvm.artifact.describe import read_manifest
    from ds41_tvm.gpu_check.torch_peer import layer

    config = read_manifest(folder / "artifacts" / plan["speed"][0])[0].config
    rows = config.window_size + config.index_topk
    for phase, tokens in (("decode", 1), ("prefill", plan["prompt"])):
        yield {"phase": phase, "tokens": tokens, "rows": rows, **layer(config, tokens, rows, _torch_device())}


def _torch_version() -> str | None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__)


def _torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


_PARTS: dict[str, Callable[..., Any]] = {
    "machine": _machine, "golden": _golden, "invariance": _invariance, "speed": _speed, "torch": _torch,
}  # fmt: skip
