"""`write_sample`: inputs and expected outputs of some calls as files, in the layout of ONNX's own tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ds41_tvm.checkpoint import random_input
from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics.formats import bf16_decode
from ds41_tvm.onnx_export.engines import model_inputs
from ds41_tvm.onnx_export.outside import expected
from ds41_tvm.onnx_export.play import Array, Session
from ds41_tvm.reference.layer import Reference


def write_sample(
    path: Path,
    config: AttentionConfig,
    weights: Mapping[str, Any],
    layers: Sequence[int],
    linear: str,
    keys: str = "own",
    steps: Sequence[int] = (12, 1),
    seed: str = "sample",
) -> list[Path]:
    """Folders ``test_data_set_{i}`` in ``{path}.sample``, one per call: ``input_{n}.pb``, ``output_{n}.pb``.

    n counts the model's inputs and outputs in order. The expected outputs are those of the NumPy reference; later
    calls are fed with its caches. `layers` hold their sources (ConfigError if not).
    """
    model = onnx.load(str(path), load_external_data=False)
    reference = Reference(config, weights, layers, linear, keys=keys)  # type: ignore[arg-type]
    sequence = reference.new_sequence()
    names = [value.name for value in model.graph.output]

    inputs = model_inputs(model)
    session = Session(inputs)
    folders = []
    for number, count in enumerate(steps):
        bits = {layer: random_input(seed, layer, number, 1, count, config.dim) for layer in reference.layers}
        feeds = session.feeds({layer: bf16_decode(x) for layer, x in bits.items()})
        feeds.update({name: _bits(np.asarray(weights[name])) for name, _, _ in inputs if name in weights})
        out: dict[str, Array] = {}
        for layer, x in bits.items():
            y = reference.forward(layer, x[0], session.length, sequence)
            out[f"y.{layer}"] = bf16_decode(y)[None]
        out.update({name: expected(sequence, name)[None] for name in names if name not in out})
        session.advance(out, count)
        folder = path.with_name(path.name + ".sample") / f"test_data_set_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for kind, values, order in (("input", feeds, model.graph.input), ("output", out, model.graph.output)):
            for i, info in enumerate(order):
                tensor = numpy_helper.from_array(np.ascontiguousarray(values[info.name]), info.name)
                (folder / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())
        folders.append(folder)
    return folders


def _bits(array: Array) -> Array:
    """bf16 bits as ml_dtypes' bfloat16, so that they are written as such."""
    if array.dtype != np.uint16:
        return array
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16)
