"""What the benchmark found, as data: rows, limits, the machine; JSON; the comparison with an older result."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

import msgspec

from ds41_tvm.bench.machine import Machine
from ds41_tvm.bench.work import Work
from ds41_tvm.errors import UsageError

FACTOR = 1.3  # how much worse a ratio may be than in the result it is compared with


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median, quartiles and extremes of `samples` values."""

    median: float
    q1: float
    q3: float
    low: float
    high: float
    samples: int


def spread(values: Iterable[float]) -> Spread:
    """The `Spread` of at least one value."""
    v = sorted(values)
    q1, _, q3 = quantiles(v, n=4, method="inclusive") if len(v) > 1 else (v[0], v[0], v[0])
    return Spread(median(v), q1, q3, v[0], v[-1], len(v))


class PeerTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's seconds for the same work, and how many times longer that is."""

    seconds: Spread
    ratio: float


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measurement of ours beside its peers and the machine's limits, taken in turn.

    `floor`: seconds that the `limit` which binds allows at least (None: no count of work); `share`: floor / seconds;
    `of`: share of each limit alone. `state_bytes`: cache of that layer over all sequences. `others`: share of the
    machine's processor time that other processes, or the host, took meanwhile. `skipped`: peers that were not measured,
    and why.
    """

    name: str
    what: str
    layer: int | None = None
    role: str | None = None
    ratio: int | None = None
    linear: str | None = None
    kernel: str | None = None
    tokens: int = 1
    context: int = 0
    batch: int = 1
    chunk: int = 0
    seconds: Spread
    work: Work
    gflops: float | None = None
    gbytes: float | None = None
    floor: float | None = None
    limit: Literal["read", "compute"] | None = None
    share: float | None = None
    of: dict[str, float] = {}
    state_bytes: int | None = None
    others: float = 0.0
    peers: dict[str, PeerTime] = {}
    skipped: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run of the benchmark. `limits`: per second, over all turns (bytes, FLOP or integer operations); `memory`:
    resident bytes at most, by process; `skipped`: cases that were not measured, and why.
    """

    schema: Literal[1] = 1
    version: str
    date: str
    machine: Machine
    config_digest: str
    layers: tuple[int, ...]
    target: str
    linear: tuple[str, ...]
    threads: int
    isa: str
    libraries: dict[str, str]
    limits: dict[str, Spread]
    memory: dict[str, int]
    rows: list[Row]
    skipped: dict[str, str] = {}


def write_result(result: Result, path: Path) -> None:
    """Write `result` as JSON. Raises UsageError if the system refuses."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise UsageError(f"{path}: the result cannot be written ({error.strerror or error})") from None


def read_result(path: Path) -> Result:
    """The result in a file. Raises UsageError if it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror or error}); expected a result of bench --json"
        ) from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: is no result of this version's bench --json: {error}") from None


class Change(msgspec.Struct, frozen=True):
    """A ratio of a row, before and now; greater is better. `what`: ``share`` or a peer's name."""

    row: str
    what: str
    before: float
    now: float

    @property
    def factor(self) -> float:
        """How many times better now; below 1 is worse."""
        return self.now / self.before if self.before else 1.0


def changes(now: Result, before: Result) -> list[Change]:
    """Every ratio that both results have: to each peer, and the share of the machine's limit. Never times.

    Raises UsageError if they have none in common, or were made for other targets.
    """
    if now.target != before.target:
        raise UsageError(
            f"the baseline was measured for target {before.target}, this run for {now.target}: their ratios say "
            f"nothing about each other; expected a baseline of the same target"
        )
    old = {row.name: row for row in before.rows}
    out = []
    for row in now.rows:
        was = old.get(row.name)
        if was is None:
            continue
        if row.share is not None and was.share is not None:
            out.append(Change(row.name, "share", was.share, row.share))
        for name, peer in row.peers.items():
            if name in was.peers and now.isa == before.isa:
                out.append(Change(row.name, name, was.peers[name].ratio, peer.ratio))
    if not out:
        raise UsageError(
            f"the baseline has no ratio in common with this run; its rows are {', '.join(sorted(old)[:4])}, ...; "
            f"expected a result of the same cases, layers and peers"
        )
    return out


def regressions(found: Iterable[Change], factor: float = FACTOR) -> list[Change]:
    """Those that are worse by more than `factor`."""
    return [change for change in found if change.factor * factor < 1]
