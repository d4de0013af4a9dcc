"""Synthetic checkpoints and weights of any configuration, the same bytes every time.

Values follow from their names, see ``values``. In linear mode ``bf16`` the compressor's ``wkv`` and ``wgate``
are float32 where the ratio is above 1, all else is bf16; in ``fp8`` the layout is the released one: e4m3
linears with e8m0 scales, quantised from the float32 values, and bf16 for the rest. ``attn_sink`` is float32
in both.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import AttentionConfig, LinearMode
from ..config_checks import layer_list
from ..config_names import to_text_config
from ..errors import CheckpointError, OutputExists
from ..numerics.formats import bf16_encode
from .blocks import band_rows, dequantize_block, quantize_block
from .lazy import Arrays, LazyWeights
from .safetensors import DTYPE_BITS, ShardWriter
from .shards import INDEX_FILE
from .tensors import BF16, E4M3, E8M0, F32, TensorSpec, code_names, expected_tensors, scale_name, scale_shape
from .values import golden_rows, golden_value

QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}


def _stored(spec: TensorSpec, linear: LinearMode) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, type, shape) of what stands for ``spec`` in a file: the tensor, and an e4m3 one's scale."""
    if spec.is_linear and linear == "fp8":
        return [(spec.name, E4M3, spec.shape), (scale_name(spec.name), E8M0, scale_shape(spec.shape))]
    promoted = F32 in spec.dtypes and (linear == "bf16" or BF16 not in spec.dtypes)
    return [(spec.name, F32 if promoted else BF16, spec.shape)]


def _make_stored(spec: TensorSpec, seed: str, linear: LinearMode) -> Arrays:
    """The arrays of ``_stored``, made in bands of rows: no wide intermediate of a whole weight exists."""
    stored = _stored(spec, linear)
    name, dtype, shape = stored[0]
    if dtype == F32:
        return {name: golden_value(seed, name, shape)}
    columns = shape[-1]
    rows = math.prod(shape) // columns
    step = band_rows(columns)
    arrays: Arrays = {n: np.empty(s, np.uint16 if d == BF16 else np.uint8) for n, d, s in stored}
    main = arrays[name].reshape(rows, columns)
    for top in range(0, rows, step):
        count = min(step, rows - top)
        values = golden_rows(seed, name, shape, top * columns, count * columns).reshape(count, columns)
        if dtype == BF16:
            main[top : top + count] = bf16_encode(values)
        else:
            grid = slice(top // 32, -(-(top + count) // 32))
            main[top : top + count], arrays[scale_name(name)][grid] = quantize_block(values)
    return arrays


def _make_given(spec: TensorSpec, seed: str, linear: LinearMode) -> Arrays:
    """As ``load_checkpoint`` would hand on what ``write_synthetic`` writes: ``wo_a`` in bf16, and its codes."""
    arrays = _make_stored(spec, seed, linear)
    if len(arrays) == 2 and spec.name.endswith(".wo_a.weight"):
        stored = arrays[spec.name], arrays[scale_name(spec.name)]
        return {spec.name: dequantize_block(*stored), **dict(zip(code_names(spec.name), stored, strict=True))}
    return arrays


def synthetic_weights(
    config: AttentionConfig, seed: str, layers: Iterable[int] | None = None, linear: str = "bf16"
) -> Mapping[str, NDArray[Any]]:
    """Weights of ``layers`` by name, made when asked for: the encoding of ``Checkpoint.weights``.

    They are the weights of the golden case with this ``config`` and ``seed``. Raises ``ConfigError``.
    """
    mode = config.check_linear(linear)
    makers = {}
    for layer in _layers(config, layers):
        for spec in expected_tensors(config, layer):
            names = [name for name, _, _ in _stored(spec, mode)]
            if spec.name.endswith(".wo_a.weight") and len(names) == 2:
                names = [spec.name, *code_names(spec.name)]
            for name in names:
                makers[name] = partial(_make_given, spec, seed, mode)
    return LazyWeights(makers)


def write_synthetic(
    config: AttentionConfig,
    directory: str | os.PathLike[str],
    linear: str = "fp8",
    seed: str = "synthetic",
    layers: Iterable[int] | None = None,
    shard_bytes: int = 1 << 30,
    overwrite: bool = False,
) -> Path:
    """Writes a checkpoint of ``layers`` (``None``: all) in the released layout and returns its directory.

    ``config.json``, the index, and shards of about ``shard_bytes`` each (a larger tensor has a shard of its
    own). It is written into a temporary folder beside ``directory`` and renamed when complete; one weight at
    a time is in memory. Raises ``OutputExists`` if ``directory`` holds something, unless ``overwrite`` is
    given and it holds nothing but a checkpoint; ``ConfigError``; ``CheckpointError`` if the disk refuses.
    """
    mode = config.check_linear(linear)
    specs = [spec for layer in _layers(config, layers) for spec in expected_tensors(config, layer)]
    target = Path(directory).absolute()
    _check_target(target, overwrite)
    partial_dir: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial_dir = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        _write_files(partial_dir, config, specs, seed, mode, shard_bytes)
        _put_in_place(partial_dir, target)
    except OSError as exc:
        raise CheckpointError(f"{target}: cannot be written ({exc.strerror or exc})") from None
    finally:
        if partial_dir is not None:
            shutil.rmtree(partial_dir, ignore_errors=True)
    return Path(directory)


def _layers(config: AttentionConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    return tuple(range(config.n_layers)) if layers is None else layer_list(layers, config.n_layers)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise OutputExists(f"{target}: exists and is not a plain directory; expected a new or empty directory")
    others = [p.name for p in target.iterdir() if not _is_ours(p)]
    if others:
        raise OutputExists(f"{target}: holds {_some(others)}; expected a new or empty directory")
    if any(target.iterdir()) and not overwrite:
        raise OutputExists(f"{target}: holds a checkpoint already; choose another directory or pass overwrite")


def _is_ours(path: Path) -> bool:
    return path.is_file() and (path.name in ("config.json", INDEX_FILE) or path.suffix == ".safetensors")


def _some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)[:3]) + (" ..." if len(names) > 3 else "")


def _put_in_place(partial_dir: Path, target: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    partial_dir.chmod(0o777 & ~mask)  # a temporary folder is private, a result is not
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        os.replace(target, old)  # a directory may replace an empty one
        try:
            os.replace(partial_dir, target)
        except OSError:
            os.replace(old, target)
            raise
        shutil.rmtree(old)
    else:
        os.replace(partial_dir, target)


def _write_files(
    folder: Path,
    config: AttentionConfig,
    specs: list[TensorSpec],
    seed: str,
    mode: LinearMode,
    shard_bytes: int,
) -> None:
    shards = _split(specs, mode, shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, members in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored = [tensor for spec in members for tensor in _stored(spec, mode)]
        writer = ShardWriter(folder / file, stored)
        try:
            for spec in members:
                for name, array in _make_stored(spec, seed, mode).items():
                    writer.put(name, array)
                    weight_map[name] = file
            writer.close()
        finally:
            writer.abort()
        total += sum(map(_bytes, stored))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)
    released: dict[str, Any] = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
    released["dtype"] = "bfloat16"
    if mode == "fp8":
        released["quantization_config"] = QUANTIZATION
    released["text_config"] = to_text_config(config.to_dict())
    _write_json(folder / "config.json", released)


def _split(specs: list[TensorSpec], mode: LinearMode, shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = sum(map(_bytes, _stored(spec, mode)))  # a weight and its scale stay together
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= size
    return shards


def _bytes(tensor: tuple[str, str, tuple[int, ...]]) -> int:
    return DTYPE_BITS[tensor[1]] // 8 * math.prod(tensor[2])


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
