"""The compiled layers as a contestant of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.api import grouped_format, pooling_format
from ds41_tvm.bench.cases import SPARE, Timing
from ds41_tvm.bench.fill import RandomRows, fill, state_bytes
from ds41_tvm.bench.watch import Call, Watch
from ds41_tvm.compiler.build import compile_kernels
from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.numerics.formats import bf16_encode
from ds41_tvm.packing import aligned
from ds41_tvm.program import Program
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.runtime.state import Sequence
from ds41_tvm.runtime.weights import pack_layer
from ds41_tvm.target import Target
from ds41_tvm.tune.apply import selection


class Ours:
    """A runner, and beside it one with the same weights whose kernels are timed one by one."""

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, Any],
        layers: Iterable[int] | None,
        target: Target,
        linear: str,
        threads: int | None,
        tokens: int,
        progress: Callable[[int, int], None] | None = None,
        records: bool = True,
    ) -> None:
        program = Program(
            config=config,
            layers=closure(config, layers),
            target=target,
            linear=config.check_linear(linear),
            pooling=pooling_format(config, weights),
            grouped=grouped_format(config, linear, weights),
        )
        tuned = selection(records)(program)  # as `build` does
        functions = compile_kernels(tuned.kernels, target, progress)
        self.program, self.kernels_used = tuned.program, tuned.kernels
        packed = {n: pack_layer(self.program, config.role(n), weights) for n in self.program.layers}
        self.config, self.layers = config, self.program.layers
        self.runner = Runner(self.program, functions, packed, threads)
        self.watch = Watch()
        self._watched = Runner(self.program, self.watch.wrap(functions, tuned.kernels), packed, threads)
        self._x = _input(config, tokens)
        self._sequences: list[Sequence] = []
        self._context = 0

    def prefill(self, tokens: int, chunk: int) -> Timing:
        """A prompt of a fresh sequence, `chunk` tokens a step."""
        total = Timing(dict.fromkeys(self.layers, 0.0))
        with self.runner.new_sequence() as sequence:
            for first in range(0, tokens, chunk):
                part = _run(self.runner, [(sequence, min(chunk, tokens - first))], self._x[first:])
                total.plan += part.plan
                for layer, seconds in part.layers.items():
                    total.layers[layer] += seconds
        return total

    def prepare(self, context: int, batch: int) -> int:
        """`batch` sequences for `decode`, whose next token is about the `context`-th. Returns that number.

        Where the configuration ends there, sequences start somewhat shorter.
        """
        for sequence in self._sequences:
            sequence.close()
        self._context = min(context, max(1, self.config.max_seq_len - SPARE))
        self._sequences = [self._filled(self.runner, self._context, seed) for seed in range(batch)]
        return self._context

    def _filled(self, runner: Runner, context: int, seed: int = 0) -> Sequence:
        if context == 1:
            return runner.new_sequence()
        return fill(runner, context - 1, RandomRows(self.config, seed))

    def decode(self) -> Timing:
        """One more token for each of the prepared sequences."""
        if self._sequences[0].length >= min(self._context + SPARE, self.config.max_seq_len):
            self.prepare(self._context, len(self._sequences))
        return _run(self.runner, [(s, 1) for s in self._sequences], self._x)

    def state_bytes(self, layer: int) -> int:
        """Bytes of cache of one layer, over the prepared sequences."""
        return sum(state_bytes(self.runner.caches, s, layer) for s in self._sequences)

    def kernels(
        self, context: int, tokens: int, again: Collection[str] = (), times: int = 1
    ) -> tuple[list[Call], Timing]:
        """Every kernel call of a step of `tokens` tokens that ends at `context`, see `Watch`; and the layers' times."""
        context = min(context, self.config.max_seq_len)
        sequence = self._watched.new_sequence()
        if context > tokens:
            sequence.close()
            sequence = self._filled(self._watched, context - tokens + 1)
        with sequence:
            self.watch.calls, self.watch.again, self.watch.times = [], again, times
            timing = _run(self._watched, [(sequence, tokens)], self._x, self.watch)
        return self.watch.calls, timing


def _input(config: AttentionConfig, tokens: int) -> NDArray[np.uint16]:
    """Inputs of all layers: normal values, bf16 bits ``[tokens, dim]`` in aligned memory."""
    x = aligned((tokens, config.dim), np.uint16)
    random = np.random.default_rng(0)
    for first in range(0, tokens, 256):
        part = x[first : first + 256]
        part[:] = bf16_encode(random.standard_normal(part.shape, np.float32))
    return x


def _run(
    runner: Runner, parts: list[tuple[Sequence, int]], x: NDArray[np.uint16], watch: Watch | None = None
) -> Timing:
    clock = time.perf_counter
    start = clock()
    step = runner.step(parts)
    plan, times = clock() - start, {}
    rows = x[: step.tokens]
    for layer in runner.layers:
        if watch is not None:
            watch.layer = layer
        start = clock()
        runner.forward(layer, rows, step)
        times[layer] = clock() - start
    start = clock()
    runner.commit(step)
    return Timing(times, plan + clock() - start)
