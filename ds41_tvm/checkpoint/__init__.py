"""Checkpoints: reading released ones, writing synthetic ones, and the table of what each layer needs."""

from .blocks import dequantize_block, quantize_block
from .load import Checkpoint, load_checkpoint
from .synth import synthetic_weights, write_synthetic
from .tensors import TensorSpec, expected_tensors, scale_name, scale_shape
from .values import golden_value, random_input

__all__ = [
    "Checkpoint",
    "TensorSpec",
    "dequantize_block",
    "expected_tensors",
    "golden_value",
    "load_checkpoint",
    "quantize_block",
    "random_input",
    "scale_name",
    "scale_shape",
    "synthetic_weights",
    "write_synthetic",
]
