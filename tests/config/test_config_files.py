"""Configurations read from the released layouts, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.config_names import to_text_config
from ds41_tvm.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_mid_fp8"
FLASH = AttentionConfig.preset("flash")

# The text_config of the released DeepSeek-V4.1-Flash, attention and other names alike.
RELEASED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120,
    "moe_intermediate_size": 2304, "num_hidden_layers": 40, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280,
    "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
    "attention_bias": False, "max_position_embeddings": 1048576, "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 65536}, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3,
    "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip

# inference/config.json of the release: ModelArgs names, no context length.
RELEASED_ARGS: dict[str, Any] = {
    "vocab_size": 129280, "image_token_id": 129264, "dtype": "fp8", "expert_dtype": "fp4", "dim": 5120,
    "moe_inter_dim": 2304, "n_layers": 40, "n_mtp_layers": 3, "n_heads": 64, "n_routed_experts": 384,
    "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus", "route_scale": 1.5,
    "swiglu_limit": 10.0, "q_lora_rank": 1280, "head_dim": 512, "rope_head_dim": 64, "norm_eps": 1e-20,
    "o_groups": 8, "o_lora_rank": 1024, "window_size": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36], "compress_rope_theta": 160000,
    "original_seq_len": 65536, "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "engram_pad_id": 2,
    "engram_head_dim": 256, "engram_n_heads": 8, "dspark_n_activated_experts": 3, "vision_n_layers": 32,
    "vision_dim": 1024, "vision_n_heads": 16, "vision_rope_theta": 10000,
}  # fmt: skip


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_all_layouts_give_the_flash_preset(tmp_path: Path) -> None:
    nested = {
        "model_type": "deepseek_v41",
        "text_config": RELEASED_TEXT,
        "vision_config": {"hidden_size": 1024},
    }
    assert AttentionConfig.from_file(write(tmp_path / "config.json", nested)) == FLASH
    assert AttentionConfig.from_file(tmp_path) == FLASH
    assert AttentionConfig.from_file(str(write(tmp_path / "text.json", RELEASED_TEXT))) == FLASH
    assert AttentionConfig.from_file(write(tmp_path / "args.json", RELEASED_ARGS)) == FLASH
    assert AttentionConfig.from_text_config(nested) == FLASH
    assert AttentionConfig.from_text_config(RELEASED_TEXT) == FLASH
    assert AttentionConfig.from_dict(RELEASED_ARGS) == FLASH


def test_a_released_checkpoint_directory() -> None:
    config = AttentionConfig.from_file(GOLDEN)
    assert config.compress_ratios == (0, 0, 2, 2, 1, 1)  # the seventh ratio is the draft layer's
    assert (config.dim, config.head_dim, config.index_topk, config.max_seq_len) == (256, 64, 24, 512)


def test_written_text_config_reads_back() -> None:
    for preset in ("flash", "tiny"):
        config = AttentionConfig.preset(preset)
        assert AttentionConfig.from_text_config(to_text_config(config.to_dict())) == config
    other = AttentionConfig.from_dict({**FLASH.to_dict(), "max_batch_size": 9})
    assert AttentionConfig.from_text_config(to_text_config(other.to_dict())) == other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_sise": 5120}, "unknown key 'hidden_sise'; did you mean 'hidden_size'"),
        ({"kv_source_layers_ids": []}, "did you mean 'kv_source_layer_ids'"),
        ({"compress_ratio": [0]}, "did you mean 'compress_ratios'"),
        ({"num_hidden_layers": 44}, "compress_ratios: 43 entries for num_hidden_layers 44"),
        ({"num_hidden_layers": "40"}, "num_hidden_layers: '40' is a str"),
        ({"num_hidden_layers": 0}, "for num_hidden_layers 0"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: 8; expected 1"),
        ({"attention_bias": True}, "attention_bias: True; expected False"),
        ({"model_type": "deepseek_v4"}, "model_type: 'deepseek_v4'; expected deepseek_v41"),
        ({"rope_scaling": None}, "rope_scaling: None is a NoneType; expected an object"),
        ({"rope_scaling": {**RELEASED_TEXT["rope_scaling"], "rope_type": "linear"}}, "rope_type: 'linear'"),
        ({"rope_scaling": {**RELEASED_TEXT["rope_scaling"], "beta_fats": 1}}, "did you mean 'beta_fast'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.beta_fast, .*rope_scaling.factor: not given"),
        ({"hidden_size": [5120]}, r"dim: \[5120\] is a list"),
    ],
)
def test_text_config_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionConfig.from_text_config({**RELEASED_TEXT, **change})


def test_what_is_not_given_is_named_in_the_file_s_own_words() -> None:
    text = {k: v for k, v in RELEASED_TEXT.items() if k not in ("hidden_size", "index_topk")}
    with pytest.raises(ConfigError, match=r"text_config.hidden_size, text_config.index_topk: not given"):
        AttentionConfig.from_text_config({"text_config": text})
    with pytest.raises(ConfigError, match="num_hidden_layers: not given"):
        AttentionConfig.from_text_config({"hidden_size": 1})


def test_model_args_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'window_sise'; did you mean 'window_size'"):
        AttentionConfig.from_dict({**RELEASED_ARGS, "window_sise": 128})
    with pytest.raises(ConfigError, match="compress_ratios: 43 entries for n_layers 50"):
        AttentionConfig.from_dict({**RELEASED_ARGS, "n_layers": 50})
    with pytest.raises(ConfigError, match="key 3 is a int"):
        AttentionConfig.from_dict({**RELEASED_ARGS, 3: 4})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="expected an object"):
        AttentionConfig.from_dict([1])  # type: ignore[arg-type]


def test_keys_unlike_any_of_ours_are_ignored() -> None:
    assert AttentionConfig.from_dict({**RELEASED_ARGS, "a_new_optimizer": {"lr": 1}}) == FLASH
    assert AttentionConfig.from_text_config({**RELEASED_TEXT, "a_new_optimizer": {"lr": 1}}) == FLASH


# ---- files


BROKEN_FILES = {
    "empty": (b"", "not JSON"),
    "not JSON": (b"{dim: 3}", "not JSON .*line 1 column 2"),
    "cut": (b'{"dim": 3', "not JSON"),
    "not UTF-8": (b'{"dim": "\xff"}', "not UTF-8"),
    "a byte order mark": (b'\xef\xbb\xbf{"dim": 3}', "not JSON"),
    "a list": (b"[1, 2]", "top level is a list; expected a JSON object"),
    "nested deeply": (b"[" * 200_000, "nested too deeply"),
    "nested deeply in objects": (b'{"a":' * 200_000, "nested too deeply"),
    "a key twice": (b'{"dim": 3, "dim": 4}', "the key 'dim' is given twice"),
    "a key twice, inside": (
        b'{"text_config": {"head_dim": 3, "head_dim": 3}}',
        "the key 'head_dim' is given twice",
    ),
    "NaN": (b'{"dim": 64, "norm_eps": NaN}', "the number NaN is not JSON"),
    "minus infinity": (b'{"dim": 64, "norm_eps": -Infinity}', "the number -Infinity is not JSON"),
    "an infinite number": (b'{"dim": 64, "norm_eps": 1e999}', "too large for a float"),
    "an endless integer": (b'{"dim": ' + b"9" * 10_000 + b"}", "too many digits"),
    "a large integer": (
        b'{"n_layers": 1, "compress_ratios": [0], "dim": ' + b"9" * 4_000 + b"}",
        "not given|out of",
    ),
    "neither layout": (b'{"vocab_size": 3}', "no name of either layout found"),
    "both layouts": (b'{"hidden_size": 3, "dim": 3}', "names of both layouts found"),
    "text_config is no object": (b'{"text_config": 3}', "text_config: 3 is a int; expected an object"),
    "a lone surrogate": (b'{"\\ud800": 1, "dim": 3}', "not given"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_file(case: str, tmp_path: Path) -> None:
    data, message = BROKEN_FILES[case]
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        AttentionConfig.from_file(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: cannot be read .No such file"):
        AttentionConfig.from_file(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        AttentionConfig.from_file("a\0b")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read .Is a directory"):
        AttentionConfig.from_file(tmp_path)
