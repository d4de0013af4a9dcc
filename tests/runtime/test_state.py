"""What sequences own: truncation, blocks, closing, and views in the official layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41_tvm.errors import StateError, StepError
from ds41_tvm.numerics.formats import bf16_decode

LENGTH, DRAFT = 33, 6
BAD = 0xFFFF  # a NaN


@settings(max_examples=15)
@given(st.data())
def test_tokens_taken_back_leave_no_trace(model: Any, same: Any, data: st.DataObject) -> None:
    """Random tokens are fed, some of them NaN, and taken back, up to the draft limit, several times over."""
    runner, x = model.runners[max(model.runners)], model.inputs(0, LENGTH)
    with runner.new_sequence() as sequence:
        pieces = []
        while sequence.length < LENGTH:
            begin = sequence.length
            end = min(LENGTH, begin + data.draw(st.integers(1, 11)))
            pieces.append(model.feed(runner, [(sequence, x[:, begin:end])])[0][0])
            wrong = model.inputs(data.draw(st.integers(100, 120)), data.draw(st.integers(0, DRAFT)))
            if wrong.shape[1]:
                wrong[:, 0, ::7] = data.draw(st.sampled_from([BAD, 0x3F80, 0]))
            model.run(runner, sequence, wrong, chunk=data.draw(st.integers(1, DRAFT)))
            sequence.truncate(end)
            if data.draw(st.booleans()):
                same.poison(runner, [sequence], back=0)
        same.results(same.join(pieces), model.alone(0, LENGTH)[0])
        same.caches(model.caches(sequence), model.alone(0, LENGTH)[1])


@pytest.mark.parametrize("length", [2, 3, 13, 24, 25, 26, 31])
@pytest.mark.parametrize("back", [1, 2, 3, DRAFT])
def test_the_last_right_tokens_can_be_taken_back_and_fed_again(model: Any, same: Any, length: int, back: int) -> None:
    """Also where rows that truncation keeps were the last to be safe: all others are poisoned first."""
    runner, x = model.runner, model.inputs(0, LENGTH)
    kept = max(0, length - back)
    with runner.new_sequence() as sequence:
        model.run(runner, sequence, x[:, :length])
        same.poison(runner, [sequence], back=length - kept)
        sequence.truncate(kept)
        assert sequence.length == kept
        same.results(model.run(runner, sequence, x[:, kept:], chunk=9), model.alone(0, LENGTH)[0], slice(kept, None))
        same.caches(model.caches(sequence), model.alone(0, LENGTH)[1])


@pytest.mark.parametrize("length", [8, 14, 20, 33])
def test_beyond_the_draft_limit_is_refused_and_changes_nothing(model: Any, same: Any, length: int) -> None:
    runner, x = model.runner, model.inputs(0, LENGTH)
    with runner.new_sequence() as sequence:
        model.run(runner, sequence, x[:, :length])
        before = model.caches(sequence)
        for target in (length - DRAFT - 1, 1):
            with pytest.raises(StateError, match=f"had {length} tokens to {target}"):
                sequence.truncate(target)
        assert sequence.length == length
        same.caches(model.caches(sequence), before)
        # The limit counts from the greatest length so far, not from the present one.
        sequence.truncate(length - 4)
        with pytest.raises(StateError, match="draft"):
            sequence.truncate(length - DRAFT - 1)
        sequence.truncate(length - DRAFT)
        same.results(
            model.run(runner, sequence, x[:, length - DRAFT :]), model.alone(0, LENGTH)[0], slice(length - DRAFT, None)
        )


def test_everything_can_be_taken_back(model: Any, same: Any) -> None:
    runner = model.runner
    with runner.new_sequence() as sequence:
        model.run(runner, sequence, model.inputs(7, 30))
        sequence.truncate(0)
        same.poison(runner, [sequence])
        same.results(model.run(runner, sequence, model.inputs(0, LENGTH)), model.alone(0, LENGTH)[0])
        same.caches(model.caches(sequence), model.alone(0, LENGTH)[1])


@pytest.mark.parametrize("length", [-1, 6, 2.0, None, "3", True, np.float32(1)])
def test_impossible_lengths(tiny: Any, length: Any) -> None:
    with tiny.runner.new_sequence() as sequence:
        tiny.run(tiny.runner, sequence, tiny.inputs(0, 5))
        with pytest.raises(StateError, match="expected an integer from 0 to the length, 5"):
            sequence.truncate(length)
        sequence.truncate(np.int32(5))
        assert sequence.length == 5


def test_blocks_of_closed_sequences_are_used_again(model: Any, same: Any) -> None:
    """Forty sequences, NaN in every other one, need no more memory than two."""
    runner = model.runner
    used = [pool.used for pool in runner.caches.blocks.values()]
    sizes = None
    for i in range(10):
        with runner.new_sequence() as bad, runner.new_sequence() as good:
            x = model.inputs(0, LENGTH)
            wrong = np.full_like(x, BAD)
            found = model.feed(runner, [(bad, wrong), (good, x)])[0][1]
            same.results(found, model.alone(0, LENGTH)[0])
            same.caches(model.caches(good), model.alone(0, LENGTH)[1])
        same.poison(runner, [])
        now = [len(next(iter(pool.arrays.values()))) for pool in runner.caches.blocks.values()]
        sizes = sizes or now
        assert now == sizes, f"memory grew in round {i}"
    assert [pool.used for pool in runner.caches.blocks.values()] == used


def test_pools_grow_under_running_sequences(tiny: Any, same: Any) -> None:
    """Sequences opened one after the other, each fed a little more in every step."""
    import ds41_tvm

    runner = ds41_tvm.build(tiny.config, tiny.weights, block_rows=4, draft=6, threads=1)
    x = [tiny.inputs(seed, 24) for seed in range(8)]
    sequences: list[Any] = []
    pieces: list[list[Any]] = [[] for _ in range(8)]
    for round_ in range(8 + 8):
        if round_ < 8:
            sequences.append(runner.new_sequence())
        parts = [(s, x[i][:, s.length : s.length + 3]) for i, s in enumerate(sequences)]
        for i, found in enumerate(tiny.feed(runner, parts)[0]):
            pieces[i].append(found)
    for seed in range(8):
        expected, caches = tiny.alone(seed, 24)
        same.results(same.join(pieces[seed]), expected)
        same.caches(tiny.caches(sequences[seed], runner), caches)


def test_a_closed_sequence_is_refused_everywhere(tiny: Any) -> None:
    runner = tiny.runner
    sequence = runner.new_sequence()
    step = runner.step([(sequence, 2)])
    sequence.close()
    sequence.close()
    assert "closed" in repr(sequence)
    x = tiny.inputs(0, 2)
    for use in (
        lambda: sequence.truncate(0),
        lambda: sequence.window_cache(0),
        lambda: sequence.index_k_cache(2),
        lambda: runner.step([(sequence, 1)]),
        lambda: runner.forward(0, x[0], step),
        lambda: runner.commit(step),
    ):
        with pytest.raises(StateError, match="closed"):
            use()


def test_no_more_tokens_than_max_seq_len(tiny: Any, same: Any) -> None:
    runner, limit = tiny.runner, tiny.config.max_seq_len
    with runner.new_sequence() as sequence:
        with pytest.raises(StateError, match="exceed max_seq_len 64"):
            runner.step([(sequence, limit + 1)])
        whole = tiny.run(runner, sequence, tiny.inputs(0, limit))
        assert sequence.length == limit
        with pytest.raises(StateError, match="1 tokens after 64"):
            runner.step([(sequence, 1)])
    with runner.new_sequence() as sequence:
        same.results(tiny.run(runner, sequence, tiny.inputs(0, limit), chunk=7), whole)


def test_views_have_the_official_layout(tiny: Any) -> None:
    runner, c = tiny.runner, tiny.config
    with runner.new_sequence() as sequence:
        assert not sequence.window_cache(0).any()
        assert sequence.compress_kv_cache(2).shape == (0, c.head_dim)
        tiny.run(runner, sequence, tiny.inputs(0, 5))
        assert sequence.window_cache(0).shape == (c.window_size, c.head_dim)
        assert not sequence.window_cache(0)[5:].any()
        assert (bf16_decode(sequence.window_cache(0)[:5]) != 0).any(1).all()
        first = sequence.window_cache(3)
        tiny.run(runner, sequence, tiny.inputs(1, 6))
        # 11 tokens: positions 8..10 replaced 0..2 in a window of 8; positions 3 and 4 are still there.
        now = sequence.window_cache(3)
        np.testing.assert_array_equal(now[3:5], first[3:5])
        assert (now[:3] != first[:3]).any(1).all()
        assert sequence.compress_kv_cache(2).shape == (5, c.head_dim)
        assert sequence.index_k_cache(4).shape == (11, c.index_head_dim)


@pytest.mark.parametrize("layer", [-1, 0, 3, 5, 6, "2"])
def test_views_of_layers_without_such_a_cache(tiny: Any, layer: Any) -> None:
    with tiny.runner.new_sequence() as sequence:
        with pytest.raises(StateError, match="expected one of"):
            sequence.compress_kv_cache(layer)
        with pytest.raises(StateError, match="expected one of"):
            sequence.index_k_cache(layer)
        if layer in (-1, 6, "2"):
            with pytest.raises(StateError, match="expected one of"):
                sequence.window_cache(layer)


def test_state_bytes_follow_the_context(tiny: Any) -> None:
    """Blocks of 4 rows: one more of ratio 2 every 8 tokens, of ratio 1 every 4."""
    runner = tiny.runner
    latent, key, row = 32 // 2 + 32 // 16, 32 // 2 + 32 // 32, 32 + 1
    ring = 6 * (8 + DRAFT) * row + (2 + DRAFT) * 2 * 32 * 4
    with runner.new_sequence() as sequence:
        assert sequence.state_bytes() == ring
        tiny.run(runner, sequence, tiny.inputs(0, 9))
        assert sequence.state_bytes() == ring + (1 + 3) * 4 * (latent + key)
        sequence.truncate(8)
        assert sequence.state_bytes() == ring + (1 + 2) * 4 * (latent + key)


def test_a_step_of_another_runner_or_sequence_is_refused(tiny: Any, odd: Any) -> None:
    mine, other = tiny.runners[1], odd.runner
    with mine.new_sequence() as sequence:
        with pytest.raises(StepError, match="no sequence of this runner"):
            other.step([(sequence, 1)])
        step = mine.step([(sequence, 1)])
        for use in (lambda: other.forward(4, odd.inputs(0, 1)[4], step), lambda: other.commit(step)):
            with pytest.raises(StepError, match="not planned by this runner"):
                use()
