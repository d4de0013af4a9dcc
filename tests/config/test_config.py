"""AttentionConfig: fields, roles, closure, digest, and every contradiction that it refuses."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = AttentionConfig.preset("tiny").to_dict()
FLASH = AttentionConfig.preset("flash")


def golden_config(case: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"{case}.npz") as values:
        config: dict[str, Any] = json.loads(values["meta"].tobytes())["config"]
        return config


def test_tiny_is_the_golden_tiny() -> None:
    assert AttentionConfig.preset("tiny") == AttentionConfig.from_dict(golden_config("tiny_prefill12_decode2"))


def test_flash_has_the_released_sizes_and_roles() -> None:
    """The released text_config, and the layer modes that the technical report lists for it."""
    assert (FLASH.dim, FLASH.n_heads, FLASH.head_dim, FLASH.q_lora_rank) == (5120, 64, 512, 1280)
    assert FLASH.n_layers == 40
    assert FLASH.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20
    kinds = [role.kind for role in FLASH.roles]
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [2, 8, 14, 20]
    assert [i for i, kind in enumerate(kinds) if kind == "reindex"] == [24, 28, 32, 36]
    assert kinds.count("window") == 2
    assert kinds.count("reuse") == 30


def test_roles_name_their_sources() -> None:
    by_layer = {layer: FLASH.role(layer) for layer in (1, 2, 7, 8, 20, 23, 24, 27, 39)}
    sources = {layer: (r.kv_source, r.index_source, r.candidate_source) for layer, r in by_layer.items()}
    assert sources == {
        1: (None, None, None),
        2: (2, 2, None),
        7: (2, 2, None),
        8: (8, 8, None),
        20: (20, 20, None),
        23: (20, 20, None),
        24: (20, 24, 20),
        27: (20, 24, None),
        39: (20, 36, None),
    }
    assert [role.layer for role in FLASH.roles if role.is_candidate_source] == [20]


def test_without_a_candidate_source_nothing_is_restricted() -> None:
    config = AttentionConfig(
        **{**TINY, "candidate_source_layer": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0}
    )
    assert all(role.candidate_source is None and not role.is_candidate_source for role in config.roles)


@pytest.mark.parametrize("layer", [-1, 6])
def test_role_of_no_layer(layer: int) -> None:
    with pytest.raises(ConfigError, match=r"expected 0\.\.5"):
        AttentionConfig.preset("tiny").role(layer)


def test_numbers_are_normalised() -> None:
    """Equal sizes give one digest, whatever the numeric type they came in."""
    config = AttentionConfig.from_dict({**TINY, "beta_fast": 32, "rope_theta": 10000, "dim": np.int64(64)})
    same = AttentionConfig.from_dict({**TINY, "beta_fast": 32.0, "rope_theta": 10000.0})
    assert config == same
    assert config.digest() == same.digest()
    assert isinstance(config.dim, int)
    assert isinstance(config.beta_fast, float)
    assert isinstance(AttentionConfig.from_dict({**TINY, "compress_ratios": [0, 0, 2, 2, 1, 1]}).compress_ratios, tuple)


def test_digest_tells_every_field_apart() -> None:
    config = AttentionConfig.preset("tiny")
    assert config.digest() == AttentionConfig.from_dict(config.to_dict()).digest()
    assert config.digest().startswith("sha256:")
    changed = [
        msgspec.structs.replace(config, norm_eps=1e-6).digest(),
        msgspec.structs.replace(config, max_batch_size=5).digest(),
        msgspec.structs.replace(config, compress_ratios=(0, 0, 3, 3, 1, 1)).digest(),
    ]
    assert len({config.digest(), *changed}) == 4


def test_it_cannot_be_changed_and_can_be_a_key() -> None:
    config = AttentionConfig.preset("tiny")
    with pytest.raises(AttributeError):
        config.dim = 65  # type: ignore[misc]
    assert {config: 1}[AttentionConfig.preset("tiny")] == 1


def test_replacing_a_field_checks_again() -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        msgspec.structs.replace(AttentionConfig.preset("tiny"), head_dim=33)


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"'huge'.*flash, tiny"):
        AttentionConfig.preset("huge")


def test_from_kwargs() -> None:
    assert AttentionConfig.from_kwargs(**TINY) == AttentionConfig.preset("tiny")
    with pytest.raises(ConfigError, match="unknown key 'head_dims'; did you mean 'head_dim'"):
        AttentionConfig.from_kwargs(**TINY, head_dims=1)
    with pytest.raises(ConfigError, match="dim not given"):
        AttentionConfig.from_kwargs(**{k: v for k, v in TINY.items() if k != "dim"})


# ---- refusals: the change, and what the message must name

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dim": 0}, "dim: 0; expected a positive"),
    ({"n_heads": -4}, "n_heads: -4; expected a positive"),
    ({"window_size": 0}, "window_size: 0"),
    ({"index_topk": 0}, "index_topk: 0"),
    ({"max_batch_size": 0}, "max_batch_size: 0"),
    ({"candidate_block_size": 0}, "candidate_block_size: 0"),
    ({"original_seq_len": -1}, "original_seq_len: -1"),
    ({"dim": 64.0}, "dim: 64.0 is a float; expected an integer"),
    ({"dim": "64"}, "dim: '64' is a str; expected an integer"),
    ({"dim": True}, "dim: True is a bool; expected an integer"),
    ({"dim": None}, "dim: None is a NoneType; expected an integer"),
    ({"dim": 2**31}, r"dim: 2147483648 is out of range; expected .* below 2\^31"),
    ({"dim": 10**5000}, "dim: an integer of 16610 bits is out of range"),
    ({"norm_eps": math.nan}, "norm_eps: nan; expected a positive finite"),
    ({"norm_eps": math.inf}, "norm_eps: inf"),
    ({"norm_eps": 0.0}, "norm_eps: 0.0"),
    ({"norm_eps": 1e-50}, "norm_eps: 1e-50"),
    ({"rope_theta": 10**5000}, "rope_theta: an integer of 16610 bits"),
    ({"rope_theta": "10000"}, "rope_theta: '10000' is a str; expected a number"),
    ({"rope_theta": 1.0}, "rope_theta: 1.0; expected a base above 1"),
    ({"rope_factor": 0.5}, "rope_factor: 0.5"),
    ({"beta_fast": 1, "beta_slow": 2}, "beta_fast: 1.0 is below beta_slow 2.0"),
    ({"compress_ratios": 2}, "compress_ratios: 2 is a int; expected a list"),
    ({"compress_ratios": "0022"}, "compress_ratios: '0022' is a str"),
    ({"compress_ratios": [0, 0, 2, 2.0, 1, 1]}, r"compress_ratios\[3\]: 2.0 is a float"),
    ({"compress_ratios": []}, "compress_ratios: no entry"),
    ({"compress_ratios": [0, 0, 2, -2, 1, 1]}, r"compress_ratios\[3\]: -2; expected"),
    ({"head_dim": 48}, "head_dim: 48 is not a multiple of 32"),
    ({"index_head_dim": 40}, "index_head_dim: 40 is not a multiple of 32"),
    ({"rope_head_dim": 7}, "rope_head_dim: 7 is odd"),
    ({"rope_head_dim": 34}, "rope_head_dim: 34 is larger than head_dim 32"),
    ({"rope_head_dim": 34, "head_dim": 64}, "rope_head_dim: 34 is larger than index_head_dim 32"),
    ({"o_groups": 3}, "o_groups: 3 does not divide n_heads 4"),
    ({"n_heads": 2**26, "head_dim": 64}, r"n_heads\*head_dim: 4294967296 is out of range"),
    ({"compress_ratios": [0, 2, 2, 2, 1, 1]}, r"compress_ratios\[1\]: 2, but no KV source lies at or before"),
    ({"compress_ratios": [0, 0, 2, 4, 1, 1]}, r"\[3\]: 4, but layer 3 reads .* layer 2, whose ratio is 2"),
    ({"index_source_layers": [2, 5], "candidate_source_layer": -1}, "layer 4 is not in index_source_layers"),
    ({"compress_ratios": [0, 0, 0, 0, 1, 1]}, r"kv_source_layers\[0\]: layer 2 has compress_ratios\[2\] = 0"),
    ({"compress_ratios": [0, 0, 2, 2, 1, 0]}, r"index_source_layers\[2\]: layer 5 has .* = 0"),
    ({"kv_source_layers": [2, 6]}, r"kv_source_layers\[1\]: 6; expected a layer in 0..5"),
    ({"kv_source_layers": [-1, 2]}, r"kv_source_layers\[0\]: -1"),
    ({"kv_source_layers": [4, 2]}, r"kv_source_layers\[1\]: 2 follows 4; expected ascending"),
    ({"index_source_layers": [2, 4, 4]}, r"index_source_layers\[2\]: 4 follows 4"),
    ({"candidate_source_layer": 3}, "candidate_source_layer: 3 is not in index_source_layers"),
    ({"candidate_source_layer": -2}, "candidate_source_layer: -2 is not in"),
    (
        {"candidate_source_layer": 2},
        r"layer 2's latents \(ratio 2\), but layer 4 searches .* layer 4 \(ratio 1\)",
    ),
    (
        {"candidate_source_layer": 2, "compress_ratios": [0, 0, 2, 2, 2, 2]},
        r"layer 2's latents .*, but layer 4 searches those of layer 4",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionConfig(**{**TINY, **change})


@given(
    field=st.sampled_from(sorted(TINY)),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.text(),
        st.integers(),
        st.floats(),
        st.lists(st.integers(-2, 9)),
        st.binary(),
    ),
)
@settings(deadline=None)
def test_any_value_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    """No value of any type ends in another exception, and what is taken survives a round trip."""
    with suppress(ConfigError):
        config = AttentionConfig.from_dict({**TINY, field: value})
        assert AttentionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# ---- linear mode, closure


def test_check_linear() -> None:
    assert FLASH.check_linear("fp8") == "fp8"
    assert AttentionConfig.preset("tiny").check_linear("bf16") == "bf16"
    with pytest.raises(ConfigError, match="'int8'; expected 'bf16' or 'fp8'"):
        FLASH.check_linear("int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 65}, "dim 65"),
        ({"q_lora_rank": 16}, "q_lora_rank 16"),
        ({"o_lora_rank": 1}, r"o_groups\*o_lora_rank 8"),
    ],
)
def test_fp8_needs_whole_blocks(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message + " is not a multiple of 32.*use linear 'bf16'"):
        msgspec.structs.replace(FLASH, **change).check_linear("fp8")


def test_closure() -> None:
    assert closure(FLASH, None) == tuple(range(40))
    assert closure(FLASH, [1]) == (1,)
    assert closure(FLASH, [7, 2]) == (2, 7)
    assert closure(FLASH, iter([24, 20, 27])) == (20, 24, 27)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3], "layer 2 is missing; layer 3 .reuse. reads its latents"),
        ([20, 25], "layer 24 is missing; layer 25 .reuse. reads its selection"),
        ([24], "layer 20 is missing; layer 24 .reindex. reads its latents"),
        ([], "none chosen"),
        ([40], r"40; expected layers in 0\.\.39"),
        ([2, 2], "2 is given twice"),
        ([2.0], "2.0 is a float"),
        ("2", "expected a list"),
        (2, "expected a list"),
    ],
)
def test_closure_refuses(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        closure(FLASH, layers)


def test_closure_names_a_missing_candidate_source() -> None:
    """The candidate source may lie between the KV source and the reader."""
    config = AttentionConfig(
        **{
            **TINY,
            "compress_ratios": [0, 0, 2, 2, 2, 2],
            "kv_source_layers": [2],
            "candidate_source_layer": 4,
        }
    )
    with pytest.raises(ConfigError, match=r"layer 4 is missing; layer 5 .reindex. reads its candidate blocks"):
        closure(config, [2, 5])
