"""The whole reference: cutting a prompt anywhere, taking tokens back, subsets of layers, and misuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.checkpoint import synthetic_weights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError, InputError, MissingTensor, StateError, StepError
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode
from ds41_tvm.reference.layer import Reference
from ds41_tvm.reference.sequence import Sequence

CONFIG = AttentionConfig.preset("tiny")
WEIGHTS = {name: np.asarray(w) for name, w in synthetic_weights(CONFIG, "reference-tests").items()}
MODEL = Reference(CONFIG, WEIGHTS)
LENGTH = 31


def inputs(seed: int = 0, length: int = LENGTH) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return bf16_encode(rng.uniform(-1.5, 1.5, size=(CONFIG.n_layers, length, CONFIG.dim)).astype(np.float32))


def run(
    model: Reference, x: np.ndarray, sequence: Sequence, start: int, stop: int, chunk: int = 0
) -> dict[int, dict[str, Any]]:
    """Feed tokens start .. stop - 1 in chunks; outputs and selections of all of them by layer."""
    parts: dict[int, dict[str, list[Any]]] = {layer: {"out": [], "selection": []} for layer in model.layers}
    for begin in range(start, stop, chunk or stop):
        for layer in model.layers:
            trace: dict[str, Any] = {}
            model.forward(layer, x[layer, begin : min(begin + (chunk or stop), stop)], begin, sequence, trace)
            for what in parts[layer]:
                if what in trace:
                    parts[layer][what].append(trace[what])
    return {layer: {w: np.concatenate(a) for w, a in found.items() if a} for layer, found in parts.items()}


def same_caches(one: Sequence, other: Sequence) -> None:
    for layer, cache in one.caches.items():
        twin = other.caches[layer]
        assert cache.length == twin.length
        for name in ("window", "latents", "keys", "kv", "gate"):
            np.testing.assert_array_equal(getattr(cache, name), getattr(twin, name), err_msg=f"{name} of layer {layer}")


X = inputs()
WHOLE = MODEL.new_sequence()
EXPECTED = run(MODEL, X, WHOLE, 0, LENGTH)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=LENGTH))
def test_cutting_the_prompt_anywhere_changes_nothing(sizes: list[int]) -> None:
    sequence, start = MODEL.new_sequence(), 0
    for size in [*sizes, LENGTH]:
        stop = min(start + size, LENGTH)
        if start == stop:
            break
        got = run(MODEL, X, sequence, start, stop)
        for layer, found in got.items():
            for what, array in found.items():
                np.testing.assert_array_equal(array, EXPECTED[layer][what][start:stop], err_msg=f"{what} {layer}")
        start = stop
    same_caches(sequence, WHOLE)


@pytest.mark.parametrize("ties", ["lowest-index", "torch-cpu"])
def test_selections_lie_among_the_visible_positions(ties) -> None:
    model = Reference(CONFIG, WEIGHTS, ties=ties)
    found = run(model, X, model.new_sequence(), 0, LENGTH)
    for layer, role in enumerate(CONFIG.roles):
        if role.ratio == 0:
            assert "selection" not in found[layer]
            continue
        visible = (np.arange(LENGTH) + 1) // role.ratio
        selection = found[layer]["selection"]
        assert (selection < visible[:, None]).all()
        if ties == "lowest-index" and layer != 5:  # layer 5 has candidates only, possibly fewer
            count = (selection >= 0).sum(1)
            np.testing.assert_array_equal(count, np.minimum(visible, CONFIG.index_topk))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, LENGTH - 1), st.integers(1, 5))
def test_tokens_taken_back_leave_no_trace(kept: int, chunk: int) -> None:
    sequence = MODEL.new_sequence()
    if kept:
        run(MODEL, X, sequence, 0, kept)
    other = inputs(seed=9)
    run(MODEL, other, sequence, kept, min(kept + 6, LENGTH), chunk)
    sequence.truncate(kept)
    got = run(MODEL, X, sequence, kept, LENGTH, chunk)
    for layer, found in got.items():
        np.testing.assert_array_equal(found["out"], EXPECTED[layer]["out"][kept:])
    same_caches(sequence, WHOLE)


@pytest.mark.parametrize("layers", [[0], [1], [2, 3], [4], [0, 4, 5], [2, 4, 5]])
def test_a_subset_gives_what_all_layers_give(layers: list[int]) -> None:
    model = Reference(CONFIG, WEIGHTS, layers)
    got = run(model, X, model.new_sequence(), 0, LENGTH, chunk=7)
    for layer in layers:
        np.testing.assert_array_equal(got[layer]["out"], EXPECTED[layer]["out"])


def test_a_bad_token_leaves_everything_before_it_as_it_was() -> None:
    x = X.copy()
    x[:, 20] = 0x7FC0
    got = run(MODEL, x, MODEL.new_sequence(), 0, LENGTH)
    for layer, found in got.items():
        np.testing.assert_array_equal(found["out"][:20], EXPECTED[layer]["out"][:20])
        assert np.isnan(bf16_decode(found["out"][20])).all()
        if "selection" in found:
            assert (found["selection"] < LENGTH).all()


def test_published_keys_are_the_own_ones_where_every_call_completes_a_group() -> None:
    model = Reference(CONFIG, WEIGHTS, keys="published")
    got = run(model, X[:, :30], model.new_sequence(), 0, 30, chunk=2)
    for layer, found in got.items():
        np.testing.assert_array_equal(found["out"], EXPECTED[layer]["out"][:30])


def test_published_keys_are_another_layers_in_the_middle_of_a_group() -> None:
    model = Reference(CONFIG, WEIGHTS, keys="published")
    sequence = model.new_sequence()
    run(model, X, sequence, 0, 30)
    assert sequence.published == 4
    fresh = model.new_sequence()
    run(model, X, fresh, 0, 3)
    fresh.truncate(0)
    assert fresh.published is None
    got = run(model, X, sequence, 30, 31)
    assert (got[2]["out"] != EXPECTED[2]["out"][30:]).any()
    np.testing.assert_array_equal(got[4]["out"], EXPECTED[4]["out"][30:])


def test_fast_accumulation_is_close() -> None:
    model = Reference(CONFIG, WEIGHTS, layers=[0], accumulate="f32")
    got = bf16_decode(run(model, X, model.new_sequence(), 0, LENGTH)[0]["out"])
    np.testing.assert_allclose(got, bf16_decode(EXPECTED[0]["out"]), rtol=0.1, atol=0.05)


def test_trace_rows_are_where_idx_points() -> None:
    trace: dict[str, Any] = {}
    model = Reference(CONFIG, WEIGHTS, [2])
    sequence = model.new_sequence()
    model.forward(2, X[2, :20], 0, sequence)
    model.forward(2, X[2, 20:25], 20, sequence, trace)
    assert trace["kv_rows"].shape == (7 + 5 + 12, CONFIG.head_dim)
    assert trace["idx"].shape == (5, CONFIG.window_size + CONFIG.index_topk)
    np.testing.assert_array_equal(trace["window"][0], np.arange(13, 21))
    np.testing.assert_array_equal(trace["idx"][0, :8], np.arange(8))
    picked = trace["selection"][0]
    np.testing.assert_array_equal(trace["idx"][0, 8:], np.where(picked >= 0, picked + 12, -1))


def test_layers_out_of_order_are_refused() -> None:
    sequence = MODEL.new_sequence()
    with pytest.raises(StepError, match=r"layer 3 reads.*layer 2.*in order"):
        MODEL.forward(3, X[3, :4], 0, sequence)
    with pytest.raises(StepError, match="layer 7 is not part"):
        MODEL.forward(7, X[3, :4], 0, sequence)


def test_tokens_that_do_not_follow_are_refused() -> None:
    sequence = MODEL.new_sequence()
    MODEL.forward(0, X[0, :4], 0, sequence)
    with pytest.raises(StateError, match=r"seen 4 tokens.*starts at position 5"):
        MODEL.forward(0, X[0, :1], 5, sequence)
    with pytest.raises(StateError, match="max_seq_len 64"):
        MODEL.forward(1, np.zeros((65, CONFIG.dim), np.uint16), 0, sequence)
    with pytest.raises(StateError, match="truncate"):
        sequence.truncate(5)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 63), np.uint16),
        np.zeros((2, 64), np.float32),
        np.zeros((0, 64), np.uint16),
        np.zeros(64, np.uint16),
    ],
)
def test_inputs_of_the_wrong_form_are_refused(x: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"expected bf16 bits \(uint16\) \[tokens >= 1, 64\]"):
        MODEL.forward(0, x, 0, MODEL.new_sequence())


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="ties 'random'"):
        Reference(CONFIG, WEIGHTS, ties="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keys 'mine'"):
        Reference(CONFIG, WEIGHTS, keys="mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layer 2 is missing"):
        Reference(CONFIG, WEIGHTS, layers=[3])


def test_a_missing_weight_is_named() -> None:
    model = Reference(CONFIG, {k: w for k, w in WEIGHTS.items() if "wkv" not in k})
    with pytest.raises(MissingTensor, match=r"layers\.0\.attn\.wkv\.weight"):
        model.forward(0, X[0, :1], 0, model.new_sequence())
