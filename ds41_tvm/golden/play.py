"""Replaying a case: the same steps, inputs and layer order as when it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.golden.case import Array, GoldenCase
from ds41_tvm.reference.layer import Reference
from ds41_tvm.reference.linear import Accumulate
from ds41_tvm.reference.sequence import Sequence

# (layer, step, x bf16 bits [batch, tokens, dim], start position) -> arrays by name, each [batch, rows, ...].
Forward = Callable[[int, int, NDArray[np.uint16], int], Mapping[str, Array]]


def play(
    case: GoldenCase, forward: Forward, layers: Iterable[int] | None = None, steps: int | None = None
) -> dict[str, Array]:
    """Feed all (or the first) steps through the layers in order: results as ``{what}.{layer}.{step}``."""
    produced: dict[str, Array] = {}
    chosen = range(case.config.n_layers) if layers is None else sorted(layers)
    for step in range(len(case.steps) if steps is None else steps):
        for layer in chosen:
            for what, array in forward(layer, step, case.input(layer, step), case.start(step)).items():
                produced[f"{what}.{layer}.{step}"] = array
    return produced


def reference_forward(
    case: GoldenCase, layers: Iterable[int] | None = None, accumulate: Accumulate = "f64"
) -> tuple[Forward, list[Sequence]]:
    """The reference as a `Forward`, and its sequences, one per row of the batch."""
    model = Reference(
        case.config, case.weights, layers, case.linear, case.ties, keys="published", accumulate=accumulate
    )
    sequences = [model.new_sequence() for _ in range(case.batch)]

    def forward(layer: int, step: int, x: NDArray[np.uint16], start: int) -> dict[str, Array]:
        traces: list[dict[str, Any]] = []
        for row, sequence in zip(x, sequences, strict=True):
            traces.append({})
            model.forward(layer, row, start, sequence, traces[-1])
        return {what: np.stack([trace[what] for trace in traces]) for what in traces[0]}

    return forward, sequences


def reference_caches(case: GoldenCase, sequences: list[Sequence]) -> dict[str, Array]:
    """The caches of the reference's sequences under the recorded names, rows by position."""
    out: dict[str, Array] = {}
    for layer in sequences[0].caches:
        caches = [sequence.caches[layer] for sequence in sequences]
        oldest = max(0, caches[0].length - case.config.window_size)
        out[f"window_cache.{layer}"] = np.stack([cache.window_rows(oldest) for cache in caches])
        if caches[0].role.kind == "full":
            out[f"compress_kv_cache.{layer}"] = np.stack([cache.latent_rows() for cache in caches])
            out[f"index_k_cache.{layer}"] = np.stack([cache.key_rows() for cache in caches])
    return out
