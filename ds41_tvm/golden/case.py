"""One recorded case: sizes, steps, weights and inputs by the naming rule, recorded arrays by position.

The files hold the official layout, where a decode step lists its window rows by ring slot and prefill by
position. Here every array is by position, so that one form serves any way of feeding the tokens:

    kv_rows    window rows of positions max(0, start - window + 1) .. end - 1, then the latents
    selection  compressed positions each query attends to, -1 = none (recorded as the second part of ``idx``)
    window     positions of the window part of ``idx``, -1 = none
    window_cache, compress_kv_cache, index_k_cache   rows by position, the filled ones only
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.checkpoint import load_checkpoint, random_input, synthetic_weights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import UsageError
from ds41_tvm.reference.topk import Ties

Array = NDArray[Any]
CACHES = ("window_cache", "compress_kv_cache", "index_k_cache")


class GoldenCase:
    """A case file. `steps[s]` tokens per sequence in step s; `spread` and `selection_differs` as recorded."""

    def __init__(self, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        self.path = path
        self.name = path.name.removesuffix(".npz")
        self.config = AttentionConfig.from_dict(meta["config"])
        self.seed: str = meta["seed"]
        self.batch: int = meta["batch"]
        self.steps: list[int] = meta["steps"]
        self.linear: str = meta.get("linear", "bf16")
        self.ties: Ties = meta.get("ties", "torch-cpu")
        self.spread: dict[str, float] = meta["spread"]
        self.selection_differs: list[str] = meta["selection_differs"]
        self._arrays = arrays

    @cached_property
    def weights(self) -> Mapping[str, Array]:
        """Weights by name: those of the checkpoint directory beside the file if there is one, or by rule."""
        directory = self.path.parent / self.name.split(".")[0]
        if directory.is_dir():
            return load_checkpoint(directory).weights
        return synthetic_weights(self.config, self.seed, linear=self.linear)

    def input(self, layer: int, step: int) -> NDArray[np.uint16]:
        """Input of a layer: bf16 bits [batch, tokens, dim]."""
        return random_input(self.seed, layer, step, self.batch, self.steps[step], self.config.dim)

    def start(self, step: int) -> int:
        """Position of the first token of a step; `start(len(steps))` is the final length."""
        return sum(self.steps[:step])

    def recorded(self) -> Iterator[tuple[str, int, int | None]]:
        """(what, layer, step) of every recorded array, step None = at the end; ``idx`` in its two parts."""
        for name in self._arrays:
            what, layer, *step = name.split(".")
            if what != "idx":
                yield what, int(layer), int(step[0]) if step else None
                continue
            yield "window", int(layer), int(step[0])
            if self.config.compress_ratios[int(layer)] > 0:
                yield "selection", int(layer), int(step[0])

    def get(self, what: str, layer: int, step: int | None = None) -> Array:
        """A recorded array by position, [batch, rows, ...]: the last rows where not all were recorded."""
        if step is None:
            return self._cache(what, layer)
        if what in ("selection", "window"):
            return self._chosen(what, layer, step)
        array = self._arrays[f"{what}.{layer}.{step}"]
        if what == "candidates":
            positions = self.start(step + 1) // self.config.compress_ratios[layer]
            return np.unpackbits(array, axis=-1, count=positions).astype(bool)
        if what == "kv_rows" and step > 0:
            window = self.config.window_size
            return np.concatenate([array[:, self._ring(self.start(step + 1))], array[:, window:]], axis=1)
        return array

    def _ring(self, length: int) -> NDArray[np.int64]:
        """Ring slots of the positions that a window holds after `length` tokens, by position."""
        window = self.config.window_size
        return np.arange(max(0, length - window), length) % window

    def _cache(self, what: str, layer: int) -> Array:
        length, rows = self.start(len(self.steps)), self._arrays[f"{what}.{layer}"][: self.batch]
        if what == "window_cache":
            return rows[:, self._ring(length)]
        return rows[:, : length // self.config.compress_ratios[layer]]

    def _chosen(self, what: str, layer: int, step: int) -> Array:
        idx, window = self._arrays[f"idx.{layer}.{step}"], self.config.window_size
        start = self.start(step)
        # Rows before the compressed ones: the tokens themselves in prefill, the whole ring afterwards.
        rows = self.steps[step] if step == 0 else window
        columns = min(rows, window)
        if what == "selection":
            picks = idx[..., columns:]
            return np.where(picks >= 0, picks - rows, -1)
        slots = idx[..., :columns]
        if step == 0:
            return slots
        return np.where(slots >= 0, start - (start - slots) % window, -1)


def load_case(path: str | Path) -> GoldenCase:
    """Read a case file, such as ``tiny_batch2.npz``. Raises UsageError if it is none."""
    path = Path(path)
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(bytes(arrays.pop("meta")).decode())
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UsageError(
            f"{path} is not a golden case: expected an .npz file with a 'meta' entry ({error})"
        ) from error
    return GoldenCase(path, meta, arrays)
