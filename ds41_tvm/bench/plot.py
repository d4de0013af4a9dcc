"""Two pictures of a result: the roofline, and every row's time beside the machine's floor and the peers'."""

from __future__ import annotations

from pathlib import Path

from ds41_tvm.bench.result import Result, Row
from ds41_tvm.errors import UsageError

_ROOFS = {"fma": "f32 multiply-add", "bf16": "bf16 dot", "amx": "bf16 tiles", "vnni": "int8 dot"}
_MARKS = "os^vD<>*PX"


def check_plot() -> None:
    """Raises UsageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs the extra plot: pip install 'ds41-tvm[plot]'") from None


def plot(result: Result, path: Path) -> None:
    """Write the pictures to `path` (PNG, SVG or PDF by its ending). Raises UsageError, also if the system refuses."""
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in result.rows if row.floor is not None]
    figure = Figure(figsize=(15, max(6.0, 0.17 * len(timed) + 1.5)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _roofline(left, result, [row for row in timed if row.work.bytes > 0])
    _times(right, timed)
    figure.suptitle(f"{result.machine.cpu}, {result.threads} threads, {result.target}, {result.date}")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: cannot be written ({error}); expected a path ending in .png") from None


def _roofline(axes, result: Result, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]
    """GFLOP/s over FLOP per byte of memory, below the slope of reading and the roofs of arithmetic."""
    read = result.limits["read"].median
    intensity = [(r.work.flops + r.work.dots) / r.work.bytes for r in rows] or [1.0]
    low, high = min(*intensity, 0.5) / 2, max(*intensity, 1e3) * 3
    for kind, name in _ROOFS.items():
        if kind in result.limits:
            peak = result.limits[kind].median
            xs = [low, peak / read, high]
            axes.plot(xs, [low * read / 1e9, peak / 1e9, peak / 1e9], "k-", lw=0.8)
            axes.annotate(f"{name}, {peak / 1e9:.0f}", (high, peak / 1e9), ha="right", va="bottom", fontsize=7)
    axes.annotate(f"read {read / 1e9:.1f} GB/s", (low * 1.2, low * 1.4 * read / 1e9), fontsize=7, rotation=35)
    kinds = list(dict.fromkeys((r.what, r.linear) for r in rows))
    for number, (what, linear) in enumerate(kinds):
        chosen = [r for r in rows if (r.what, r.linear) == (what, linear)]
        axes.plot(
            [(r.work.flops + r.work.dots) / r.work.bytes for r in chosen],
            [r.gflops for r in chosen],
            _MARKS[number % len(_MARKS)],
            ms=5,
            label=f"{what} {linear or ''}".strip(),
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory", ylabel="GFLOP/s", title="roofline")
    axes.grid(alpha=0.3, which="both", lw=0.4)
    if kinds:
        axes.legend(fontsize=7, loc="lower right")


def _times(axes, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]
    """A line for each row: floor to ours, and where the peers are."""
    places = range(len(rows))
    axes.hlines(places, [r.floor for r in rows], [r.seconds.median for r in rows], color="0.6", lw=2)
    axes.plot([r.floor for r in rows], places, "k|", ms=8, label="floor: limit of the machine")
    axes.plot([r.seconds.median for r in rows], places, "o", ms=4, label="ours")
    for number, name in enumerate(dict.fromkeys(name for r in rows for name in r.peers)):
        found = [(r.peers[name].seconds.median, i) for i, r in enumerate(rows) if name in r.peers]
        axes.plot(*zip(*found, strict=True), _MARKS[(number + 1) % len(_MARKS)], ms=4, mfc="none", label=name)
    axes.set_yticks(places, [r.name for r in rows], fontsize=6)
    axes.set(xscale="log", xlabel="seconds", title="time of a step")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(alpha=0.3, axis="x", which="both", lw=0.4)
    axes.legend(fontsize=7)
