"""Made-up weights in the kernels' own layout, spread over the device's memory from a small block of the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.artifact.weights import packed_tensors
from ds41_tvm.numerics.formats import bf16_encode
from ds41_tvm.packing import aligned_copy
from ds41_tvm.program import Program
from ds41_tvm.runtime.device import Array, Device
from ds41_tvm.runtime.weights import LayerWeights, norm_sizes

PATTERN = 1 << 20  # bytes that differ; larger tensors repeat them


def made_up_weights(program: Program, layer: int, device: Device, seed: int = 0) -> LayerWeights:
    """Weights of the magnitude of a trained layer's (sums of products near one); the same for equal arguments."""
    rng, role = np.random.default_rng([seed, layer]), program.config.role(layer)
    specs, linears = packed_tensors(program, role), program.linears(role)
    linear = {
        name: tuple(
            _spread(device, specs[f"linear.{name}.{i}"], _pattern(rng, form.weight, form.k, i))
            for i in range(sum(key.rpartition(".")[0] == f"linear.{name}" for key in specs))
        )
        for name, form in linears.items()
    }
    norm = {name: bf16_encode(1 + 0.1 * _uniform(rng, size)) for name, size in norm_sizes(program.config, role).items()}
    sink = 0.5 * _uniform(rng, program.config.n_heads)
    return LayerWeights(linear, {name: _upload(device, array) for name, array in norm.items()}, _upload(device, sink))


def _uniform(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    return rng.uniform(-1, 1, size).astype(np.float32)


def _upload(device: Device, array: NDArray[Any]) -> Array:
    return device.upload(aligned_copy(array))


def _pattern(rng: np.random.Generator, weight: str, k: int, part: int) -> NDArray[np.uint8]:
    """Bytes of weights of inner size k, `part` 1: of the scales of e4m3 weights."""
    scale = math.sqrt(3 / k)
    if part:
        return np.full(PATTERN, 127 + round(math.log2(scale)), np.uint8)
    if weight == "fp8":  # sign, exponents 5 to 6 of bias 7, mantissa: from 0.25 to 0.94; no NaN among them
        codes = rng.integers(0, 256, PATTERN, np.uint8)
        return ((codes & 0x8F) + 0x28).astype(np.uint8)
    if weight == "f32":
        return (scale * _uniform(rng, PATTERN // 4)).view(np.uint8)
    return bf16_encode(scale * _uniform(rng, PATTERN // 2)).view(np.uint8)


def _spread(device: Device, spec: Any, pattern: NDArray[np.uint8]) -> Array:
    """An array of the device that repeats the pattern."""
    out = device.empty(spec.shape, spec.dtype)
    flat = out.reshape(-1).view(np.uint8)
    size, have = int(flat.shape[0]), min(int(flat.shape[0]), len(pattern))
    device.copy(flat[:have], device.upload(np.ascontiguousarray(pattern[:have])))
    while have < size:
        more = min(have, size - have)
        device.copy(flat[have : have + more], flat[:more])
        have += more
    return out


def bits(device: Device, shape: tuple[int, ...], seed: int) -> Array:
    """bf16 bits of the device, uniform in -1.5..1.5."""
    rng = np.random.default_rng(seed)
    return _upload(device, bf16_encode(1.5 * rng.uniform(-1, 1, shape).astype(np.float32)))
