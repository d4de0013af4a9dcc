"""ONNX Runtime as a contestant of `bench.layers`: the exported layers, one session each. Needs the extra ``onnx``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import UsageError
from ds41_tvm.numerics.formats import bf16_decode

Array = NDArray[Any]
_TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}


class Onnx:
    """Layers in ONNX Runtime's CPU provider. What a source leaves in a step is handed to its consumers' sessions.

    Raises UsageError if onnxruntime is not installed.
    """

    def __init__(
        self, config: AttentionConfig, weights: Mapping[str, Any], layers: Iterable[int], linear: str, threads: int,
        folder: Path,
    ) -> None:  # fmt: skip
        try:
            import onnxruntime
        except ImportError:
            raise UsageError("--against onnxruntime needs the extra onnx: pip install 'ds41-tvm[onnx]'") from None
        from ds41_tvm.onnx_export.export import export_onnx

        self._sessions: dict[int, Any] = {}
        for layer in layers:
            path = folder / f"layer-{layer}.onnx"
            export_onnx(config, weights, path, [layer], linear, weights_as="external")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            self._sessions[layer] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._past: dict[int, dict[str, Array]] = {}
        self._left: dict[str, Array] = {}
        self._position = self._tokens = 0

    def begin(self) -> None:
        self._position = 0
        self._past = {
            layer: {
                i.name: np.zeros([1, *(d if isinstance(d, int) else 0 for d in i.shape[1:])], _TYPES[i.type])
                for i in session.get_inputs()
                if i.name.startswith("past_")
            }
            for layer, session in self._sessions.items()
        }

    def start(self, tokens: int) -> None:
        self._tokens = tokens
        self._left = {}

    def run(self, layer: int, x: Array) -> None:
        session, past = self._sessions[layer], self._past[layer]
        feeds = {**past, f"x.{layer}": bf16_decode(x)[None], "start_pos": np.array(self._position, np.int64)}
        wanted = {i.name for i in session.get_inputs()}
        feeds |= {name: array for name, array in self._left.items() if name in wanted}
        names = [o.name for o in session.get_outputs()]
        out = dict(zip(names, session.run(names, feeds), strict=True))
        self._left |= out
        self._past[layer] = {name: out["present_" + name.removeprefix("past_")] for name in past}

    def end(self) -> None:
        self._position += self._tokens
