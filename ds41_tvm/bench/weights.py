"""Weights for measurements: right in name, shape, type and scale, random in value, made in a fraction of a second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.checkpoint import TensorSpec, expected_tensors, scale_name, scale_shape
from ds41_tvm.checkpoint.tensors import code_names
from ds41_tvm.config import AttentionConfig, LinearMode


class RandomWeights(Mapping[str, NDArray[Any]]):
    """The tensors of `layers` in the encoding of ``Checkpoint.weights``; made at every look-up, never kept.

    As released checkpoints have them: compressors in bf16; in mode ``fp8`` e4m3 codes with e8m0 scales, those of
    ``wo_a`` beside bf16 values (that are others). Magnitudes are within a factor of four of ``sqrt(3 / in)``, so that
    sums of products are about one.
    """

    def __init__(self, config: AttentionConfig, layers: Iterable[int], linear: LinearMode) -> None:
        self._specs: dict[str, TensorSpec] = {}
        self._codes: dict[str, TensorSpec] = {}
        self._scales: dict[str, TensorSpec] = {}
        for layer in layers:
            for spec in expected_tensors(config, layer):
                grouped = spec.name.endswith(".wo_a.weight")
                if linear == "bf16" or not spec.is_linear or grouped:
                    self._specs[spec.name] = spec
                if linear == "fp8" and spec.is_linear:
                    codes, scales = code_names(spec.name) if grouped else (spec.name, scale_name(spec.name))
                    self._codes[codes] = self._scales[scales] = spec

    def __getitem__(self, name: str) -> NDArray[Any]:
        random = np.random.default_rng(0)
        if name in self._scales:
            shape = scale_shape(self._scales[name].shape)
            return np.full(shape, 127 - 4 - round(math.log2(shape[-1] * 32) / 2), np.uint8)
        if name in self._codes:
            # Sign, an exponent from 7 to 10 of bias 7, mantissa: 1 to 15 before the scale; no NaN among them.
            codes = random.integers(0, 1 << 8, self._codes[name].shape, np.uint8)
            return (codes & 0x9F) + 0x38
        spec = self._specs[name]
        if spec.dtypes == ("F32",):
            return random.standard_normal(spec.shape, np.float32)
        if len(spec.shape) == 1:
            return random.integers(0x3F70, 0x3F90, spec.shape, np.uint16)
        exponent = 126 + round(math.log2(3 / spec.shape[-1]) / 2)
        bits = random.integers(0, 1 << 16, spec.shape, np.uint16)
        return (bits & 0x81FF) + np.uint16((exponent - 2) << 7)

    def __iter__(self) -> Iterator[str]:
        yield from (*self._specs, *self._codes, *self._scales)

    def __len__(self) -> int:
        return len(self._specs) + len(self._codes) + len(self._scales)
