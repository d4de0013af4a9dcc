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

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        start = int(feeds["start_pos"])
        out: dict[str, Array] = {}
        for layer in reference.layers:
            bits = random_input(seed, layer, number, 1, steps[number], config.dim)[0]
            out[f"y.{layer}"] = bf16_decode(reference.forward(layer, bits, start, sequence))[None]
        for name in names:
            if name not in out:
                out[name] = expected(sequence, name)
        return out

    session = Session(run, model_inputs(model))
    folders = []
    for number, count in enumerate(steps):
        x = {n: bf16_decode(random_input(seed, n, number, 1, count, config.dim)) for n in layers}
        feeds = session.feeds(x)
        feeds.update({name: _bits(np.asarray(weights[name])) for name, _, _ in model_inputs(model) if name in weights})
        out = session.step(x)
        folder = path.with_name(path.name + ".sample") / f"test_data_set_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for kind, values, order in (("input", feeds, model.graph.input), ("output", out, model.graph.output)):
            for i, info in enumerate(order):
                tensor = numpy_helper.from_array(values[info.name], info.name)
                (folder / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())
        folders.append(folder)
    return folders


def expected(sequence: Any, name: str) -> Array:
    """What the reference's caches hold for output `name`, [1, rows, ...]."""
    if name == "present_published_key":
        published = sequence.published
        rows = sequence.caches[published].keys if published is not None else np.zeros((0, _key_bytes(sequence)), np.uint8)
        return rows[None]  # type: ignore[no-any-return]
    what, _, layer = name.partition(".")
    cache = sequence.caches[int(layer)]
    if what == "present_window":
        return cache.window[-sequence.config.window_size :][None]  # type: ignore[no-any-return]
    if what == "present_latent":
        return cache.latents[None]  # type: ignore[no-any-return]
    if what == "present_key":
        return cache.keys[None]  # type: ignore[no-any-return]
    if what == "present_members":
        rest = len(cache.latents) * cache.role.ratio
        return np.stack([cache.kv[rest:], cache.gate[rest:]], axis=1)[None]
    chosen = cache.selection if what == "selection" else cache.candidates
    source = sequence.caches[cache.role.kv_source]
    positions = len(source.latents)
    if what == "candidates":
        positions = -(-positions // sequence.config.candidate_block_size)
    return chosen[None, :, :positions].astype(np.int64)  # type: ignore[no-any-return]


def _key_bytes(sequence: Any) -> int:
    cache = next(iter(sequence.caches.values()))
    return int(cache.keys.shape[1])


def _bits(array: Array) -> Array:
    """bf16 bits as ml_dtypes' bfloat16, so that they are written as such."""
    if array.dtype != np.uint16:
        return array
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16)
