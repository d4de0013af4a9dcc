"""Whole layers in ONNX Runtime against the reference: roles, ratios, chunks, lengths, bad values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.checkpoint import random_input, synthetic_weights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics import formats as f
from ds41_tvm.onnx_export.outside import expected
from ds41_tvm.reference.layer import Reference

TINY = AttentionConfig.preset("tiny")
RATIOS = AttentionConfig.from_kwargs(
    **{
        **TINY.to_dict(),
        "compress_ratios": [0, 3, 4, 1],
        "kv_source_layers": [1, 2, 3],
        "index_source_layers": [1, 2, 3],
        "candidate_source_layer": -1,
        "window_size": 5,
    }
)
Make = Callable[..., Any]


class Pair:
    """An exported model and the reference, fed alike."""

    def __init__(self, exported: Make, config: AttentionConfig, layers: Sequence[int] | None = None) -> None:
        self.config = config
        self.weights = synthetic_weights(config, "layers")
        self.played = exported(config, self.weights, layers=layers)
        self.reference = Reference(config, self.weights, layers)
        self.restart()

    def restart(self) -> None:
        self.played.restart()
        self.sequence = self.reference.new_sequence()

    def step(self, start: int, tokens: int) -> dict[str, np.ndarray]:
        """Feed positions start ... and compare everything: caches and selections by bits, y closely."""
        x = {
            n: random_input("layers", n, 0, 1, 64, self.config.dim)[:, start : start + tokens]
            for n in self.reference.layers
        }
        out = self.played.step({n: f.bf16_decode(rows) for n, rows in x.items()})
        for layer, rows in x.items():
            y = f.bf16_decode(self.reference.forward(layer, rows[0], start, self.sequence))
            assert np.linalg.norm(out[f"y.{layer}"][0] - y) <= 2e-3 * np.linalg.norm(y), f"y.{layer} at {start}"
        for name, value in out.items():
            if not name.startswith("y."):
                wanted = expected(self.sequence, name)
                compare = np.testing.assert_allclose if "members" in name else np.testing.assert_array_equal
                options: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if "members" in name else {}
                compare(value[0], wanted, err_msg=f"{name} at {start}", **options)
        return out  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tiny(exported: Make) -> Pair:
    return Pair(exported, TINY)


@pytest.fixture(scope="module")
def ratios(exported: Make) -> Pair:
    return Pair(exported, RATIOS)


@pytest.mark.parametrize("prompt", [1, 2, 3, 7, 8, 9, 21, 40])
def test_prompt_and_decode(tiny: Pair, prompt: int) -> None:
    tiny.restart()
    tiny.step(0, prompt)
    for position in range(prompt, prompt + 3):
        tiny.step(position, 1)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 6, 12, 30])
def test_ratios_of_three_and_four(ratios: Pair, prompt: int) -> None:
    ratios.restart()
    ratios.step(0, prompt)
    for position in range(prompt, prompt + 5):
        ratios.step(position, 1)


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 15), min_size=1, max_size=6))
def test_any_chunks(tiny: Pair, cuts: list[int]) -> None:
    tiny.restart()
    start = 0
    for tokens in cuts:
        if start + tokens <= TINY.max_seq_len:
            tiny.step(start, tokens)
            start += tokens


def test_nothing_is_selected_before_the_first_group(tiny: Pair) -> None:
    tiny.restart()
    out = tiny.step(0, 1)
    assert out["selection.2"].shape == (1, 1, 0)
    assert out["present_latent.2"].shape[1] == 0
    np.testing.assert_array_equal(out["selection.4"], [[[0]]])


def test_a_call_without_tokens_changes_nothing(tiny: Pair) -> None:
    tiny.restart()
    for tokens in (0, 5, 0, 4):
        before = dict(tiny.played.session.caches)
        x = {n: np.zeros((1, tokens, TINY.dim), np.float32) for n in range(6)}
        out = tiny.played.step(x)
        assert out["y.3"].shape == (1, tokens, TINY.dim)
        for name, value in before.items():
            assert tokens or np.array_equal(tiny.played.session.caches[name], value), name


def test_the_selection_is_never_wider_than_what_exists(tiny: Pair) -> None:
    tiny.restart()
    widths = [tiny.step(position, 1)["selection.4"].shape[2] for position in range(9)]
    assert widths == [1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_files_of_single_layers_give_what_one_file_gives(tiny: Pair, exported: Make) -> None:
    parts = {layer: exported(TINY, tiny.weights, layers=[layer]) for layer in range(6)}
    assert [v.name for v in parts[3].model.graph.input] == [
        "x.3", "start_pos", "past_window.3", "selection.2", "present_latent.2",
    ]  # fmt: skip
    assert {"candidates.4", "present_key.4", "present_latent.4"} <= {v.name for v in parts[5].model.graph.input}
    tiny.restart()
    start = 0
    for tokens in (13, 4, 1, 1):
        whole = tiny.step(start, tokens)
        state: dict[str, np.ndarray] = {}
        for layer, part in parts.items():
            x = f.bf16_decode(random_input("layers", layer, 0, 1, 64, TINY.dim)[:, start : start + tokens])
            wanted = {v.name for v in part.model.graph.input}
            others = {name: value for name, value in state.items() if name in wanted}
            state.update(part.step({layer: x}, others))
        for name, value in whole.items():
            np.testing.assert_array_equal(state[name], value, err_msg=f"{name} at {start}")
        start += tokens


def test_a_bad_row_leaves_the_other_sequence_and_older_tokens_alone(exported: Make) -> None:
    played = exported(TINY, synthetic_weights(TINY, "layers"), batch=2)
    x = {n: f.bf16_decode(random_input("layers", n, 0, 2, 20, TINY.dim)) for n in range(6)}
    clean = [played.step({n: rows[:, part] for n, rows in x.items()}) for part in (slice(0, 12), slice(12, 20))]
    played.restart(2)
    bad = {n: rows.copy() for n, rows in x.items()}
    for rows in bad.values():
        rows[1, 7, 3] = np.nan
        rows[1, 9, 3] = np.inf
    dirty = [played.step({n: rows[:, part] for n, rows in bad.items()}) for part in (slice(0, 12), slice(12, 20))]
    for one, other in zip(clean, dirty, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(other[name][0], value[0], err_msg=name)
    for layer in range(6):
        np.testing.assert_array_equal(dirty[0][f"y.{layer}"][1, :7], clean[0][f"y.{layer}"][1, :7])
        assert np.isnan(dirty[0][f"y.{layer}"][1, 7]).all()
