"""What layers outside of a file leave in a step, from the reference: inputs of a file without its sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig
from ds41_tvm.onnx_export.play import Array
from ds41_tvm.reference.layer import Reference


class Outside:
    """Runs the sources that a file lacks; `names` are the graph inputs they serve, such as ``selection.4``."""

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, Any],
        layers: Iterable[int],
        names: Iterable[str],
        linear: str,
        batch: int,
    ) -> None:
        self.model = Reference(config, weights, layers, linear, accumulate="f32")
        self.sequences = [self.model.new_sequence() for _ in range(batch)]
        self.names = tuple(names)

    def step(self, x: Mapping[int, NDArray[np.uint16]], start: int) -> dict[str, Array]:
        """The inputs for tokens x by layer, bf16 bits [batch, tokens, dim], from position `start` on."""
        for layer in self.model.layers:
            for rows, sequence in zip(x[layer], self.sequences, strict=True):
                self.model.forward(layer, rows, start, sequence)
        return {name: np.stack([expected(sequence, name) for sequence in self.sequences]) for name in self.names}


def expected(sequence: Any, name: str) -> Array:
    """What the reference leaves for output `name` of a graph: [rows, ...], without the batch."""
    if name == "present_published_key":
        published = sequence.published
        if published is not None:
            return sequence.caches[published].keys  # type: ignore[no-any-return]
        return np.zeros((0, next(iter(sequence.caches.values())).keys.shape[1]), np.uint8)
    what, _, layer = name.partition(".")
    cache = sequence.caches[int(layer)]
    if what == "present_window":
        return cache.window[-sequence.config.window_size :]  # type: ignore[no-any-return]
    if what == "present_latent":
        return cache.latents  # type: ignore[no-any-return]
    if what == "present_key":
        return cache.keys  # type: ignore[no-any-return]
    if what == "present_members":
        rest = len(cache.latents) * cache.role.ratio
        return np.stack([cache.kv[rest:], cache.gate[rest:]], axis=1)
    chosen = cache.selection if what == "selection" else cache.candidates
    source = sequence.caches[cache.role.kv_source]
    positions = len(source.latents)
    if what == "candidates":
        positions = -(-positions // sequence.config.candidate_block_size)
    return chosen[:, :positions].astype(np.int64)  # type: ignore[no-any-return]
