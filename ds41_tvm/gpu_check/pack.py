"""Compile what the check runs and pack it into one tar file. Imports the compiler; not part of the bundle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds41_tvm import __version__
from ds41_tvm.artifact.bundle import FOLDERS, Entry, runner_entries, script, wheel_entries, write_tar
from ds41_tvm.compiler.artifact import Compiled
from ds41_tvm.compiler.artifact import compile as compile_artifact
from ds41_tvm.config import AttentionConfig, LinearMode
from ds41_tvm.errors import BundleError, UsageError
from ds41_tvm.golden import GoldenCase, load_case
from ds41_tvm.target import parse_target

LIMIT = 64 << 20
# One layer of every kind and compression ratio of the released model, with their sources.
RELEASED_LAYERS = (0, 2, 3, 20, 24, 25)
_CHECK = """from pathlib import Path

from ds41_tvm.gpu_check.main import main

sys.exit(main(Path(HERE)))"""
_LEFT_OUT = {"golden/verify.py", "gpu_check/pack.py"}
Progress = Callable[[str], None]


def pack(
    out: Path,
    target: str,
    golden: Path,
    config: AttentionConfig | None = None,
    layers: tuple[int, ...] = RELEASED_LAYERS,
    prompt: int = 1024,
    cases: tuple[str, ...] = ("tiny_", "mid_", "checkpoint_"),
    linears: tuple[LinearMode, ...] = ("bf16", "fp8"),
    copy_bytes: int = 1 << 30,
    least: float = 0.02,
    wheels: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the check for `target` to `out`; returns its size. What it runs is compiled here; weights are not in it.

    `golden`: folder of recorded cases, of which those whose names begin with one of `cases` go in. `config` (None: the
    released sizes), `layers`, `prompt`, `linears`: what is measured, and in which modes; `least`: seconds of one
    measurement. Raises CompileError, TargetError, UsageError (no case), BundleError (above 64 MiB).
    """
    tell, aim = progress or (lambda _: None), parse_target(target)
    recorded = [p for p in sorted(golden.glob("*.npz")) if p.name.startswith(cases)]
    if not recorded:
        raise UsageError(f"{golden}: no recorded case begins with {', '.join(cases)}; expected the folder tests/golden")
    measured = config or AttentionConfig.preset("flash")
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as temporary:
        folder, artifacts, by_case = Path(temporary), dict[str, Compiled](), dict[str, str]()
        for case in map(load_case, recorded):
            name = f"{case.config.digest()[7:13]}-{case.linear}-{case.ties}"
            by_case[f"{case.name}.npz"] = name
            if name not in artifacts:
                tell(name)
                artifacts[name] = _compile_case(case, folder / name, target)
        for linear in linears:
            tell(f"{linear} for times")
            artifacts[f"speed-{linear}"] = compile_artifact(
                measured, folder / f"speed-{linear}", layers=layers, target=target, linear=linear
            )
        speed = [f"speed-{linear}" for linear in linears]

        def length(name: str) -> int:
            return min(96, measured.max_seq_len) if name in speed else 40

        plan = {
            "version": __version__,
            "target": aim.name,
            "golden": by_case,
            # torch's picks among equal scores follow the length of a row, and with it how a prompt is cut.
            "invariance": [
                [name, length(name)] for name, made in artifacts.items() if made.manifest.options.ties == "lowest-index"
            ],
            "speed": speed,
            "prompt": prompt,
            "copy_bytes": copy_bytes,
            "least": least,
        }
        entries = _entries(plan, artifacts, recorded, aim.kind == "cuda", wheels)
        size = write_tar(out, out.name.removesuffix(".tar"), entries)
    if size > LIMIT:
        out.unlink()
        raise BundleError(f"{out}: {size} bytes; expected at most {LIMIT}: leave out wheels or cases")
    return size


def _compile_case(case: GoldenCase, out: Path, target: str) -> Compiled:
    """The kernels of a recorded case, with cache blocks so small that it crosses them."""
    from ds41_tvm.api import pooling_format

    return compile_artifact(
        case.config, out, target=target, linear=case.linear, ties=case.ties,
        pooling=pooling_format(case.config, case.weights), block_rows=4, draft=6,
    )  # fmt: skip


def _entries(
    plan: dict[str, Any], artifacts: dict[str, Compiled], recorded: list[Path], cuda: bool, wheels: bool
) -> Iterator[Entry]:
    tvm_ffi = next(iter(artifacts.values())).manifest.versions.tvm_ffi
    yield "gpu_check.py", script(tvm_ffi, _CHECK)
    yield "plan.json", (json.dumps(plan, indent=1) + "\n").encode()
    for name, made in artifacts.items():
        for file in ["manifest.json", *made.manifest.files]:
            yield f"artifacts/{name}/{file}", made.path / file
    for path in recorded:
        yield f"golden/{path.name}", path
    for folder in sorted({path.parent / path.name.split(".")[0] for path in recorded}):
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            yield f"golden/{folder.name}/{path.name}", path
    for entry in runner_entries(cuda, (*FOLDERS, "golden", "gpu_check")):
        if entry[0].removeprefix("ds41_tvm/") not in _LEFT_OUT:
            yield entry
    package = Path(__file__).resolve().parents[1]
    for name in ("__init__", "work", "kernel_work"):
        yield f"ds41_tvm/bench/{name}.py", package / "bench" / f"{name}.py"
    if wheels:
        yield from wheel_entries(tvm_ffi)
