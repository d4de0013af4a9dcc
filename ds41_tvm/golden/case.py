"""One recorded case: sizes, steps, weights and inputs by the naming rule, recorded arrays by position.

The files hold the official layout, where a decode step lists its window rows by ring slot and prefill by
position. Here every array is by position, so that one form serves any way of feeding the tokens:

    kv_rows    window rows of positions max(0, start - window + 1) .. end - 1, then the latents
    selection  compressed positions each query attends to, -1 = none (recorded as the second part of ``idx``)
    window     positions of the window part of ``idx``, -1 = none
    window_cache, compress_kv_cache, index_k_cache   rows by position, the filled ones only

Weights and inputs follow from their names; a file may also hold some of them, ``x.{layer}.{step}`` (bf16 bits
[batch, tokens, dim]) or a weight under its official name, which then takes the place of the rule's.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.checkpoint import load_checkpoint, random_input, synthetic_weights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError, UsageError
from ds41_tvm.reference.topk import TOPK, Ties

Array = NDArray[Any]
CACHES = ("window_cache", "compress_kv_cache", "index_k_cache")
PER_STEP = (
    "qr", "q", "kv_rows", "idx", "latent_pre_rope", "index_q", "index_weights", "index_score", "candidates", "o", "out",
)  # fmt: skip
GIVEN = ("x", "layers")  # first words of the names of inputs and weights


class GoldenCase:
    """A case file. `steps[s]` tokens per sequence in step s; `spread` and `selection_differs` as recorded."""

    def __init__(self, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        self.path = path
        self.name = path.name.removesuffix(".npz")
        self.config = AttentionConfig.from_dict(meta["config"])
        self.seed: str = meta["seed"]
        self.batch: int = meta["batch"]
        self.steps: list[int] = meta["steps"]
        self.linear: Literal["bf16", "fp8"] = meta.get("linear", "bf16")
        self.ties: Ties = meta.get("ties", "torch-cpu")
        self.spread: dict[str, float] = meta.get("spread", {})
        self.selection_differs: list[str] = meta.get("selection_differs", [])
        kinds = {name: name.split(".")[0] for name in arrays}
        self._arrays = {name: array for name, array in arrays.items() if kinds[name] in (*PER_STEP, *CACHES)}
        self._given = {name: array for name, array in arrays.items() if kinds[name] in GIVEN}

    @cached_property
    def weights(self) -> Mapping[str, Array]:
        """Weights by name: those of the checkpoint directory beside the file if there is one, or by rule."""
        directory = self.path.parent / self.name.split(".")[0]
        if directory.is_dir():
            weights = load_checkpoint(directory).weights
        else:
            weights = synthetic_weights(self.config, self.seed, linear=self.linear)
        return ChainMap(self._given, weights) if self._given else weights  # type: ignore[arg-type]

    def input(self, layer: int, step: int) -> NDArray[np.uint16]:
        """Input of a layer: bf16 bits [batch, tokens, dim]."""
        if f"x.{layer}.{step}" in self._given:
            return self._given[f"x.{layer}.{step}"]
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
    """Read a case file, such as ``tiny_batch2.npz``. Raises UsageError if it is none, or contradicts itself."""
    return case_from(Path(path), read_arrays(Path(path)))


def case_from(path: Path, arrays: dict[str, Array]) -> GoldenCase:
    """The case whose file `path` holds `arrays`. Raises UsageError as `load_case` does."""
    if "meta" not in arrays:
        raise UsageError(f"{path} is not a golden case: it has no entry 'meta'; expected one with JSON text")
    try:
        meta = json.loads(bytes(arrays.pop("meta")).decode())
        _check_meta(meta)
        case = GoldenCase(path, meta, arrays)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a golden case: its entry 'meta' is not as expected: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check_arrays(case, arrays)
    return case


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an ``.npz`` file by name. Raises UsageError if it is none, or damaged."""
    try:
        file = np.load(path)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise UsageError(f"{path} is not an .npz file: it holds a single array; expected several with names")
        with file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise UsageError(f"{path} is not a golden case: expected an .npz file ({error})") from error


def _check_meta(meta: Any) -> None:
    """Raises KeyError, TypeError or ValueError saying what is wrong with the description of a case."""
    if not isinstance(meta, dict):
        raise TypeError(f"it is a {type(meta).__name__}; expected an object")
    missing = [name for name in ("config", "seed", "batch", "steps") if name not in meta]
    if missing:
        raise ValueError(f"{', '.join(missing)} not given")
    if not isinstance(meta["seed"], str):
        raise TypeError(f"seed {meta['seed']!r}; expected text")
    steps = meta["steps"]
    if not isinstance(steps, list) or not steps:
        raise TypeError(f"steps {steps!r}; expected a list of tokens per call")
    for name, value in (("batch", meta["batch"]), *(("steps", tokens) for tokens in steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r}; expected an integer of at least 1")
    if any(tokens != 1 for tokens in steps[1:]):
        raise ValueError(f"steps {steps}; expected the prompt, then 1 for every decoded token")
    if meta.get("ties", "torch-cpu") not in TOPK:
        raise ValueError(f"ties {meta['ties']!r}; expected one of {', '.join(TOPK)}")
    if meta.get("linear", "bf16") not in ("bf16", "fp8"):
        raise ValueError(f"linear {meta['linear']!r}; expected bf16 or fp8")
    for name, kind in (("spread", dict), ("selection_differs", list)):
        if not isinstance(meta.get(name, kind()), kind):
            raise TypeError(f"{name} {meta[name]!r}; expected a {kind.__name__}")


def _check_arrays(case: GoldenCase, arrays: Mapping[str, Array]) -> None:
    total = sum(case.steps)
    if total > case.config.max_seq_len:
        most = case.config.max_seq_len
        raise UsageError(f"{case.path}: {total} tokens in steps exceed max_seq_len {most} of its config")
    limits = (case.config.n_layers, len(case.steps))
    for name, array in arrays.items():
        what, *rest = name.split(".")
        count = 1 if what in CACHES else 2 if what in (*PER_STEP, "x") else None
        if count is None:
            continue  # a weight, or something that later versions record
        numbers = [int(word) if word.isdecimal() else -1 for word in rest]
        if len(rest) != count or not all(0 <= n < limit for n, limit in zip(numbers, limits, strict=False)):
            raise UsageError(
                f"{case.path}: array {name!r} belongs to none of {limits[0]} layers and {limits[1]} steps; expected "
                "names such as out.0.0 or window_cache.0"
            )
        if what != "x":
            continue
        shape = (case.batch, case.steps[numbers[1]], case.config.dim)
        if array.dtype != np.uint16 or array.shape != shape:
            raise UsageError(
                f"{case.path}: array {name!r} is {array.dtype} {array.shape}; expected bf16 bits (uint16) {shape}"
            )
