"""Replaying a case through compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import UsageError
from ds41_tvm.golden.case import Array, GoldenCase
from ds41_tvm.golden.play import Forward
from ds41_tvm.reference.candidates import candidate_positions
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.runtime.state import Sequence
from ds41_tvm.runtime.step import Step

# Names of a runner's trace -> recorded names, where the arrays are the same.
_NAMES = {
    "qr": "qr",
    "q": "q",
    "o": "o",
    "out": "out",
    "index_q": "index_q",
    "index_weights": "index_weights",
    "scores": "index_score",
    "topk": "selection",
    "window": "window",
    "idx": "idx",
}


def runner_forward(case: GoldenCase, runner: Runner) -> tuple[Forward, list[Sequence]]:
    """The runner as a `Forward` for `play`, and its sequences, one per row of the batch.

    `runner` is built from the case's configuration, weights, linear mode and tie rule, with ``keys="published"``, as
    the official code recorded the case; all of its layers are to be played. A step begins with the runner's first layer
    and is committed after its last. Raises UsageError if the runner was built for something else.
    """
    program = runner.program
    for what, has, needs in (
        ("configuration", program.config.digest(), case.config.digest()),
        ("linear mode", program.linear, case.linear),
        ("tie rule", program.ties, case.ties),
    ):
        if has != needs:
            raise UsageError(
                f"the runner's {what} is {has}; case {case.name} was recorded with {needs}; build one for it"
            )
    sequences = [runner.new_sequence() for _ in range(case.batch)]
    current: list[Step] = []

    def forward(layer: int, step: int, x: NDArray[np.uint16], start: int) -> dict[str, Array]:
        batch, tokens, dim = x.shape
        if layer == runner.layers[0]:
            current[:] = [runner.step([(sequence, tokens) for sequence in sequences])]
        planned = current[0]
        _, trace = runner.forward(layer, x.reshape(batch * tokens, dim), planned, trace=True)
        if layer == runner.layers[-1]:
            runner.commit(planned)
        return _recorded(runner, layer, batch, start + tokens, trace)

    return forward, sequences


def _recorded(runner: Runner, layer: int, batch: int, length: int, trace: dict[str, Any]) -> dict[str, Array]:
    """A trace under the recorded names, [batch, rows, ...] each."""
    out = {name: _by_sequence(trace[mine], batch) for mine, name in _NAMES.items() if mine in trace}
    out["kv_rows"] = np.stack(trace["kv_rows"])
    if "latent" in trace:
        out["latent_pre_rope"] = _by_sequence(trace["latent"], batch)
    if "index_score" in out:
        # A trace has at least one column, a recorded array as many as there are positions.
        positions = length // runner.config.compress_ratios[layer]
        out["index_score"] = out["index_score"][..., :positions]
    if "candidates" in trace:
        positions = length // runner.config.compress_ratios[layer]
        inside = candidate_positions(trace["candidates"], runner.config.candidate_block_size, positions)
        out["candidates"] = _by_sequence(inside, batch)
    return out


def _by_sequence(array: Array, batch: int) -> Array:
    return array.reshape(batch, len(array) // batch, *array.shape[1:])


def runner_caches(case: GoldenCase, runner: Runner, sequences: list[Sequence]) -> dict[str, Array]:
    """The caches of the runner's sequences under the recorded names, rows by position."""
    out: dict[str, Array] = {}
    window = case.config.window_size
    for layer in runner.layers:
        length = sequences[0].length
        slots = np.arange(max(0, length - window), length) % window
        out[f"window_cache.{layer}"] = np.stack([s.window_cache(layer)[slots] for s in sequences])
        if case.config.role(layer).kind == "full":
            out[f"compress_kv_cache.{layer}"] = np.stack([s.compress_kv_cache(layer) for s in sequences])
            out[f"index_k_cache.{layer}"] = np.stack([s.index_k_cache(layer) for s in sequences])
    return out
