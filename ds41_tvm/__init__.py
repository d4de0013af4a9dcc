"""DeepSeek-V4.1 attention as compiled TVM TensorIR.

    config = ds41_tvm.AttentionConfig.preset("tiny")
    weights = ds41_tvm.synthetic_weights(config, "seed")
    runner = ds41_tvm.build(config, weights)
    sequence = runner.new_sequence()
    step = runner.step([(sequence, 12)])
    out = {layer: runner.forward(layer, x[layer], step) for layer in runner.layers}
    runner.commit(step)

Nothing heavy is imported before it is used: `build` and `compile` load TVM's compiler, `load` only its runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "ds41_tvm.artifact.load",
    "AttentionConfig": "ds41_tvm.config",
    "LayerRole": "ds41_tvm.config",
    "Ds41Error": "ds41_tvm.errors",
    "Reference": "ds41_tvm.reference.layer",
    "Runner": "ds41_tvm.runtime.runner",
    "Sequence": "ds41_tvm.runtime.state",
    "Step": "ds41_tvm.runtime.step",
    "build": "ds41_tvm.api",
    "compile": "ds41_tvm.compiler.artifact",
    "export_onnx": "ds41_tvm.onnx_export.export",
    "load": "ds41_tvm.artifact.load",
    "load_checkpoint": "ds41_tvm.checkpoint",
    "open_artifact": "ds41_tvm.artifact.load",
    "parse_target": "ds41_tvm.target",
    "random_input": "ds41_tvm.checkpoint",
    "synthetic_weights": "ds41_tvm.checkpoint",
    "verify_onnx": "ds41_tvm.onnx_export.verify",
    "write_synthetic": "ds41_tvm.checkpoint",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from ds41_tvm.api import build
    from ds41_tvm.artifact.load import Artifact, load, open_artifact
    from ds41_tvm.checkpoint import load_checkpoint, random_input, synthetic_weights, write_synthetic
    from ds41_tvm.compiler.artifact import compile
    from ds41_tvm.config import AttentionConfig, LayerRole
    from ds41_tvm.errors import Ds41Error
    from ds41_tvm.onnx_export.export import export_onnx
    from ds41_tvm.onnx_export.verify import verify_onnx
    from ds41_tvm.reference.layer import Reference
    from ds41_tvm.runtime.runner import Runner
    from ds41_tvm.runtime.state import Sequence
    from ds41_tvm.runtime.step import Step
    from ds41_tvm.target import parse_target


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
