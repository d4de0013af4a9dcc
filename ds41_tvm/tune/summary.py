"""What tuning gained, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ds41_tvm.tune.records import Record


def label(record: Record) -> str:
    """A short name for people: operator and the sizes that tell its kernels apart."""
    s = record.sizes
    if record.op == "linear":
        rows = "many rows" if s["many"] else "one row"
        return f"linear {s['n']}x{s['k']}/{s['groups']} {s['weight']}->{s['out']} {s['total']}, {rows}"
    return f"{record.op} " + " ".join(f"{name}={value}" for name, value in s.items() if name not in ("eps", "factor"))


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a record: kernel, knobs, microseconds before and after, ratio, limit, share of it in percent."""
    return [
        {
            "kernel": label(r),
            "knobs": " ".join(f"{name}={value}" for name, value in r.knobs.items()),
            "before": r.before * 1e6,
            "after": r.after * 1e6,
            "ratio": r.before / r.after,
            "limit": r.limit or "unknown",
            "share before": 100 * r.share_before,
            "share after": 100 * r.share_after,
        }
        for r in records
    ]


def geometric_mean(records: Sequence[Record]) -> float:
    """Of the ratios before / after; 1 for none."""
    return math.exp(sum(math.log(r.before / r.after) for r in records) / len(records)) if records else 1.0
