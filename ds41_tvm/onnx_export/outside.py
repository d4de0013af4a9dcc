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
        return {name: np.stack([_value(sequence, name) for sequence in self.sequences]) for name in self.names}


def _value(sequence: Any, name: str) -> Array:
    what, layer = name.split(".")
    cache = sequence.caches[int(layer)]
    if what == "present_latent":
        return cache.latents  # type: ignore[no-any-return]
    if what == "present_key":
        return cache.keys  # type: ignore[no-any-return]
    chosen = cache.selection if what == "selection" else cache.candidates
    # As wide as the graph makes it: what lies further right is -1 in every row.
    groups = len(cache.latents) if len(cache.latents) else chosen.shape[1]
    return chosen[:, :groups].astype(np.int64)  # type: ignore[no-any-return]
