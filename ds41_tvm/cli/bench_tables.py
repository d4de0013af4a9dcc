"""What ``ds41-tvm bench`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds41_tvm.cli.output import byte_size, table

if TYPE_CHECKING:
    from ds41_tvm.bench.cases import Case
    from ds41_tvm.bench.profile import Part
    from ds41_tvm.bench.result import Change, Result, Row

_UNITS = {
    "read": ("GB/s", "reading memory"),
    "fma": ("GFLOP/s", "f32 multiply-add"),
    "vnni": ("GOP/s", "int8 dot"),
    "bf16": ("GFLOP/s", "bf16 dot"),
    "amx": ("GFLOP/s", "bf16 tiles"),
}
DISTURBED = 0.1  # share of the processors' time that others may take


def row_tables(result: Result) -> Iterator[Any]:
    """One table for each kind of work."""
    peers = [name for name in result.libraries if name != "tvm"]
    for what in dict.fromkeys(row.what for row in result.rows):
        rows = [row for row in result.rows if row.what == what]
        state = any(row.state_bytes is not None for row in rows)
        columns = ["", "layer", "", "ms", "quartiles", "GFLOP/s", "GB/s", "of limit"]
        columns += [f"{name} ms, times" for name in peers] + (["state"] if state else []) + ["others"]
        yield table(columns, [_cells(row, peers, state) for row in rows])


def _cells(row: Row, peers: Sequence[str], state: bool) -> list[Any]:
    s = row.seconds
    name, _, rest = row.name.partition(", ")
    role = "" if row.role is None else f"{row.layer} {row.role} {row.ratio}" if row.ratio else f"{row.layer} {row.role}"
    cells: list[Any] = [
        name,
        role,
        rest.rpartition(", ")[2],
        _ms(s.median),
        f"{_ms(s.q1)}..{_ms(s.q3)}",
        None if row.gflops is None else f"{row.gflops:.0f}",
        None if row.gbytes is None else f"{row.gbytes:.1f}",
        None if row.share is None else f"{row.share:.0%} {row.limit}",
    ]
    for peer in peers:
        measured = row.peers.get(peer)
        cells.append(f"{_ms(measured.seconds.median)}, {measured.ratio:.3g}" if measured else row.skipped.get(peer))
    if state:
        cells.append(None if row.state_bytes is None else byte_size(row.state_bytes))
    return [*cells, f"{row.others:.0%}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def limit_lines(result: Result) -> Iterator[str]:
    """The machine's limits, what ran, memory, and what was left out."""
    limits = [
        f"{_UNITS[kind][1]} {s.median / 1e9:.4g} {_UNITS[kind][0]} (best {s.high / 1e9:.4g})"
        for kind, s in result.limits.items()
    ]
    yield f"limits: {', '.join(limits)}; medians over all turns, {result.threads} threads, target {result.target}"
    versions = ", ".join(f"{name}: {version}" for name, version in result.libraries.items())
    yield f"{versions}; peers' instructions: {result.isa}; linear {', '.join(result.linear)}"
    yield "memory at most: " + ", ".join(f"{name} {byte_size(size)}" for name, size in result.memory.items())
    if "amx" in result.machine.features and "amx" not in result.target and result.isa == "host":
        yield "peers may use AMX and this target does not: --isa avx512 makes the comparison even"
    disturbed = sum(row.others > DISTURBED for row in result.rows)
    if disturbed:
        yield (
            f"{disturbed} of {len(result.rows)} rows were disturbed: other processes, or the host, took more than "
            f"{DISTURBED:.0%} of the processors' time; measure again when the machine is idle"
        )
    for name, why in result.skipped.items():
        yield f"not measured: {name}: {why}"


def change_table(changes: Sequence[Change], worse: Sequence[Change], factor: float) -> Any:
    """The ratios that changed most, worst first."""
    ordered = sorted(changes, key=lambda change: change.factor)
    shown = ordered[: max(len(worse), 12)]
    title = f"{len(changes)} ratios compared, {len(worse)} worse by more than {factor:g}; the lowest:"
    lines = [(c.row, c.what, float(c.before), float(c.now), f"{c.factor:.2f}") for c in shown]
    return table(["row", "ratio", "before", "now", "factor"], lines, title=title)


def profile_tables(found: Mapping[tuple[Case, str], Sequence[Part]]) -> Iterator[Any]:
    """One table for each case and linear mode: the kernels of every layer, those that take longest first."""
    for (case, mode), parts in found.items():
        lines = [
            (p.layer, p.kernel if p.calls else "(outside kernels)", p.calls, float(p.seconds * 1e6), f"{p.share:.1%}")
            for p in parts
            if p.share >= 0.002
        ]
        yield table(["layer", "kernel", "calls", "us", "of layer"], lines, title=f"{case.name}, {mode}")
