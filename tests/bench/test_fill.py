"""Sequences filled for measurements are the sequences that a prompt would have made."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.bench.fill import RandomRows, fill, random_rows, state_bytes
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import StateError
from ds41_tvm.numerics import formats
from ds41_tvm.program import Program
from ds41_tvm.runtime.persist import stored_rows
from ds41_tvm.runtime.state import Caches, Sequence
from ds41_tvm.target import parse_target

CONFIG = msgspec.structs.replace(AttentionConfig.preset("tiny"), max_seq_len=1 << 16)


@pytest.fixture(scope="module")
def runner():
    return ds41_tvm.build(CONFIG, ds41_tvm.synthetic_weights(CONFIG, "fill"))


def feed(runner, sequence, tokens, step=0):
    outs = []
    planned = runner.step([(sequence, tokens)])
    for layer in runner.layers:
        x = ds41_tvm.random_input("fill", layer, step, 1, tokens, CONFIG.dim)[0]
        outs.append(runner.forward(layer, x, planned, trace=True))
    runner.commit(planned)
    return outs


@pytest.mark.parametrize("length", [1, 2, 9, 130])
def test_a_filled_sequence_decodes_as_one_that_ran_its_prompt(runner, length):
    with runner.new_sequence() as real:
        feed(runner, real, length)
        places = stored_rows(runner.caches, real)
        rows = {name: np.array(pool.read(key, where)) for name, (pool, key, where) in places.items()}
        given = []

        def row(name, count):
            given.append(name)
            return rows[name][:count]

        with fill(runner, length, row) as filled:
            assert sorted(given) == sorted(rows)
            assert filled.length == real.length
            assert filled.published == real.published or real.length < 2
            for step in (1, 2, 3):  # completes groups of both ratios on the way
                for (a, trace), (b, other) in zip(
                    feed(runner, real, 1, step), feed(runner, filled, 1, step), strict=True
                ):
                    assert np.array_equal(a, b)
                    assert trace.keys() == other.keys()
                    for name in ("selection", "q", "o", "scores"):
                        if name in trace:
                            assert np.array_equal(trace[name], other[name])
            for layer in runner.layers:
                assert np.array_equal(real.window_cache(layer), filled.window_cache(layer))
            assert real.state_bytes() == filled.state_bytes()


def test_other_rows_give_another_result(runner):
    """The comparison above can fail: a filled sequence depends on its rows."""
    with fill(runner, 20, RandomRows(CONFIG, 1)) as a, fill(runner, 20, RandomRows(CONFIG, 2)) as b:
        for (x, _), (y, _) in zip(feed(runner, a, 1), feed(runner, b, 1), strict=True):
            assert not np.array_equal(x, y)


def test_random_rows_are_plausible():
    random = np.random.default_rng(0)
    for kind, unpack, decode, dim in (
        ("window", formats.unpack_window_row, formats.dequantize_window, 512),
        ("latent", formats.unpack_latent_row, formats.dequantize_latent, 512),
        ("key", formats.unpack_index_row, formats.dequantize_index, 128),
    ):
        made = random_rows(AttentionConfig.preset("flash"), random, kind, 300)
        values = formats.bf16_decode(decode(*unpack(made, dim)))
        assert values.shape == (300, dim)
        assert np.isfinite(values).all()
        assert 0.5 < values.std() < 3
        assert abs(values.mean()) < 0.1
    assert random_rows(CONFIG, random, "members", 3).shape == (3, 2, CONFIG.head_dim)


@pytest.mark.parametrize("length", [0, CONFIG.max_seq_len + 1])
def test_impossible_lengths_are_refused(runner, length):
    with pytest.raises(StateError, match=f"expected 1 to max_seq_len, {CONFIG.max_seq_len}"):
        fill(runner, length, RandomRows(CONFIG, 0))


def test_state_bytes_by_layer_are_those_of_the_sequence(runner):
    with fill(runner, 20, RandomRows(CONFIG, 0)) as sequence:
        assert sum(state_bytes(runner.caches, sequence, n) for n in runner.layers) == sequence.state_bytes()


def test_a_million_tokens_take_890_bytes_each_over_the_released_stack():
    """State of one sequence over all 40 layers, counted from the arrays that the pools really hold."""
    config = AttentionConfig.preset("flash")
    caches = Caches(Program(config=config, layers=tuple(range(40)), target=parse_target("cpu")))
    tokens = 1 << 20
    with Sequence(caches) as sequence:
        empty = sequence.state_bytes()
        sequence.reserve(tokens)
        assert sequence.state_bytes() - empty <= 890 * tokens
        assert empty < 5 << 20  # rings: whatever the length
        held = sum(array.nbytes for pool in caches.blocks.values() for array in pool.arrays.values())
        # Capacity doubles; pages beyond the rows in use take no memory.
        assert sequence.state_bytes() - empty <= held <= 2.01 * 890 * tokens


def test_scratch_memory_does_not_grow_with_prompt_times_context(monkeypatch):
    """A chunk behind a long context holds the scores of a few queries at a time, not of all."""
    runner = ds41_tvm.build(CONFIG, ds41_tvm.synthetic_weights(CONFIG, "fill"))
    monkeypatch.setattr(runner.device, "score_bytes", 8192)
    peaks, tokens, contexts = [], 32, (4096, 32768)
    for context in contexts:
        with fill(runner, context, RandomRows(CONFIG, 0)) as sequence:
            step = runner.step([(sequence, tokens)])
            tracemalloc.start()
            for layer in runner.layers:
                runner.forward(layer, ds41_tvm.random_input("fill", layer, 0, 1, tokens, CONFIG.dim)[0], step)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    one_query = 2 * contexts[1]
    all_queries = tokens * one_query
    assert peaks[1] - peaks[0] < 6 * one_query < all_queries / 4
    assert runner.workspace.nbytes < all_queries / 4
