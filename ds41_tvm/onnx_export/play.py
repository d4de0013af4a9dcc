"""Feeding an exported model step by step: keeps the caches between calls, for any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# Inputs by name -> outputs by name.
Engine = Callable[[dict[str, Array]], Mapping[str, Array]]


class Session:
    """Calls of one model on one batch: `start_pos` and `past_*` follow from the calls before.

    `inputs`: (name, dtype, shape) of the model's inputs; an axis of no fixed size is None.
    """

    def __init__(self, inputs: Iterable[tuple[str, Any, tuple[int | None, ...]]], batch: int = 1) -> None:
        self.length = 0
        self.caches: dict[str, Array] = {}
        for name, dtype, shape in inputs:
            if name.startswith("past_"):
                rest = [0 if size is None else size for size in shape[1:]]
                self.caches[name] = np.zeros([batch, *rest], dtype)

    def feeds(self, x: Mapping[int, Array], others: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """All inputs of the next call: x by layer, f32 [batch, tokens, dim]."""
        feeds = {f"x.{layer}": np.asarray(rows, np.float32) for layer, rows in x.items()}
        feeds["start_pos"] = np.array(self.length, np.int64)
        return {**feeds, **self.caches, **(others or {})}

    def advance(self, out: Mapping[str, Array], tokens: int) -> None:
        """Take the caches of a call's outputs as those of the next call."""
        for name in self.caches:
            self.caches[name] = out["present_" + name.removeprefix("past_")]
        self.length += tokens

    def step(
        self, engine: Engine, x: Mapping[int, Array], others: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Outputs of the next call by name; the caches advance."""
        out = dict(engine(self.feeds(x, others)))
        self.advance(out, next(iter(x.values())).shape[1])
        return out
