"""Checks of an ``AttentionConfig``: types, sizes that the number formats hold, layer roles that fit."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, cast

from .errors import ConfigError
from .strict_json import short

if TYPE_CHECKING:
    from .config import AttentionConfig

MAX_SIZE = 2**31 - 1  # sizes and products of sizes are 32-bit in the kernels; offsets are 64-bit
MIN_NORMAL_F32, MAX_F32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
FP4_FP8_BLOCK = 32  # window rows and index keys carry one scale per 32 values (latents: per 16)

_LISTS = ("compress_ratios", "kv_source_layers", "index_source_layers")
_FLOATS = ("rope_theta", "compress_rope_theta", "rope_factor", "beta_fast", "beta_slow", "norm_eps")
_MAY_BE_ZERO_WITHOUT_CANDIDATES = ("candidate_topk_blocks", "candidate_block_size")


def integer(value: Any, path: str) -> int:
    """``value`` as int; raises ``ConfigError`` for anything but an integer (a bool is none) below 2^31."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{path}: {short(value)} is a {type(value).__name__}; expected an integer")
    number = int(value)
    if abs(number) > MAX_SIZE:
        raise ConfigError(f"{path}: {short(number)} is out of range; expected an integer below 2^31")
    return number


def real(value: Any, path: str) -> float:
    """``value`` as float; raises ``ConfigError`` unless positive and in float32's normal range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{path}: {short(value)} is a {type(value).__name__}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not MIN_NORMAL_F32 <= number <= MAX_F32:
        raise ConfigError(f"{path}: {short(value)}; expected a positive finite number within float32's normal range")
    return number


def integers(value: Any, path: str) -> tuple[int, ...]:
    """``value`` as a tuple of integers; raises ``ConfigError`` naming the entry that is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path}: {short(value)} is a {type(value).__name__}; expected a list of integers")
    return tuple(integer(entry, f"{path}[{i}]") for i, entry in enumerate(value))


def normalised(config: AttentionConfig) -> dict[str, Any]:
    """Every field in its own type: tuples of int, int, float (so that 32 and 32.0 give one digest)."""
    result: dict[str, Any] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        check = integers if name in _LISTS else real if name in _FLOATS else integer
        result[name] = check(value, name)
    return result


def check_sizes(c: AttentionConfig) -> None:
    """Positive sizes, and those that the formats, the rotation and the grouped output need."""
    for name in c.__struct_fields__:
        if name in _LISTS or name in _FLOATS or name == "candidate_source_layer":
            continue
        value = getattr(c, name)
        if value == 0 and c.candidate_source_layer == -1 and name in _MAY_BE_ZERO_WITHOUT_CANDIDATES:
            continue
        if value == 0 and name == "original_seq_len":
            continue  # no YaRN, as in the official code
        if value <= 0:
            raise ConfigError(f"{name}: {value}; expected a positive integer")
    for name in ("head_dim", "index_head_dim"):
        if getattr(c, name) % FP4_FP8_BLOCK:
            raise ConfigError(
                f"{name}: {getattr(c, name)} is not a multiple of {FP4_FP8_BLOCK}, the block that shares one "
                f"scale; expected a multiple of {FP4_FP8_BLOCK}"
            )
    if c.rope_head_dim % 2:
        raise ConfigError(f"rope_head_dim: {c.rope_head_dim} is odd; expected an even number (pairs are rotated)")
    for name in ("head_dim", "index_head_dim"):
        if c.rope_head_dim > getattr(c, name):
            raise ConfigError(
                f"rope_head_dim: {c.rope_head_dim} is larger than {name} {getattr(c, name)}; expected at "
                "most that, it is the rotated tail of each head"
            )
    if c.n_heads % c.o_groups:
        raise ConfigError(
            f"o_groups: {c.o_groups} does not divide n_heads {c.n_heads}; expected whole heads in each group "
            f"(n_heads*head_dim = {c.n_heads * c.head_dim} is split into o_groups parts)"
        )
    products = {
        "n_heads*head_dim": c.n_heads * c.head_dim,
        "o_groups*o_lora_rank": c.o_groups * c.o_lora_rank,
        "index_n_heads*index_head_dim": c.index_n_heads * c.index_head_dim,
        "candidate_topk_blocks*candidate_block_size": c.candidate_topk_blocks * c.candidate_block_size,
    }
    for name, value in products.items():
        if value > MAX_SIZE:
            raise ConfigError(f"{name}: {value} is out of range; expected less than 2^31")
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(c, name) <= 1.0:
            raise ConfigError(f"{name}: {getattr(c, name)}; expected a base above 1")
    if c.rope_factor < 1.0:
        raise ConfigError(f"rope_factor: {c.rope_factor}; expected at least 1 (1 means no stretching)")
    if c.beta_fast < c.beta_slow:
        raise ConfigError(f"beta_fast: {c.beta_fast} is below beta_slow {c.beta_slow}; expected beta_fast >= beta_slow")


def check_layers(c: AttentionConfig) -> None:
    """Sources exist, lie in range and order, and every consumer reads a source of its own ratio."""
    n_layers = len(c.compress_ratios)
    if not n_layers:
        raise ConfigError("compress_ratios: no entry; expected one ratio per layer")
    for layer, ratio in enumerate(c.compress_ratios):
        if ratio < 0:
            raise ConfigError(f"compress_ratios[{layer}]: {ratio}; expected 0 (window only) or a positive ratio")
    for name in ("kv_source_layers", "index_source_layers"):
        _check_sources(name, getattr(c, name), c.compress_ratios)
    for source in c.kv_source_layers:
        if source not in c.index_source_layers:
            raise ConfigError(
                f"kv_source_layers: layer {source} is not in index_source_layers "
                f"{list(c.index_source_layers)}; expected every KV source to run an indexer too (it owns the "
                "index keys)"
            )
    for layer, ratio in enumerate(c.compress_ratios):
        if ratio:
            _check_consumer(c, layer, ratio)
    _check_candidates(c)


def _check_sources(name: str, sources: tuple[int, ...], ratios: tuple[int, ...]) -> None:
    for i, layer in enumerate(sources):
        if not 0 <= layer < len(ratios):
            raise ConfigError(f"{name}[{i}]: {layer}; expected a layer in 0..{len(ratios) - 1}")
        if i and layer <= sources[i - 1]:
            raise ConfigError(f"{name}[{i}]: {layer} follows {sources[i - 1]}; expected ascending layers, each once")
        if ratios[layer] == 0:
            raise ConfigError(
                f"{name}[{i}]: layer {layer} has compress_ratios[{layer}] = 0; expected a source to have a "
                "ratio above 0"
            )


def _check_consumer(c: AttentionConfig, layer: int, ratio: int) -> None:
    earlier = [s for s in c.kv_source_layers if s <= layer]
    if not earlier:
        raise ConfigError(
            f"compress_ratios[{layer}]: {ratio}, but no KV source lies at or before layer {layer}; expected "
            f"a layer <= {layer} in kv_source_layers {list(c.kv_source_layers)}, or ratio 0"
        )
    source = earlier[-1]
    if c.compress_ratios[source] != ratio:
        raise ConfigError(
            f"compress_ratios[{layer}]: {ratio}, but layer {layer} reads the latents of layer {source}, "
            f"whose ratio is {c.compress_ratios[source]}; expected equal ratios"
        )


def _check_candidates(c: AttentionConfig) -> None:
    source = c.candidate_source_layer
    if source == -1:
        return
    if source not in c.index_source_layers:
        raise ConfigError(
            f"candidate_source_layer: {source} is not in index_source_layers {list(c.index_source_layers)}; "
            "expected an index source, or -1 for none"
        )
    for layer in (s for s in c.index_source_layers if s > source):
        kv_of_source = max(s for s in c.kv_source_layers if s <= source)
        kv_of_layer = max(s for s in c.kv_source_layers if s <= layer)
        if kv_of_source != kv_of_layer:
            raise ConfigError(
                f"candidate_source_layer: {source} chooses blocks of layer {kv_of_source}'s latents (ratio "
                f"{c.compress_ratios[kv_of_source]}), but layer {layer} searches those of layer "
                f"{kv_of_layer} (ratio {c.compress_ratios[kv_of_layer]}); expected later indexers to read "
                "the same KV source"
            )


def check_linear(c: AttentionConfig, mode: str) -> Literal["bf16", "fp8"]:
    """See ``AttentionConfig.check_linear``."""
    if mode not in ("bf16", "fp8"):
        raise ConfigError(f"linear: {short(mode)}; expected 'bf16' or 'fp8'")
    if mode == "fp8":
        inner = {
            "dim": c.dim,
            "q_lora_rank": c.q_lora_rank,
            "o_groups*o_lora_rank": c.o_groups * c.o_lora_rank,
        }
        for name, value in inner.items():
            if value % FP4_FP8_BLOCK:
                raise ConfigError(
                    f"linear 'fp8': {name} {value} is not a multiple of {FP4_FP8_BLOCK}, the block that "
                    "shares one scale; use linear 'bf16' with these sizes"
                )
    return cast('Literal["bf16", "fp8"]', mode)


def layer_list(layers: Iterable[int], n_layers: int) -> tuple[int, ...]:
    """``layers`` ascending; raises ``ConfigError`` if empty, out of range or with a layer given twice."""
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ConfigError(f"layers: {short(layers)}; expected a list of layer numbers")
    chosen = sorted(integer(layer, "layers") for layer in layers)
    if not chosen:
        raise ConfigError(f"layers: none chosen; expected some of 0..{n_layers - 1}")
    for i, layer in enumerate(chosen):
        if not 0 <= layer < n_layers:
            raise ConfigError(f"layers: {layer}; expected layers in 0..{n_layers - 1}")
        if i and layer == chosen[i - 1]:
            raise ConfigError(f"layers: {layer} is given twice; expected each layer once")
    return tuple(chosen)
