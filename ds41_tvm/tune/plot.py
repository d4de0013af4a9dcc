"""A picture of what tuning gained: for every kernel the share of the machine's limit before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds41_tvm.errors import UsageError
from ds41_tvm.tune.measure import require
from ds41_tvm.tune.records import Record
from ds41_tvm.tune.summary import label


def plot(records: Sequence[Record], path: Path) -> None:
    """Write a bar chart; the kind of file follows the name. Raises TuneError without matplotlib, UsageError."""
    require("matplotlib", "--plot", "plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.32 * len(records)))
    places = range(len(records))
    known = all(r.share_after > 0 for r in records)
    before = [100 * r.share_before if known else 1.0 for r in records]
    after = [100 * r.share_after if known else r.before / r.after for r in records]
    axes.barh([p + 0.2 for p in places], before, 0.4, label="before", color="#b0b0b0")
    bars = axes.barh([p - 0.2 for p in places], after, 0.4, label="after", color="#2060a0")
    axes.bar_label(bars, [f"{r.before / r.after:.2f}x" for r in records], padding=3, fontsize=8)
    axes.set_yticks(list(places), [f"{label(r)}  [{r.limit or 'unknown'}]" for r in records], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of the machine's limit" if known else "times as fast as before")
    axes.set_title(f"tuned kernels, {records[0].target}" if records else "no tuned kernels")
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: cannot be written ({error}); expected a name such as tuned.png") from error
    finally:
        pyplot.close(figure)
