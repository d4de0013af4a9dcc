"""A token's result has the same bits however its prompt is cut, whatever runs beside it, on any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = (37, 22, 9)
COUNTS = st.lists(st.integers(0, 6), min_size=3, max_size=3)
STEPS = st.lists(st.tuples(st.permutations([0, 1, 2]), COUNTS), max_size=12)


@settings(max_examples=12)
@given(steps=STEPS, threads=st.sampled_from([1, 2]), last=st.permutations([0, 1, 2]))
def test_chunks_batches_and_threads_change_nothing(
    model: Any, same: Any, steps: Any, threads: int, last: list[int]
) -> None:
    """Between the steps, every cache row that no one may read and all scratch memory become NaN patterns."""
    runner = model.runners[min(threads, max(model.runners))]
    x = [model.inputs(seed, length) for seed, length in enumerate(LENGTHS)]
    sequences = [runner.new_sequence() for _ in LENGTHS]
    pieces: list[list[Any]] = [[] for _ in LENGTHS]
    for order, counts in [*steps, (last, LENGTHS)]:
        parts = []
        for i in order:
            begin = sequences[i].length
            parts.append((sequences[i], x[i][:, begin : min(begin + counts[i], LENGTHS[i])]))
        same.poison(runner, sequences)
        for i, found in zip(order, model.feed(runner, parts)[0], strict=True):
            pieces[i].append(found)
    for i, length in enumerate(LENGTHS):
        expected, caches = model.alone(i, length)
        same.results(same.join(pieces[i]), expected)
        same.caches(model.caches(sequences[i]), caches)
    for sequence in sequences:
        sequence.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_token_by_token(model: Any, same: Any, threads: int) -> None:
    runner = model.runners[min(threads, max(model.runners))]
    for seed, length in enumerate(LENGTHS):
        with runner.new_sequence() as sequence:
            same.results(model.run(runner, sequence, model.inputs(seed, length), chunk=1), model.alone(seed, length)[0])
            same.caches(model.caches(sequence), model.alone(seed, length)[1])


def test_a_step_without_trace_gives_the_traced_output(model: Any) -> None:
    runner, x = model.runner, model.inputs(0, LENGTHS[0])
    with runner.new_sequence() as sequence:
        step = runner.step([(sequence, LENGTHS[0])])
        for layer in runner.layers:
            np.testing.assert_array_equal(
                runner.forward(layer, x[layer], step), model.alone(0, LENGTHS[0])[0][layer]["out"]
            )


def test_scores_in_pieces_give_the_same(model: Any, same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the scores of 40 columns: one query at a time for most, several for short ones."""
    monkeypatch.setattr("ds41_tvm.runtime.device.Host.score_bytes", 80)
    with model.runner.new_sequence() as sequence:
        same.results(model.run(model.runner, sequence, model.inputs(0, LENGTHS[0])), model.alone(0, LENGTHS[0])[0])


def test_many_runs_on_changing_thread_counts(model: Any, same: Any) -> None:
    x = model.inputs(1, LENGTHS[1])
    for repeat in range(20):
        runner = model.runners[max(model.runners) if repeat % 3 else 1]
        with runner.new_sequence() as sequence:
            same.results(model.run(runner, sequence, x), model.alone(1, LENGTHS[1])[0])


@pytest.mark.parametrize("layers", [[4], [0, 1], [0, 1, 2, 4], [3], [5, 6], [7, 8, 9]])
def test_a_subset_of_layers_gives_what_all_give(odd: Any, same: Any, layers: list[int]) -> None:
    import ds41_tvm

    expected, _ = odd.alone(0, LENGTHS[0])
    runner = ds41_tvm.build(odd.config, odd.weights, layers=layers, block_rows=4, draft=6)
    assert runner.layers == tuple(layers)
    with runner.new_sequence() as sequence:
        got = odd.run(runner, sequence, odd.inputs(0, LENGTHS[0]), chunk=10)
    assert sorted(got) == layers
    same.results(got, expected)
