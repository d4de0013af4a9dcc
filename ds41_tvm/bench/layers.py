"""Time of whole layers beside a peer's and the machine's read bandwidth, taken in turn in one process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.bench.limits import read_bandwidth
from ds41_tvm.checkpoint import random_input
from ds41_tvm.config import AttentionConfig
from ds41_tvm.runtime.runner import Runner

Array = NDArray[Any]


class Contestant(Protocol):
    """Something that runs layers: `begin` a fresh sequence, `run` one layer on its next tokens, `end` the step."""

    def begin(self) -> None: ...
    def start(self, tokens: int) -> None: ...
    def run(self, layer: int, x: Array) -> None: ...
    def end(self) -> None: ...


class Ours:
    """A `Runner` as a contestant."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.sequence = runner.new_sequence()
        self.step: Any = None

    def begin(self) -> None:
        self.sequence.truncate(0)

    def start(self, tokens: int) -> None:
        self.step = self.runner.step([(self.sequence, tokens)])

    def run(self, layer: int, x: Array) -> None:
        self.runner.forward(layer, x, self.step)

    def end(self) -> None:
        self.runner.commit(self.step)


class Torch:
    """The official arithmetic in torch as a contestant; needs the extra ``torch``."""

    def __init__(
        self, config: AttentionConfig, weights: Mapping[str, Any], layers: Iterable[int], linear: str, variant: Any,
        threads: int,
    ) -> None:  # fmt: skip
        import torch  # the module above has explained it if it is missing

        from ds41_tvm.bench.torch_official import TorchOfficial, to_torch

        torch.set_num_threads(threads)
        self._to_torch = to_torch
        self.model = TorchOfficial(config, weights, layers, linear=linear, variant=variant, slots=1)
        self.position = self.tokens = 0

    def begin(self) -> None:
        self.position = 0

    def start(self, tokens: int) -> None:
        self.tokens = tokens

    def run(self, layer: int, x: Array) -> None:
        self.model.forward(layer, self._to_torch(x[None]), self.position)

    def end(self) -> None:
        self.position += self.tokens


@dataclass
class Times:
    """Seconds of every round, by layer."""

    prefill: dict[int, list[float]] = field(default_factory=dict)
    decode: dict[int, list[float]] = field(default_factory=dict)


def race(
    contestants: Mapping[str, Contestant],
    config: AttentionConfig,
    layers: Iterable[int],
    prompt: int,
    decode: int,
    rounds: int,
    threads: int,
    progress: Callable[[], None] | None = None,
) -> tuple[dict[str, Times], list[float]]:
    """Let every contestant run `prompt` tokens and then `decode` single ones, `rounds` times, taking turns.

    Returns the times, and the read bandwidth (bytes per second) measured before every turn. The first round warms up
    and is not counted. A pause before each turn lets the other contestant's idle threads stop spinning.
    """
    layers = list(layers)
    x = {layer: random_input("bench", layer, 0, 1, prompt + decode, config.dim)[0] for layer in layers}
    times = {name: Times({n: [] for n in layers}, {n: [] for n in layers}) for name in contestants}
    bandwidth = []
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            time.sleep(0.5)
            bandwidth.append(read_bandwidth(threads))
            contestant.begin()
            for first, count in [(0, prompt), *((prompt + i, 1) for i in range(decode))]:
                contestant.start(count)
                for layer in layers:
                    rows = np.ascontiguousarray(x[layer][first : first + count])
                    begin = time.perf_counter()
                    contestant.run(layer, rows)
                    seconds = time.perf_counter() - begin
                    if turn:
                        (times[name].decode if first else times[name].prefill)[layer].append(seconds)
                contestant.end()
            if progress is not None:
                progress()
    return times, bandwidth


def peak_memory() -> int:
    """Bytes of the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rows(runner: Runner, times: Mapping[str, Times], bandwidth: Iterable[float]) -> list[dict[str, Any]]:
    """One record per layer and phase: medians, spread, ratio to each peer, share of the read bandwidth in decode."""
    limit = float(np.median(list(bandwidth)))
    out = []
    for layer in runner.layers:
        for phase in ("prefill", "decode"):
            mine = getattr(times["ours"], phase)[layer]
            record: dict[str, Any] = {
                "layer": layer,
                "role": runner.config.role(layer).kind,
                "ratio": runner.config.role(layer).ratio,
                "phase": phase,
                "seconds": float(np.median(mine)),
                "fastest": min(mine),
                "slowest": max(mine),
                "peers": {
                    name: float(np.median(getattr(other, phase)[layer]))
                    for name, other in times.items()
                    if name != "ours"
                },
            }
            if phase == "decode":
                record["bytes_per_second"] = runner.weight_bytes(layer) / record["seconds"]
                record["share_of_read_bandwidth"] = record["bytes_per_second"] / limit
            out.append(record)
    return out
