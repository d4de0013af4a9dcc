"""Measurements in turn: machine limits, ours, each peer, and again; every case into rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

from ds41_tvm.bench import work
from ds41_tvm.bench.cases import ALONE, Case, Timing, size_name
from ds41_tvm.bench.limits import Limits, launch_times
from ds41_tvm.bench.machine import last_cache
from ds41_tvm.bench.ours import Ours
from ds41_tvm.bench.peer import Peer, busy_seconds, cpu_seconds
from ds41_tvm.bench.result import PeerTime, Row, spread
from ds41_tvm.bench.watch import Call
from ds41_tvm.bench.work import Work

PAUSE = 0.05  # seconds until idle threads of whoever ran last have stopped spinning
OUR_SECONDS, OUR_SAMPLES = 0.25, 20  # per round at least so long, or so many samples
LONG = 3.0  # a first run that takes so many seconds counts: it is not repeated for warmth
PEER_LIMIT = 40.0  # seconds of one run of a peer beyond which it is left out
ALONE_TIMES = 15
LAUNCHES = 2000

Samples = dict[str, dict[int, list[float]]]  # by contestant and layer
Key = tuple[str, int, str]  # linear mode, layer, kernel


@dataclass
class Race:
    """Contestants and how long to measure them. `ours` by linear mode; `rounds`: turns of each case."""

    ours: Mapping[str, Ours]
    peers: Mapping[str, Peer]
    limits: Limits
    rounds: int
    until: float = float("inf")  # of the monotonic clock
    seen: dict[str, list[float]] = field(default_factory=dict)  # limits, all samples
    _known: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    def run(self, case: Case, until: float) -> list[Row]:
        """Measure one case: at least one round, others while the clock is before `until`."""
        start, busy = time.monotonic(), busy_seconds()
        own = cpu_seconds(self._processes())
        limits: dict[str, list[float]] = {}
        rows = self._launch(case) if case.what == "launch" else self._measure(case, until, limits)
        elapsed = time.monotonic() - start
        others = busy_seconds() - busy - (cpu_seconds(self._processes()) - own)
        share = max(0.0, others / (elapsed * (os.cpu_count() or 1)))
        return [_replaced(row, others=round(share, 3)) for row in rows]

    def _processes(self) -> list[int]:
        return [os.getpid(), *(peer.process for peer in self.peers.values())]

    def _measure(self, case: Case, until: float, limits: dict[str, list[float]]) -> list[Row]:
        if case.what in ALONE:
            return self._alone(case, until, limits)
        samples: Samples = {}
        skipped: dict[str, str] = {}
        runs = self._runs(case, samples, skipped)
        state = {mode: {n: ours.state_bytes(n) for n in ours.layers} for mode, ours in self.ours.items()}
        for turn in range(self.rounds):
            order = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
            for name in order:
                self._look(limits)
                runs[name]()
            if time.monotonic() > until:
                break
        typical = {kind: median(values) for kind, values in limits.items()}
        return [
            self._row(case, mode, layer, samples, skipped, typical, state[mode][layer])
            for mode, ours in self.ours.items()
            for layer in ours.layers
        ]

    def look(self) -> None:
        """One more look at the limits."""
        self._look({})

    def _look(self, limits: dict[str, list[float]]) -> None:
        """What the machine can do now: the best of a few passes, so that the limit is one."""
        time.sleep(PAUSE)
        for kind, values in self.limits.sample(passes=3).items():
            limits.setdefault(kind, []).append(max(values))
            self.seen.setdefault(kind, []).extend(values)

    # ---- whole layers

    def _runs(self, case: Case, samples: Samples, skipped: dict[str, str]) -> dict[str, Callable[[], None]]:
        """What each contestant does in its turn; it is prepared and warm."""
        runs: dict[str, Callable[[], None]] = {}
        for mode, ours in self.ours.items():
            runs[mode] = self._turn(_step(ours, case), samples.setdefault(mode, {}), OUR_SECONDS, OUR_SAMPLES)
        for name, peer in self.peers.items():
            why = self._too_long(name, case)
            if why:
                skipped[name] = why
                continue
            runs[name] = self._turn(_step(peer, case), samples.setdefault(name, {}), 0.0, 1, (name, case))
        return runs

    def _turn(
        self,
        step: Callable[[], Timing],
        into: dict[int, list[float]],
        seconds: float,
        most: int,
        peer: tuple[str, Case] | None = None,
    ) -> Callable[[], None]:
        def one() -> float:
            timing = step()
            for layer, value in timing.layers.items():
                into.setdefault(layer, []).append(value)
            return sum(timing.layers.values())

        first = one()
        if peer is not None:
            self._known[peer[0], peer[1].what] = (_size(peer[1]), first)
        spare = [True]  # the first run may stand for the first turn
        if first < LONG:
            into.clear()
            spare[0] = False

        def turn() -> None:
            if spare[0]:
                spare[0] = False
                return
            begin = time.monotonic()
            for _ in range(most):
                one()
                if time.monotonic() - begin > seconds:
                    break

        return turn

    def _too_long(self, name: str, case: Case) -> str:
        known = self._known.get((name, case.what))
        if known is None:
            return ""
        size, seconds = known
        expected = seconds * max(1.0, _size(case) / size) ** (1.5 if case.what == "prefill" else 1.0)
        left = self.until - time.monotonic()
        if expected > PEER_LIMIT:
            return f"would take about {expected:.0f} s a run, more than {PEER_LIMIT:.0f} s"
        return f"would take about {expected:.0f} s, {max(left, 0):.0f} s are left" if expected > left else ""

    def _row(
        self,
        case: Case,
        mode: str,
        layer: int,
        samples: Samples,
        skipped: dict[str, str],
        limits: Mapping[str, float],
        state: int,
    ) -> Row:
        ours = self.ours[mode]
        role = ours.config.role(layer)
        counted = Work()
        for first in range(0, case.tokens, case.chunk or case.tokens):
            count = min(case.chunk or case.tokens, case.tokens - first)
            start = case.context - case.tokens + first
            counted += work.layer(ours.config, role, mode, [(start, count)] * case.batch)
        return _row(
            case,
            f"{case.name}, layer {layer}, {mode}",
            samples[mode][layer],
            counted,
            limits,
            {name: samples[name][layer] for name in self.peers if name in samples},
            layer=layer,
            role=role.kind,
            ratio=role.ratio,
            linear=mode,
            state_bytes=state if case.what != "prefill" else None,
            skipped=skipped,
        )

    # ---- single kernels

    def _alone(self, case: Case, until: float, limits: dict[str, list[float]]) -> list[Row]:
        """The kernels of one operator on the arguments that layers give them; the linear mode is of no matter."""
        mode, ours = next(iter(self.ours.items()))
        found: dict[Key, list[float]] = {}
        calls: dict[Key, Call] = {}
        theirs: dict[tuple[str, Key], list[float]] = {}
        for _ in range(self.rounds):
            self._look(limits)
            times = ALONE_TIMES if case.tokens == 1 else 2
            noted, _ = ours.kernels(case.context, case.tokens, ALONE[case.what], times)
            for call in noted:
                if call.kernel.op in ALONE[case.what]:
                    key = mode, call.layer, call.kernel.name
                    found.setdefault(key, []).extend(call.seconds)
                    calls[key] = call
            for name, peer in self.peers.items():
                for key, call in calls.items():
                    time.sleep(PAUSE)
                    seconds = peer.single(case.what, _single(case, ours, call), 3 if case.tokens == 1 else 1)
                    theirs.setdefault((name, key), []).extend(seconds)
            if time.monotonic() > until:
                break
        typical = {kind: median(values) for kind, values in limits.items()}
        rows = []
        for key, seconds in found.items():
            role, call = ours.config.role(key[1]), calls[key]
            rows.append(
                _row(
                    case,
                    f"{case.name}, layer {key[1]}, {_kernel_name(call)}",
                    seconds,
                    _alone_work(case, ours, call),
                    typical,
                    {name: theirs[name, key] for name in self.peers if theirs.get((name, key))},
                    layer=key[1],
                    role=role.kind,
                    ratio=role.ratio,
                    kernel=call.kernel.name,
                )
            )
        return rows

    def _launch(self, case: Case) -> list[Row]:
        times: dict[str, list[float]] = {}
        theirs: dict[str, list[float]] = {}
        for _ in range(self.rounds):
            time.sleep(PAUSE)
            for name, parallel in (("serial", False), ("parallel", True)):
                times.setdefault(name, []).extend(
                    launch_times(self.limits.target, self.limits.threads, parallel, LAUNCHES)
                )
            for peer in self.peers.values():
                theirs.setdefault(peer.name, []).extend(peer.single("launch", {}, LAUNCHES))
        return [
            _row(case, f"launch, {name}", seconds, Work(), {}, {n: t for n, t in theirs.items() if t})
            for name, seconds in times.items()
        ]


def _step(contestant: Ours | Peer, case: Case) -> Callable[[], Timing]:
    if case.what == "prefill":
        return lambda: contestant.prefill(case.tokens, case.chunk)
    contestant.prepare(case.context, case.batch)
    return contestant.decode


def _size(case: Case) -> int:
    return case.context * case.batch


def _single(case: Case, ours: Ours, call: Call) -> dict[str, int]:
    """The sizes of a peer's operator that does the work of `call`."""
    c, role = ours.config, ours.config.role(call.layer)
    if case.what == "topk":
        n, width = call.shape
        return {"n": n, "width": width, "k": min(int(dict(call.kernel.params)["k"]), width)}
    if case.what == "scores":  # the official code scores all positions, also behind a candidate source
        return {"n": case.tokens, "positions": case.context // role.ratio}
    latents = case.context // role.ratio if role.ratio else 0
    return {"n": case.tokens, "rows": min(c.window_size, case.context), "latents": latents}


def _alone_work(case: Case, ours: Ours, call: Call) -> Work:
    """What counts in a kernel that is repeated: what it reads lies in a cache then, so that memory sets no limit."""
    if case.what == "topk":
        return Work()
    count = work.scored if case.what == "scores" else work.attended
    done = count(ours.config, ours.config.role(call.layer), case.context - case.tokens, case.tokens)
    return done if done.bytes > last_cache() else Work(done.flops, done.dots)


def _kernel_name(call: Call) -> str:
    if call.kernel.op.startswith("topk"):
        return f"{dict(call.kernel.params)['k']} of {size_name(call.shape[1])}"
    return call.kernel.op


def _row(
    case: Case,
    name: str,
    seconds: list[float],
    counted: Work,
    limits: Mapping[str, float],
    peers: Mapping[str, list[float]],
    **more: object,
) -> Row:
    took = spread(seconds)
    some = counted.flops + counted.dots + counted.bytes > 0
    least = work.floor(counted, limits) if some else None
    of = {}
    if least is not None:
        done = dict.fromkeys(limits, counted.flops) | {"read": counted.bytes, "vnni": counted.dots}
        of = {kind: done[kind] / took.median / rate for kind, rate in limits.items() if done[kind]}
    return Row(
        name=name,
        what=case.what,
        tokens=case.tokens,
        context=case.context,
        batch=case.batch,
        chunk=case.chunk,
        seconds=took,
        work=counted,
        gflops=(counted.flops + counted.dots) / took.median / 1e9 if some else None,
        gbytes=counted.bytes / took.median / 1e9 if some else None,
        floor=least.seconds if least else None,
        limit=least.limit if least else None,
        share=least.seconds / took.median if least else None,
        of=of,
        peers={n: PeerTime(spread(t), median(t) / took.median) for n, t in peers.items()},
        **more,  # type: ignore[arg-type]
    )


def _replaced(row: Row, **fields: object) -> Row:
    return msgspec.structs.replace(row, **fields)
