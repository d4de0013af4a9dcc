"""ONNX Runtime as a contestant: the exported layers, one session each. Needs the extra ``onnx``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.bench.cases import Timing
from ds41_tvm.bench.fill import random_rows
from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.errors import UsageError

Array = NDArray[Any]
_TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}


class Onnx:
    """Layers in ONNX Runtime's CPU provider. What a source leaves in a step is handed to its consumers' sessions.

    Raises UsageError if onnxruntime is not installed.
    """

    def __init__(
        self, config: AttentionConfig, weights: Mapping[str, Any], layers: Iterable[int], threads: int
    ) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UsageError("--against onnxruntime needs the extra onnx: pip install 'ds41-tvm[onnx]'") from None
        from ds41_tvm.onnx_export.export import export_onnx

        self.config, self.layers = config, closure(config, layers)
        self._random = np.random.default_rng(0)
        self._folder = tempfile.TemporaryDirectory(prefix="ds41-tvm-")
        self._sessions: dict[int, Any] = {}
        for layer in self.layers:
            path = Path(self._folder.name) / f"layer-{layer}.onnx"
            export_onnx(config, weights, path, [layer], "bf16", weights_as="external")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            # Threads that go on spinning would slow down whoever is measured next.
            options.add_session_config_entry("session.force_spinning_stop", "1")
            self._sessions[layer] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._past: dict[int, dict[str, Array]] = {}
        self._position = 0
        self._x = np.zeros(0, np.float32)

    def prefill(self, tokens: int, chunk: int) -> Timing:
        """A prompt, `chunk` tokens a call."""
        self._position, self._past = 0, {layer: self._caches(layer, 0, 1) for layer in self.layers}
        x = self._input(1, tokens)
        total = Timing(dict.fromkeys(self.layers, 0.0))
        for first in range(0, tokens, chunk):
            for layer, seconds in self._run(x[:, first : first + chunk]).layers.items():
                total.layers[layer] += seconds
        return total

    def prepare(self, context: int, batch: int) -> int:
        """Caches as after context - 1 tokens of each of `batch` sequences, filled with plausible packed rows."""
        self._position = context - 1
        self._past = {layer: self._caches(layer, context - 1, batch) for layer in self.layers}
        self._x = self._input(batch, 1)
        return context

    def decode(self) -> Timing:
        """One more token for each sequence."""
        return self._run(self._x)

    def single(self, what: str, sizes: dict[str, int], times: int) -> list[float]:
        """Nothing: a session runs whole layers."""
        del what, sizes, times
        return []

    def _input(self, batch: int, tokens: int) -> Array:
        return self._random.standard_normal((batch, tokens, self.config.dim), np.float32)

    def _caches(self, layer: int, tokens: int, batch: int) -> dict[str, Array]:
        """The packed caches of `tokens` tokens by input name, see the ONNX section of the README."""
        c, role = self.config, self.config.role(layer)
        ratio = max(role.ratio, 1)
        rows = {"window": min(tokens, c.window_size), "members": tokens % ratio}
        out = {}
        for i in self._sessions[layer].get_inputs():
            if not i.name.startswith("past_"):
                continue
            kind = i.name.removeprefix("past_").partition(".")[0]
            count = rows.get(kind, tokens // ratio)
            tail = [d for d in i.shape[2:] if isinstance(d, int)]
            made = random_rows(c, self._random, kind, batch * count)
            out[i.name] = np.ascontiguousarray(made.reshape(batch, count, *tail).astype(_TYPES[i.type], copy=False))
        return out

    def _run(self, x: Array) -> Timing:
        times: dict[int, float] = {}
        left: dict[str, Array] = {}
        for layer, session in self._sessions.items():
            past = self._past[layer]
            wanted = {i.name for i in session.get_inputs()}
            feeds = {**past, f"x.{layer}": x, "start_pos": np.array(self._position, np.int64)}
            feeds |= {name: array for name, array in left.items() if name in wanted}
            names = [o.name for o in session.get_outputs()]
            start = time.perf_counter()
            out = dict(zip(names, session.run(names, feeds), strict=True))
            times[layer] = time.perf_counter() - start
            left |= out
            self._past[layer] = {name: out["present_" + name.removeprefix("past_")] for name in past}
        self._position += x.shape[1]
        return Timing(times)
