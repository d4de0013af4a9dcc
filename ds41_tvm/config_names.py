"""The names under which the release gives the same values, and the presets.

Two files of the DeepSeek-V4.1 release describe the model: ``config.json`` (Hugging Face names inside
``text_config``) and ``inference/config.json`` (the ``ModelArgs`` names of ``inference/model.py``).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .config_checks import integer, integers, real
from .errors import ConfigError
from .strict_json import read_object, short

# text_config name -> ModelArgs name
TEXT_NAMES: dict[str, str] = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_lora_rank": "o_lora_rank",
    "o_groups": "o_groups",
    "sliding_window": "window_size",
    "compress_ratios": "compress_ratios",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "candidate_topk_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "max_batch_size": "max_batch_size",  # not in released files: a capacity that we write where it is not 4
}
ROPE_SCALING_NAMES: dict[str, str] = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}
FIELDS = frozenset(TEXT_NAMES.values()) | frozenset(ROPE_SCALING_NAMES.values())
DEFAULT_BATCH_SIZE = 4

# Names of the released files that say nothing about the attention. Listed so that none is taken for a typo.
OTHER_MODEL_ARGS = frozenset(
    {
        "vocab_size", "dtype", "scale_fmt", "scale_dtype", "expert_dtype", "moe_inter_dim", "n_layers",
        "n_mtp_layers", "n_hash_layers", "n_routed_experts", "n_shared_experts", "n_activated_experts",
        "score_func", "route_scale", "swiglu_limit", "norm_topk_prob", "gate_temp", "hc_mult",
        "hc_sinkhorn_iters", "hc_eps", "image_token_id", "engram_layer_ids", "engram_num_embeddings",
        "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_pad_id",
        "engram_compressed_vocab_size", "dspark_block_size", "dspark_noise_token_id",
        "dspark_target_layer_ids", "dspark_markov_rank", "dspark_n_routed_experts",
        "dspark_n_activated_experts", "vision_n_layers", "vision_dim", "vision_n_heads", "vision_inter_dim",
        "vision_patch_size", "vision_rope_theta", "vision_downsample_ratio", "vision_max_n_token",
        "vision_min_pixels", "vision_max_wh_ratio", "model_type", "architectures", "quantization_config",
    }
)  # fmt: skip
OTHER_TEXT_NAMES = frozenset(
    {
        "model_type", "architectures", "vocab_size", "num_hidden_layers", "num_nextn_predict_layers",
        "num_key_value_heads", "attention_bias", "attention_dropout", "hidden_act", "initializer_range",
        "use_cache", "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
        "pad_token_id", "image_token_id", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor",
        "swiglu_limit", "gate_temp", "num_hash_layers", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
        "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size",
        "engram_n_heads", "engram_head_dim", "engram_pad_token_id", "engram_compressed_vocab_size",
        "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank",
        "dspark_n_routed_experts", "dspark_num_experts_per_tok", "rope_scaling", "quantization_config",
        "vision_config", "text_config", "transformers_version", "auto_map",
    }
)  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    # text_config of deepseek-ai/DeepSeek-V4.1-Flash; its compress_ratios has three more entries, the draft
    # layers'.
    "flash": {
        "dim": 5120, "n_heads": 64, "head_dim": 512, "rope_head_dim": 64, "q_lora_rank": 1280,
        "o_lora_rank": 1024, "o_groups": 8, "window_size": 128,
        "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20, "kv_source_layers": (2, 8, 14, 20),
        "index_source_layers": (2, 8, 14, 20, 24, 28, 32, 36), "candidate_source_layer": 20,
        "candidate_topk_blocks": 2048, "candidate_block_size": 8, "index_n_heads": 32,
        "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
        "rope_factor": 16.0, "original_seq_len": 65536, "beta_fast": 32, "beta_slow": 1, "norm_eps": 1e-20,
        "max_seq_len": 1048576, "max_batch_size": 4,
    },
    "tiny": {
        "dim": 64, "n_heads": 4, "head_dim": 32, "rope_head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 16,
        "o_groups": 2, "window_size": 8, "compress_ratios": (0, 0, 2, 2, 1, 1), "kv_source_layers": (2, 4),
        "index_source_layers": (2, 4, 5), "candidate_source_layer": 4, "candidate_topk_blocks": 3,
        "candidate_block_size": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 6,
        "rope_theta": 10000.0, "compress_rope_theta": 40000.0, "rope_factor": 2.0, "original_seq_len": 32,
        "beta_fast": 32, "beta_slow": 1, "norm_eps": 1e-20, "max_seq_len": 64, "max_batch_size": 4,
    },
}  # fmt: skip


def unknown_key(name: object, known: Iterable[str], where: str) -> str:
    """Message for the unknown key ``name``, with the closest known one."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}?" if close else f"expected some of {', '.join(sorted(known))}"
    return f"{where}: unknown key {short(name)}; {hint}"


def _refuse_typos(values: Mapping[str, Any], known: Iterable[str], other: Iterable[str], where: str) -> None:
    """Unknown keys of a full model configuration are not ours to judge, unless they resemble one that is."""
    known, other = set(known), set(other)
    for name in values:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: the key {short(name)} is a {type(name).__name__}; expected a string")
        if name in known or name in other:
            continue
        if difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise ConfigError(unknown_key(name, known, where))


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {short(values)} is a {type(values).__name__}; expected an object")
    return values


def _first_ratios(fields: dict[str, Any], count: Any, count_name: str, where: str) -> None:
    """Keeps the ratios of the ``count`` layers; the rest belong to the draft layers."""
    if count is None or "compress_ratios" not in fields:
        return
    count = integer(count, f"{where}{count_name}")
    ratios = integers(fields["compress_ratios"], f"{where}compress_ratios")
    if count <= 0 or len(ratios) < count:
        raise ConfigError(
            f"{where}compress_ratios: {len(ratios)} entries for {count_name} {count}; expected one for each layer"
        )
    fields["compress_ratios"] = ratios[:count]


def _check_model_type(values: Mapping[str, Any], where: str) -> None:
    model_type = values.get("model_type")
    if model_type is not None and not str(model_type).startswith(("deepseek_v41", "deepseek_v4.1")):
        raise ConfigError(f"{where}model_type: {short(model_type)}; expected deepseek_v41 (DeepSeek-V4.1)")


def fields_from_model_args(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``AttentionConfig`` from ``ModelArgs`` names; see ``AttentionConfig.from_dict``."""
    values = _mapping(values, "model arguments")
    _check_model_type(values, "")
    _refuse_typos(values, FIELDS, OTHER_MODEL_ARGS, "model arguments")
    fields = {name: values[name] for name in FIELDS if name in values}
    _first_ratios(fields, values.get("n_layers"), "n_layers", "")
    if "max_seq_len" not in fields and "original_seq_len" in fields and "rope_factor" in fields:
        length = integer(fields["original_seq_len"], "original_seq_len")
        fields["max_seq_len"] = int(length * real(fields["rope_factor"], "rope_factor"))
    return fields


def fields_from_text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``AttentionConfig`` from Hugging Face names; see ``AttentionConfig.from_text_config``."""
    values = _mapping(values, "config")
    _check_model_type(values, "")
    where = ""
    if "text_config" in values:
        where = "text_config."
        values = _mapping(values["text_config"], "text_config")
        _check_model_type(values, where)
    _refuse_typos(values, TEXT_NAMES, OTHER_TEXT_NAMES, where.rstrip(".") or "config")
    fields = {ours: values[theirs] for theirs, ours in TEXT_NAMES.items() if theirs in values}
    scaling = _mapping(values.get("rope_scaling", {}), f"{where}rope_scaling")
    _refuse_typos(scaling, ROPE_SCALING_NAMES, ("rope_type", "type", "rope_theta"), f"{where}rope_scaling")
    fields |= {ours: scaling[theirs] for theirs, ours in ROPE_SCALING_NAMES.items() if theirs in scaling}
    fixed = [
        ("num_key_value_heads", values.get("num_key_value_heads", 1), 1),
        ("attention_bias", values.get("attention_bias", False), False),
        ("rope_scaling.rope_type", scaling.get("rope_type", scaling.get("type", "yarn")), "yarn"),
    ]
    for name, seen, expected in fixed:
        if seen != expected:
            raise ConfigError(f"{where}{name}: {short(seen)}; expected {expected!r}, no other is supported")
    if "num_hidden_layers" not in values:
        raise ConfigError(f"{where}num_hidden_layers: not given; expected the number of layers")
    _first_ratios(fields, values["num_hidden_layers"], "num_hidden_layers", where)
    theirs = {ours: name for name, ours in TEXT_NAMES.items()}
    theirs |= {ours: f"rope_scaling.{name}" for name, ours in ROPE_SCALING_NAMES.items()}
    optional = {"candidate_source_layer", "candidate_topk_blocks", "candidate_block_size", "max_batch_size"}
    missing = [where + theirs[name] for name in sorted(FIELDS - set(fields) - optional)]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not given; expected a value for each")
    return fields


def to_text_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The released ``text_config`` for ``AttentionConfig.to_dict()``: the inverse of the above."""
    text: dict[str, Any] = {"model_type": "deepseek_v41_text"}
    text["num_hidden_layers"] = len(fields["compress_ratios"])
    text |= {theirs: fields[ours] for theirs, ours in TEXT_NAMES.items()}
    if text["max_batch_size"] == DEFAULT_BATCH_SIZE:
        del text["max_batch_size"]
    text["num_key_value_heads"] = 1
    text["attention_bias"] = False
    text["rope_scaling"] = {"rope_type": "yarn"} | {t: fields[ours] for t, ours in ROPE_SCALING_NAMES.items()}
    text["num_nextn_predict_layers"] = 0
    return text


def read_config(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Path]:
    """The JSON object of a configuration file (``config.json`` of a directory), and its path."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    return read_object(file, ConfigError), file


def is_text_layout(values: Mapping[str, Any]) -> bool:
    """Whether ``values`` has Hugging Face rather than ``ModelArgs`` names; ``ConfigError`` if neither."""
    text = "text_config" in values or "hidden_size" in values or "num_hidden_layers" in values
    official = "dim" in values or "n_layers" in values or "n_heads" in values
    if text == official:
        both = "names of both layouts" if text else "no name of either layout"
        raise ConfigError(
            f"{both} found; expected a config.json with 'text_config', a text config with 'hidden_size', or "
            "an inference/config.json with 'dim'"
        )
    return text
