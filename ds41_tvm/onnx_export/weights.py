"""Weights as initialisers: in the file, beside it, or as graph inputs; and back as they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from ds41_tvm.checkpoint.blocks import dequantize_block
from ds41_tvm.checkpoint.tensors import E4M3, F32, TensorSpec, expected_tensors, scale_name, scale_shape
from ds41_tvm.config import FP8_LINEARS, AttentionConfig
from ds41_tvm.errors import MissingTensor, WrongDtype, WrongShape

Array = NDArray[Any]
_TYPES = {"uint16": TensorProto.BFLOAT16, "uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT}
_ALIGN = 4096  # offsets that a page can be mapped at
# protobuf refuses messages of 2 GiB; the nodes need some room.
INLINE_LIMIT = (1 << 31) - (1 << 26)


class LayerWeights:
    """The checked weights of some layers, by official name, made one after the other.

    uint16 = bf16 bits, uint8 = e4m3 codes (with e8m0 ``.scale``), float32. In linear mode ``bf16`` e4m3 weights
    are dequantised. Raises MissingTensor, WrongShape, WrongDtype.
    """

    def __init__(
        self, config: AttentionConfig, layers: Iterable[int], linear: str, given: Mapping[str, Any] | None
    ) -> None:
        self._given = given
        self._linear = linear
        self._specs: dict[str, TensorSpec] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            for spec in expected_tensors(config, layer):
                self._specs[spec.name] = spec
                self.shapes[spec.name] = spec.shape
                if self._is_fp8(spec):
                    name = scale_name(spec.name)
                    self._specs[name] = spec
                    self.shapes[name] = scale_shape(spec.shape)

    def _is_fp8(self, spec: TensorSpec) -> bool:
        short = spec.name.split(".attn.")[1].removesuffix(".weight")
        return self._linear == "fp8" and spec.is_linear and short in FP8_LINEARS

    def get(self, name: str) -> Array:
        """One weight, checked."""
        spec = self._specs[name]
        array = self._array(name)
        if self._is_fp8(spec):
            wanted: tuple[str, ...] = ("uint8",)
        else:
            wanted = ("float32",) if spec.name.endswith("attn_sink") else ("uint16", "float32")
            if array.dtype == np.uint8 and E4M3 in spec.dtypes:
                array = dequantize_block(array, self._array(scale_name(name)))
        if array.dtype.name not in wanted:
            raise WrongDtype(
                f"tensor {name!r} has dtype {array.dtype}; expected {' or '.join(wanted)} in linear mode "
                f"{self._linear!r}"
            )
        if array.shape != self.shapes[name]:
            raise WrongShape(f"tensor {name!r} has shape {array.shape}; expected {self.shapes[name]}")
        return np.ascontiguousarray(array)

    def _array(self, name: str) -> Array:
        try:
            array = np.asarray((self._given or {})[name])
        except KeyError:
            raise MissingTensor(f"tensor {name!r} is missing; linear mode {self._linear!r} needs it") from None
        return array.view(np.uint16) if array.dtype.name == "bfloat16" else array

    def dtype(self, name: str) -> int:
        """ONNX element type of a weight when it is to be a graph input: as given, else as released."""
        spec = self._specs[name]
        if F32 in spec.dtypes and self._given is not None and name in self._given:
            return int(_TYPES[self._array(name).dtype.name])
        if self._is_fp8(spec):
            return int(TensorProto.UINT8)
        return int(TensorProto.FLOAT if name.endswith("attn_sink") else TensorProto.BFLOAT16)

    def release(self) -> None:
        """Let go of what the source of the weights keeps once it was asked for."""
        free = getattr(self._given, "release", None)
        if callable(free):
            free()


class Digest:
    """sha256 over names, types, shapes and bytes of the weights that went into a file."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, array: Array) -> None:
        """One more weight."""
        self._hash.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        self._hash.update(array.reshape(-1).view(np.uint8).data)

    def text(self) -> str:
        """``sha256:`` and the hash."""
        return "sha256:" + self._hash.hexdigest()


def inline(weights: LayerWeights, names: Iterable[str], digest: Digest, model: onnx.ModelProto) -> int:
    """Add initialisers that hold their values to the model; bytes added."""
    total = 0
    for name in names:
        array = weights.get(name)
        digest.add(name, array)
        _header(model, name, array).raw_data = array.tobytes()
        total += array.nbytes
        del array
        weights.release()
    return total


def external(
    weights: LayerWeights, names: Iterable[str], digest: Digest, model: onnx.ModelProto, file: Path, location: str
) -> int:
    """Add initialisers whose values are written to `file`, named by `location` (relative to the model); its size."""
    with file.open("wb") as out:
        for name in names:
            array = weights.get(name)
            digest.add(name, array)
            out.write(bytes(-out.tell() % _ALIGN))
            tensor = _header(model, name, array)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", out.tell()), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            out.write(array.reshape(-1).view(np.uint8).data)
            del array
            weights.release()
        out.flush()
        os.fsync(out.fileno())
        return out.tell()


def _header(model: onnx.ModelProto, name: str, array: Array) -> TensorProto:
    tensor = model.graph.initializer.add(name=name, data_type=_TYPES[array.dtype.name])
    tensor.dims.extend(array.shape)
    return tensor


def read_weights(model: onnx.ModelProto, folder: Path) -> dict[str, Array]:
    """The weights of an exported model by official name, as they were given; external ones are mapped."""
    names = {number: np.dtype(name) for name, number in _TYPES.items()}
    found: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        if ".attn." not in tensor.name:
            continue
        dtype = names.get(tensor.data_type)
        if dtype is None:
            raise ValueError(f"{tensor.name} has the ONNX element type {tensor.data_type}")
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            found[tensor.name] = np.memmap(
                folder / entries["location"], dtype, "r", int(entries["offset"]), tuple(tensor.dims)
            )
        elif tensor.raw_data:
            found[tensor.name] = np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims))
        else:
            found[tensor.name] = numpy_helper.to_array(tensor).view(dtype)
    return found
