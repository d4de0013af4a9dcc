"""One layer's weights as its kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig, LayerRole
from ds41_tvm.errors import MissingTensor, WrongDtype, WrongShape
from ds41_tvm.packing import aligned_copy, pack_linear
from ds41_tvm.program import Linear, Program
from ds41_tvm.runtime.arrays import as_array
from ds41_tvm.runtime.device import Device

_DTYPES = {"bf16": "uint16", "fp8": "uint8", "f32": "float32"}


@dataclass(frozen=True)
class LayerWeights:
    """`linear[name]`: packed arrays (fp8: weight and scales); `norm[name]`: bf16 bits; `sink`: f32 [n_heads]."""

    linear: dict[str, tuple[NDArray[Any], ...]]
    norm: dict[str, NDArray[np.uint16]]
    sink: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [a for packed in self.linear.values() for a in packed] + [*self.norm.values(), self.sink]
        return sum(a.nbytes for a in arrays)


def pack_layer(program: Program, role: LayerRole, weights: Mapping[str, Any]) -> LayerWeights:
    """Pack ``layers.{l}.attn.*`` of `weights`: bf16 as uint16 bits, e4m3 as uint8 with ``.scale`` beside, f32.

    Arrays may be what `runtime.arrays.as_array` takes: NumPy, ml_dtypes, anything with DLPack. Raises MissingTensor,
    WrongShape or WrongDtype naming the tensor and the layer's role.
    """
    c = program.config
    reader = _Reader(weights, role)
    norms = norm_sizes(c, role)
    return LayerWeights(
        {name: _pack(reader, name, linear) for name, linear in program.linears(role).items()},
        {name: aligned_copy(reader.get(f"{name}.weight", (size,), "uint16")) for name, size in norms.items()},
        aligned_copy(reader.get("attn_sink", (c.n_heads,), "float32")),
    )


def to_device(weights: LayerWeights, device: Device) -> LayerWeights:
    """The same weights in the memory of a device; what lies there already stays."""
    if device.on_host:
        return weights

    def move(array: Any) -> Any:
        return device.upload(array) if isinstance(array, np.ndarray) else array

    return LayerWeights(
        {name: tuple(map(move, packed)) for name, packed in weights.linear.items()},
        {name: move(array) for name, array in weights.norm.items()},
        move(weights.sink),
    )


def norm_sizes(config: AttentionConfig, role: LayerRole) -> dict[str, int]:
    """Lengths of a layer's norm weights by official name."""
    norms = {"q_norm": config.q_lora_rank, "kv_norm": config.head_dim}
    if role.kind == "full":
        norms |= {"compressor.norm": config.head_dim, "indexer.k_norm": config.index_head_dim}
    return norms


class _Reader:
    def __init__(self, weights: Mapping[str, Any], role: LayerRole) -> None:
        self.weights, self.role = weights, role

    def get(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        full = f"layers.{self.role.layer}.attn.{name}"
        if full not in self.weights:
            raise MissingTensor(f"tensor {full} is missing; layer {self.role.layer} ({self.role.kind}) needs it")
        array, name_of_type = as_array(self.weights[full], f"tensor {full}")
        if array.shape != shape:
            raise WrongShape(
                f"tensor {full} has shape {tuple(array.shape)}; layer {self.role.layer} ({self.role.kind}) "
                f"needs {shape}"
            )
        if array.dtype != np.dtype(dtype):
            raise WrongDtype(f"tensor {full} is {name_of_type}; expected {dtype} ({_MEANING[dtype]})")
        return array


_MEANING = {"uint16": "bf16 bits", "uint8": "e4m3 codes or e8m0 scales", "float32": "float32"}


def _pack(reader: _Reader, name: str, linear: Linear) -> tuple[NDArray[Any], ...]:
    # The codes of wo_a have names of their own, see `load_checkpoint`.
    codes, scales = ("e4m3", "e8m0") if name == "wo_a" and linear.weight == "fp8" else ("weight", "scale")
    weight = reader.get(f"{name}.{codes}", (linear.n, linear.k), _DTYPES[linear.weight])
    if linear.weight != "fp8":
        return pack_linear(linear, weight)
    scale = reader.get(f"{name}.{scales}", (-(-linear.n // 32), -(-linear.k // 32)), "uint8")
    return pack_linear(linear, weight, scale)
