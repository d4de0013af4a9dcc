"""The report as Markdown: tables for people, then everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write_report(path: Path, found: dict[str, Any]) -> None:
    """Write all that is known so far; a check that is interrupted leaves the last one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text(found), encoding="utf-8")
    temporary.replace(path)


def text(found: dict[str, Any]) -> str:
    """The whole report."""
    parts, plan = found["parts"], found["plan"]
    out = [f"# Check of ds41-tvm {plan['version']} for {plan['target']}\n"]
    out.append(
        _table(("part", "outcome", "seconds"), [(n, p["state"], f"{p['seconds']:.1f}") for n, p in parts.items()])
    )
    for name, part in parts.items():
        out.append(f"## {name}\n")
        if part["rows"]:
            out.append(_SHOW[name](part["rows"]))
        if part.get("said"):
            out.append(f"```\n{part['said'].strip()}\n```\n")
    out.append(f"## Everything as JSON\n\n```json\n{json.dumps(found)}\n```\n")
    return "\n".join(out)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def _machine(rows: list[dict[str, Any]]) -> str:
    shown = [(key, _rate(key, value)) for key, value in rows[0].items()]
    return _table(("what", "value"), shown)


def _rate(key: str, value: Any) -> Any:
    if key.startswith("copy"):
        return f"{value / 1e9:.0f} GB/s, read and written"
    if key.startswith("matrix"):
        return f"{value / 1e12:.2f} TFLOP/s"
    return value


def _golden(rows: list[dict[str, Any]]) -> str:
    return _table(
        ("case", "ties", "linear", "right", "selections", "other", "by rounding", "worst error (limit)", "s"),
        [
            (
                r["case"], r["ties"], r["linear"], _word(r["ok"]), r["selections"], r["other_selections"],
                r["rounding_ties"], "" if r["worst"] is None else "{} {:.1e} ({:.1e})".format(*r["worst"]),
                f"{r['seconds']:.1f}",
            )
            for r in rows
        ],
    ) + "".join(f"* {r['case']}: {finding}\n" for r in rows for finding in r["findings"])  # fmt: skip


def _invariance(rows: list[dict[str, Any]]) -> str:
    return _table(
        ("artefact", "against one prompt at once", "tokens", "right", "arrays compared", "different"),
        [
            (r["artifact"], r["how"], r["tokens"], _word(r["ok"]), r["compared"], " ".join(r["different"]))
            for r in rows
        ],
    )  # fmt: skip


def _speed(rows: list[dict[str, Any]]) -> str:
    layers = _table(
        ("linear", "phase", "layer", "tokens", "µs", "GB/s", "TFLOP/s", "times the floor", "attention TFLOP/s"),
        [
            (
                r["linear"], r["phase"], f"{r['layer']} ({r['kind']}, ratio {r['ratio']})", r["tokens"],
                f"{r['seconds'] * 1e6:.1f}", f"{r['GB/s']:.1f}", f"{r['TFLOP/s']:.3f}", _number(r["times_floor"], 2),
                _number(r["attention TFLOP/s"], 3),
            )
            for r in rows
        ],
    )  # fmt: skip
    kernels = [
        (
            r["linear"], r["phase"], r["layer"], k["kernel"], f"{k['seconds'] * 1e6:.1f}",
            _number(_per_second(k["bytes"], k["seconds"], 1e9), 1),
            _number(_per_second(k["flops"], k["seconds"], 1e12), 3),
        )
        for r in rows for k in sorted(r["kernels"], key=lambda k: -k["seconds"])[:8]
    ]  # fmt: skip
    head = ("linear", "phase", "layer", "kernel", "µs", "GB/s", "TFLOP/s")
    note = (
        "The floor is max(bytes / copy rate, FLOP / matrix rate) with the best rates of this run. Kernels run alone, "
        "the eight longest of each layer; GB/s counts all rows that they read and write:\n"
    )
    return "\n".join((layers, note, _table(head, kernels)))


def _torch(rows: list[dict[str, Any]]) -> str:
    if rows[0].get("torch", "") is None:
        return "torch is not installed here.\n"
    return _table(
        ("phase", "tokens", "rows a token", "linear layers µs", "attention µs"),
        [
            (r["phase"], r["tokens"], r["rows"], f"{r['linears'] * 1e6:.1f}", f"{r['attention'] * 1e6:.1f}")
            for r in rows
        ],
    )  # fmt: skip


def _word(ok: bool) -> str:
    return "yes" if ok else "**no**"


def _per_second(amount: float | None, seconds: float, unit: float) -> float | None:
    return None if amount is None else amount / seconds / unit


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_SHOW = {"machine": _machine, "golden": _golden, "invariance": _invariance, "speed": _speed, "torch": _torch}
