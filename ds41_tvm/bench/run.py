"""A whole run of the benchmark: build every contestant, measure every case, gather the result."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from ds41_tvm import __version__
from ds41_tvm.bench.cases import ALONE, SPARE, Case
from ds41_tvm.bench.limits import Limits, read_bytes
from ds41_tvm.bench.machine import describe, resident
from ds41_tvm.bench.ours import Ours
from ds41_tvm.bench.peer import Build, Peer
from ds41_tvm.bench.profile import Part, profile
from ds41_tvm.bench.race import Race
from ds41_tvm.bench.result import Result, Row, spread
from ds41_tvm.bench.weights import RandomWeights
from ds41_tvm.bench.work import linear_sizes
from ds41_tvm.config import AttentionConfig, LinearMode, closure
from ds41_tvm.errors import UsageError
from ds41_tvm.runtime.threads import check_threads
from ds41_tvm.target import Target

Report = Callable[[str, int, int], None]  # what is being done, how much is done, how much there is
_LEAST_LEFT = 2.0  # seconds below which no further case is begun


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: see the command's help. `seconds`: None for no limit."""

    config: AttentionConfig
    layers: tuple[int, ...]
    cases: tuple[Case, ...]
    target: Target
    linear: tuple[LinearMode, ...] = ("bf16",)
    peers: tuple[str, ...] = ()
    isa: str = "host"
    threads: int | None = None
    rounds: int = 3
    seconds: float | None = None


def typical_layers(config: AttentionConfig) -> tuple[int, ...]:
    """The first layer of every kind and ratio (reuse layers: one), with the layers they read from."""
    first: dict[tuple[str, int], int] = {}
    for role in config.roles:
        first.setdefault((role.kind, role.ratio if role.kind == "full" else 0), role.layer)
    chosen = set(first.values())
    for layer in first.values():
        role = config.role(layer)
        chosen |= {s for s in (role.kv_source, role.index_source, role.candidate_source) if s is not None}
    return closure(config, sorted(chosen))


def check_installed(peers: tuple[str, ...]) -> None:
    """Raises UsageError naming the extra that a peer needs."""
    for name in peers:
        library, extra = ("onnxruntime", "onnx") if name == "onnxruntime" else ("torch", "torch")
        if importlib.util.find_spec(library) is None:
            raise UsageError(f"--against {name} needs the extra {extra}: pip install 'ds41-tvm[{extra}]'")


def memory_needed(options: Options) -> int:
    """About how many bytes all processes together will hold."""
    c, total = options.config, float(read_bytes() + (1 << 30))
    longest = max((case.context * case.batch for case in options.cases), default=0)
    for layer in options.layers:
        role = c.role(layer)
        weights = sum(n * k for n, k in linear_sizes(c, role).values())
        total += sum(weights * (2 if mode == "bf16" else 4 / 3) for mode in options.linear)
        total += sum(weights * (4 if name in ("torch-f32", "onnxruntime") else 2) for name in options.peers)
        if role.kind == "full":
            rows = longest // role.ratio
            packed = c.head_dim // 2 + c.head_dim // 16 + c.index_head_dim // 2 + c.index_head_dim // 32
            total += rows * packed * 3 * len(options.linear)
            total += rows * 2 * (c.head_dim + c.index_head_dim) * len(options.peers)
    return int(total)


@contextmanager
def contestants(options: Options, report: Report) -> Iterator[tuple[dict[str, Ours], dict[str, Peer]]]:
    """Ours by linear mode and the peers by name, built; their processes end with the context."""
    tokens = max(max(case.chunk or case.tokens, case.tokens, case.batch) for case in options.cases)
    longest = max(max(case.context, case.tokens) for case in options.cases)
    threads = check_threads(options.threads)
    done, total = 0, len(options.linear) + len(options.peers)
    ours: dict[str, Ours] = {}
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in options.peers:
            report("prepare", done, total)
            official: dict[str, Any] = msgspec.to_builtins(options.config)
            build = Build(name, official, options.layers, threads, longest)
            peers[name] = stack.enter_context(Peer(build, options.isa))
            done += 1
        for mode in options.linear:
            report("prepare", done, total)
            weights = RandomWeights(options.config, options.layers, mode)
            ours[mode] = Ours(options.config, weights, options.layers, options.target, mode, options.threads, tokens)
            done += 1
        report("prepare", done, total)
        yield ours, peers


def measure(options: Options, report: Report = lambda what, done, total: None) -> Result:
    """Run all cases, each at least one turn while there is time. Raises PeerError and what building raises."""
    end = time.monotonic() + options.seconds if options.seconds is not None else float("inf")
    with contestants(options, report) as (ours, peers):
        limits = Limits(options.target, check_threads(options.threads))
        race = Race(ours, peers, limits, options.rounds, end)
        rows: list[Row] = []
        skipped: dict[str, str] = {}
        for number, case in enumerate(options.cases):
            report("measure", number, len(options.cases))
            left = end - time.monotonic()
            if left < _LEAST_LEFT:
                skipped[case.name] = f"the time limit of {options.seconds:g} s was reached"
                continue
            made = race.run(case, time.monotonic() + left / (len(options.cases) - number))
            if not made:
                operators = ALONE.get(case.what, ())
                skipped[case.name] = f"none of these layers runs a kernel {' or '.join(operators)} at this size"
            rows += made
        report("measure", len(options.cases), len(options.cases))
        race.look()
        return Result(
            version=__version__,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            machine=describe(),
            config_digest=options.config.digest(),
            layers=options.layers,
            target=options.target.name,
            linear=options.linear,
            threads=limits.threads,
            isa=options.isa,
            libraries={"tvm": _tvm_version(), **{name: peer.version for name, peer in peers.items()}},
            limits={kind: spread(values) for kind, values in race.seen.items()},
            memory={"ours": resident().get("peak", 0), **{n: p.memory().get("peak", 0) for n, p in peers.items()}},
            rows=rows,
            skipped=skipped,
        )


def profiles(options: Options, steps: int, report: Report) -> dict[tuple[Case, str], list[Part]]:
    """The parts of a decode step for every decode case and linear mode."""
    out = {}
    options = msgspec.structs.replace(options, peers=())
    with contestants(options, report) as (ours, _):
        for case in options.cases:
            for mode, contestant in ours.items():
                context = min(case.context, options.config.max_seq_len - SPARE)
                out[case, mode] = profile(contestant, max(context, 1), 1, steps)
    return out


def _tvm_version() -> str:
    import tvm

    return str(tvm.__version__)
