"""``ds41-tvm verify``: replays recorded cases and judges the outcome."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ds41_tvm.cli.options import case_files, parse_layers
from ds41_tvm.cli.output import print_json
from ds41_tvm.cli.progress import progress
from ds41_tvm.errors import UsageError

if TYPE_CHECKING:
    from ds41_tvm.golden.case import Array, GoldenCase
    from ds41_tvm.golden.verify import Verified

SHOWN = 8  # findings of one case that are printed without --verbose

Loaded = tuple[Path, "GoldenCase | dict[str, Array]"]


def verify(
    paths: Annotated[tuple[Path, ...], Parameter(show_default=False)] = (),
    /,
    *,
    target: str = "cpu",
    ties: Literal["lowest-index", "torch-cpu"] | None = None,
    layers: str = "all",
    steps: int | None = None,
    threads: int | None = None,
    reference: Annotated[bool, Parameter(negative="")] = False,
    verbose: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Replay recorded cases through compiled layers and compare. Exit code 1 if anything differs.

    The layers run with the index keys that the official code scores at each step (keys="published"), as that is what
    the cases recorded: a decode step in the middle of a group scores the keys that were published last.

    Parameters
    ----------
    paths
        Case files (.npz), or directories with such files; a checkpoint that a case needs lies beside it.
    target
        What to compile for: cpu, or cpu:LEVEL+FEATURE such as cpu:x86-64-v3.
    ties
        Tie rule to run with; by default the one that the case was recorded with. With the other one, a row that takes
        another one of equal scores counts as decided by ties, not as a mismatch.
    layers
        Layers to replay, such as 0,2,4-5; with their sources.
    steps
        Replay only the first so many steps.
    threads
        Threads to run on; by default all processors.
    reference
        Judge the NumPy reference, without compiling anything.
    verbose
        Print every difference, and how close each kind of array comes.
    json
        Print the findings as JSON.
    """
    if not paths:
        raise UsageError("no path given; expected case files (.npz) or directories with such files")
    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps}: expected at least 1")
    chosen = parse_layers(layers)
    loaded = [_load(file) for file in dict.fromkeys(case_files(paths))]
    _check(loaded, chosen, target, threads)

    width = max(len(file.name.removesuffix(".npz")) for file, _ in loaded)
    results: list[dict[str, Any]] = []
    for number, (file, content) in enumerate(loaded, 1):
        with progress(f"[{number}/{len(loaded)}] {file.name}:") as report:
            if isinstance(content, dict):
                result = _numerics(file, content, None if reference else target)
            else:
                from ds41_tvm.golden.verify import verify_case

                last = None if steps is None else min(steps, len(content.steps))
                result = _entry(
                    verify_case(
                        content, target=target, ties=ties, layers=chosen, steps=last, reference=reference,
                        threads=threads, progress=report,
                    )
                )  # fmt: skip
        loaded[number - 1] = (file, {})  # its arrays and weights are not needed any more
        results.append(result)
        if not json:
            _show(result, width, verbose)
    good = sum(result["ok"] for result in results)
    if json:
        options = {"target": target, "reference": reference, "keys": "published"}
        print_json({"ok": good == len(results), **options, "cases": results})
    else:
        print(f"{good} of {len(results)} good")
    return 0 if good == len(results) else 1


def _load(file: Path) -> Loaded:
    """A case, or the arrays of recorded numerics."""
    from ds41_tvm.golden.case import case_from, read_arrays
    from ds41_tvm.golden.numerics import is_numerics

    arrays = read_arrays(file)
    return file, arrays if is_numerics(arrays) else case_from(file, arrays)


def _check(loaded: list[Loaded], layers: tuple[int, ...] | None, target: str, threads: int | None) -> None:
    """Refuse before anything runs what would be refused later."""
    from ds41_tvm.cli.limits import check_target
    from ds41_tvm.config import closure
    from ds41_tvm.runtime.threads import check_threads

    check_target(target)
    check_threads(threads)
    for _, content in loaded:
        if not isinstance(content, dict):
            closure(content.config, layers)


def _numerics(file: Path, arrays: dict[str, Array], target: str | None) -> dict[str, Any]:
    from ds41_tvm.golden.numerics import compare_numerics
    from ds41_tvm.target import parse_target

    begin = time.perf_counter()
    found = compare_numerics(arrays, None if target is None else parse_target(target))
    return {
        "name": file.name.removesuffix(".npz"),
        "path": str(file),
        "ok": not any(comparison.differ for comparison in found),
        "kind": "numerics",
        "comparisons": [{"name": c.name, "values": c.count, "differ": c.differ} for c in found],
        "findings": [f"{c.name}: {c.differ} of {c.count} differ; {c.first}" for c in found if c.differ],
        "seconds": round(time.perf_counter() - begin, 3),
    }


def _entry(verified: Verified) -> dict[str, Any]:
    """One case as ``--json`` prints it. ``errors``: of each kind of array the one that comes closest to its limit."""
    case, verdict = verified.case, verified.verdict
    errors: dict[str, dict[str, Any]] = {}
    for error in sorted(verdict.errors, key=lambda e: e.error / e.limit):
        errors[error.what] = {
            "layer": error.layer,
            "step": error.step,
            "error": error.error if error.error < float("inf") else "infinite",
            "limit": error.limit,
        }
    worst = verdict.worst
    return {
        "name": case.name,
        "path": str(case.path),
        "ok": not verdict.findings,
        "kind": "case",
        "ties": verified.ties,
        "recorded_ties": case.ties,
        "linear": case.linear,
        "batch": case.batch,
        "layers": list(verified.layers),
        "steps": verified.steps,
        "tokens": sum(case.steps[: verified.steps]),
        "rows": verdict.rows,
        "selections": verdict.selections,
        "mismatches": verdict.mismatches,
        "rounding_ties": verdict.rounding_ties,
        "tie_decided": verdict.tie_decided,
        "worst": None if worst is None else {"what": worst.what, **errors[worst.what]},
        "errors": errors,
        "findings": [str(finding) for finding in verdict.findings],
        "build_seconds": round(verified.build_seconds, 3),
        "seconds": round(verified.build_seconds + verified.run_seconds, 3),
    }


def _show(result: dict[str, Any], width: int, verbose: bool) -> None:
    print(f"{result['name']:{width}}  {'ok' if result['ok'] else 'WRONG':5}  {_line(result)}", flush=True)
    if verbose and result["kind"] == "numerics":
        for c in result["comparisons"]:
            print(f"    {c['name']}: {c['differ']} of {c['values']} differ")
    elif verbose:
        for what, error in result["errors"].items():
            print(f"    {what}: {_error(what, error)}")
    findings = result["findings"]
    for finding in findings if verbose else findings[:SHOWN]:
        print(f"    {finding}")
    if len(findings) > SHOWN and not verbose:
        print(f"    and {len(findings) - SHOWN} more: see them with --verbose")


def _line(result: dict[str, Any]) -> str:
    seconds = f"{result['seconds']:.1f} s"
    if result["kind"] == "numerics":
        values = sum(c["values"] for c in result["comparisons"])
        differ = sum(c["differ"] for c in result["comparisons"])
        return f"{len(result['comparisons'])} arrays, {values} values: {differ} differ, {seconds}"
    ties = result["ties"]
    if ties != result["recorded_ties"]:
        ties += f" (recorded {result['recorded_ties']})"
    chosen = f"selections {result['mismatches']} of {result['selections']} differ"
    if result["rounding_ties"]:
        chosen += f" (and {result['rounding_ties']} by rounding)"
    if result["tie_decided"]:
        chosen += f" (and {result['tie_decided']} decided by ties)"
    worst = "nothing to compare" if result["worst"] is None else _error(result["worst"]["what"], result["worst"])
    return (
        f"{ties}, layers {_ranges(result['layers'])}, {result['steps']} steps, {result['rows']} rows, {chosen}, "
        f"worst {worst}, {seconds}"
    )


def _error(what: str, error: dict[str, Any]) -> str:
    place = f"{what}.{error['layer']}" + ("" if error["step"] is None else f".{error['step']}")
    size = error["error"] if isinstance(error["error"], str) else f"{error['error']:.1e}"
    return f"{place} {size} of {error['limit']:.1e}"


def _ranges(layers: list[int]) -> str:
    """0,1,2,5 as ``0-2,5``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
