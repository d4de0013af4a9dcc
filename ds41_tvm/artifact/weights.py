"""Packed weights of one layer as tensors of a file, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import LayerRole
from ds41_tvm.errors import BadWeightFile
from ds41_tvm.packed_file import PackedFile, Spec
from ds41_tvm.program import Linear, Program
from ds41_tvm.runtime.weights import LayerWeights, norm_sizes
from ds41_tvm.strict_json import short


def packed_tensors(program: Program, role: LayerRole) -> dict[str, Spec]:
    """Names, types and shapes in the file of a layer: the kernels' own layout, see `packing.pack_linear`."""
    out: dict[str, Spec] = {}
    for name, linear in program.linears(role).items():
        for i, spec in enumerate(_linear(linear)):
            out[f"linear.{name}.{i}"] = spec
    for name, size in norm_sizes(program.config, role).items():
        out[f"norm.{name}"] = Spec(np.dtype(np.uint16), (size,))
    out["attn_sink"] = Spec(np.dtype(np.float32), (program.config.n_heads,))
    return out


def _linear(linear: Linear) -> tuple[Spec, ...]:
    tiles, words = linear.n // linear.tile, linear.k if linear.weight == "f32" else -(-linear.k // 2)
    dtype = {"bf16": np.uint32, "fp8": np.uint16, "f32": np.float32}[linear.weight]
    packed = Spec(np.dtype(dtype), (tiles, words, linear.tile))
    if linear.weight != "fp8":
        return (packed,)
    return packed, Spec(np.dtype(np.uint8), (-(-linear.n // 32), -(-linear.k // 32)))


def metadata(program: Program, role: LayerRole) -> dict[str, str]:
    """What the file says of itself: two layers of one shape can be told apart."""
    return {"format": "ds41-tvm weights", "config": program.config.digest(), "layer": str(role.layer)}


def as_tensors(weights: LayerWeights) -> dict[str, NDArray[Any]]:
    """The arrays of a layer by their names in the file."""
    out = {f"linear.{name}.{i}": a for name, arrays in weights.linear.items() for i, a in enumerate(arrays)}
    out |= {f"norm.{name}": array for name, array in weights.norm.items()}
    return {**out, "attn_sink": weights.sink}


def from_file(file: PackedFile, program: Program, role: LayerRole) -> LayerWeights:
    """A layer's weights as views of a mapped file. Raises BadWeightFile if they are another's, or not just these."""
    for name, mine in metadata(program, role).items():
        if (its := file.metadata.get(name)) != mine:
            raise BadWeightFile(f"{file.path}: {name} is {short(its)}; expected {mine!r}; compile the artefact again")
    file.check(packed_tensors(program, role))
    return LayerWeights(
        {
            name: tuple(file.tensor(f"linear.{name}.{i}") for i in range(len(_linear(linear))))
            for name, linear in program.linears(role).items()
        },
        {name: file.tensor(f"norm.{name}") for name in norm_sizes(program.config, role)},
        file.tensor("attn_sink"),
    )
