"""The sizes of the attention stack and the role of each layer.

Field names are those of the official ``ModelArgs`` (``inference/model.py`` of the DeepSeek-V4.1 release); the
released ``config.json`` (``text_config``) uses other names for the same values, see ``config_names``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from . import config_checks, config_names
from .errors import ConfigError

Kind = Literal["window", "full", "reindex", "reuse"]
LinearMode = Literal["bf16", "fp8"]
# Linear layers whose input is quantised to e4m3 in linear mode fp8 (official names); the others use bf16 weights.
FP8_LINEARS = frozenset({"wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b"})


class LayerRole(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer computes itself and what it takes from earlier layers of the same step.

    ``window``: ratio 0, only the sliding window. ``full``: compresses its own KV and runs its indexer.
    ``reindex``: its own indexer over an earlier layer's keys. ``reuse``: takes KV and selection from earlier
    layers. ``kv_source`` and ``index_source`` are the layers whose latents and selection are read (the layer
    itself where it is a source). ``candidate_source`` is the layer whose candidate blocks restrict this
    layer's indexer.
    """

    layer: int
    kind: Kind
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    candidate_source: int | None


class AttentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the attention of all layers. Raises ``ConfigError`` on values that contradict each other.

    Shapes that follow from it, rows first: ``wq_a [q_lora_rank, dim]``, ``wq_b [n_heads*head_dim,
    q_lora_rank]``, ``wkv [head_dim, dim]``, ``wo_a [o_groups*o_lora_rank, n_heads*head_dim/o_groups]``,
    ``wo_b [dim, o_groups*o_lora_rank]``; positions and lengths in tokens; ``candidate_block_size`` in
    compressed positions; ``candidate_source_layer`` -1 means that no layer restricts the later indexers.
    """

    dim: int
    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window_size: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    candidate_source_layer: int = -1
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    original_seq_len: int
    beta_fast: float
    beta_slow: float
    norm_eps: float
    max_seq_len: int
    max_batch_size: int = config_names.DEFAULT_BATCH_SIZE

    def __post_init__(self) -> None:
        for name, value in config_checks.normalised(self).items():
            msgspec.structs.force_setattr(self, name, value)
        config_checks.check_sizes(self)
        config_checks.check_layers(self)

    # ---- layers

    @property
    def n_layers(self) -> int:
        """Number of layers: one compression ratio each."""
        return len(self.compress_ratios)

    def role(self, layer: int) -> LayerRole:
        """Role of ``layer``; raises ``ConfigError`` if there is no such layer."""
        if not 0 <= layer < self.n_layers:
            raise ConfigError(f"layer {layer}: there is no such layer; expected 0..{self.n_layers - 1}")
        ratio = self.compress_ratios[layer]
        kind: Kind = "window"
        kv_source = index_source = candidate_source = None
        if ratio > 0:
            kv_source = max(s for s in self.kv_source_layers if s <= layer)
            index_source = max(s for s in self.index_source_layers if s <= layer)
            kind = "full" if kv_source == layer else "reindex" if index_source == layer else "reuse"
            if index_source == layer and 0 <= self.candidate_source_layer < layer:
                candidate_source = self.candidate_source_layer
        return LayerRole(
            layer=layer,
            kind=kind,
            ratio=ratio,
            kv_source=kv_source,
            index_source=index_source,
            is_candidate_source=layer == self.candidate_source_layer,
            candidate_source=candidate_source,
        )

    @property
    def roles(self) -> tuple[LayerRole, ...]:
        """Roles of all layers, in order."""
        return tuple(self.role(layer) for layer in range(self.n_layers))

    # ---- other forms

    def to_dict(self) -> dict[str, Any]:
        """The fields by their ``ModelArgs`` names, lists for the tuples: as ``from_dict`` takes them."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}

    def digest(self) -> str:
        """``sha256:`` and the hash of the canonical JSON (sorted keys, no spaces) of ``to_dict()``."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    def check_linear(self, mode: str) -> LinearMode:
        """Returns ``mode`` if the linears can run in it.

        ``fp8`` quantises the inputs in blocks of 32, so the inner dimensions ``dim``, ``q_lora_rank`` and
        ``o_groups*o_lora_rank`` must be multiples of 32. Raises ``ConfigError`` otherwise.
        """
        return config_checks.check_linear(self, mode)

    # ---- where configurations come from

    @classmethod
    def from_kwargs(cls, **fields: Any) -> AttentionConfig:
        """The constructor, with ``ConfigError`` and a suggestion for an unknown or a missing name."""
        known = cls.__struct_fields__
        for name in fields:
            if name not in known:
                raise ConfigError(config_names.unknown_key(name, known, "keyword arguments"))
        return cls._build(fields, "keyword arguments")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionConfig:
        """From official ``ModelArgs`` names, as ``inference/config.json`` has them.

        The non-attention names of ``ModelArgs`` are ignored, names that look like a typo of a known one
        refused. ``compress_ratios`` may have more entries than ``n_layers`` (the draft layers'); the first
        ``n_layers`` count. Without ``max_seq_len`` the context is ``original_seq_len * rope_factor``. Raises
        ``ConfigError``.
        """
        return cls._build(config_names.fields_from_model_args(values), "model arguments")

    @classmethod
    def from_text_config(cls, values: Mapping[str, Any]) -> AttentionConfig:
        """From the released ``config.json``: whole, or its ``text_config`` alone. Raises ``ConfigError``."""
        return cls._build(config_names.fields_from_text_config(values), "text_config")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AttentionConfig:
        """From a JSON file, or from ``config.json`` in a directory.

        The layout is recognised: a ``config.json`` with ``text_config``, a bare text config, or an
        ``inference/config.json`` with ``ModelArgs`` names. Raises ``ConfigError`` naming the file.
        """
        values, source = config_names.read_config(path)
        try:
            is_text = config_names.is_text_layout(values)
            return cls.from_text_config(values) if is_text else cls.from_dict(values)
        except ConfigError as exc:
            raise ConfigError(f"{source}: {exc}") from None

    @classmethod
    def preset(cls, name: str) -> AttentionConfig:
        """``flash`` (the released DeepSeek-V4.1-Flash) or ``tiny`` (seconds on any machine)."""
        if name not in config_names.PRESETS:
            expected = ", ".join(sorted(config_names.PRESETS))
            raise ConfigError(f"preset {name!r}: there is no such preset; expected one of {expected}")
        return cls._build(dict(config_names.PRESETS[name]), f"preset {name}")

    @classmethod
    def _build(cls, fields: dict[str, Any], where: str) -> AttentionConfig:
        defaults = (
            "candidate_source_layer",
            "candidate_topk_blocks",
            "candidate_block_size",
            "max_batch_size",
        )
        missing = [n for n in cls.__struct_fields__ if n not in fields and n not in defaults]
        if missing:
            raise ConfigError(f"{where}: {', '.join(missing)} not given; expected a value for each")
        return cls(**fields)


def closure(config: AttentionConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Sorted tuple of ``layers`` (``None``: all), checked to contain every source that its members read.

    Raises ``ConfigError`` naming the missing layer and who needs it, an unknown layer, a layer given twice,
    or an empty choice.
    """
    if layers is None:
        return tuple(range(config.n_layers))
    chosen = config_checks.layer_list(layers, config.n_layers)
    members = set(chosen)
    for layer in chosen:
        role = config.role(layer)
        needs = {
            "latents": role.kv_source,
            "selection": role.index_source,
            "candidate blocks": role.candidate_source,
        }
        for what, source in needs.items():
            if source is not None and source not in members:
                raise ConfigError(
                    f"layers {list(chosen)}: layer {source} is missing; layer {layer} ({role.kind}) reads "
                    f"its {what}; add layer {source} or leave out layer {layer}"
                )
    return chosen
