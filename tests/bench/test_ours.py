"""The compiled layers as a contestant: what is run and counted, not how fast."""

from __future__ import annotations

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.bench.fill import RandomRows, fill
from ds41_tvm.bench.profile import profile
from ds41_tvm.bench.watch import Watch
from ds41_tvm.bench.weights import RandomWeights
from ds41_tvm.compiler.build import compile_kernels
from ds41_tvm.config import AttentionConfig
from ds41_tvm.runtime.runner import Runner


def test_a_prompt_is_fed_in_chunks_and_every_layer_timed(ours):
    made = ours.prefill(20, 8)
    assert set(made.layers) == set(ours.layers)
    assert all(t > 0 for t in made.layers.values())
    assert made.plan > 0
    assert ours.runner.caches.rings.used == len(ours._sequences)  # the sequence of the prompt is closed


def test_decode_goes_on_from_the_prepared_context(ours):
    assert ours.prepare(2000, 3) == 2000
    assert [s.length for s in ours._sequences] == [1999] * 3
    for _ in range(3):
        ours.decode()
    assert [s.length for s in ours._sequences] == [2002] * 3
    assert sum(ours.state_bytes(n) for n in ours.layers) == sum(s.state_bytes() for s in ours._sequences)


def test_contexts_at_the_end_of_the_configuration_start_somewhat_shorter(ours, tiny):
    assert ours.prepare(tiny.max_seq_len, 1) == tiny.max_seq_len - 512
    ours._sequences[0].close()
    ours._sequences = [ours._filled(ours.runner, tiny.max_seq_len + 1)]  # nothing is left
    ours.decode()  # begins again
    assert ours._sequences[0].length == tiny.max_seq_len - 512


def test_kernels_are_noted_with_their_layer(ours):
    calls, timing = ours.kernels(100, 1, ("sparse_attention",), 4)
    attention = [call for call in calls if call.kernel.op == "sparse_attention"]
    assert sorted(call.layer for call in attention) == sorted(ours.layers)
    assert all(len(call.seconds) == 4 for call in attention)
    assert all(len(call.seconds) == 1 for call in calls if call.kernel.op != "sparse_attention")
    scored = {call.layer for call in calls if call.kernel.op == "index_scores"}
    assert scored == {r.layer for r in ours.config.roles if r.kind in ("full", "reindex")}
    assert set(timing.layers) == set(ours.layers)


def test_running_kernels_again_changes_no_result(ours, tiny):
    """Every operator repeated in place, at one token and at several: bits as without."""
    weights = RandomWeights(tiny, range(6), "bf16")
    kernels = ours.kernels_used
    functions = compile_kernels(kernels, ours.program.target)
    watch = Watch(again={kernel.op for kernel in kernels}, times=2)
    plain = Runner(ours.program, functions, weights)
    watched = Runner(ours.program, watch.wrap(functions, kernels), weights)
    for tokens in (1, 9):
        steps = []
        for runner in (plain, watched):
            sequence = fill(runner, 50, RandomRows(tiny, 0))
            step = runner.step([(sequence, tokens)])
            outs = [
                runner.forward(n, ds41_tvm.random_input("w", n, 0, 1, tokens, tiny.dim)[0], step) for n in runner.layers
            ]
            runner.commit(step)
            steps.append([*outs, *(sequence.window_cache(n) for n in runner.layers), sequence.compress_kv_cache(2)])
        assert all(np.array_equal(a, b) for a, b in zip(*steps, strict=True))
    assert watch.calls


def test_a_profile_accounts_for_all_of_a_layers_time(ours):
    parts = profile(ours, 64, 1, 2)
    for layer in ours.layers:
        mine = [part for part in parts if part.layer == layer]
        assert sum(part.share for part in mine) == pytest.approx(1)
        assert all(part.seconds > 0 for part in mine)
        assert {part.kernel for part in mine if part.calls == 0} == {"-"}
        names = [part.kernel for part in mine]
        assert any(name.startswith("sparse_attention") for name in names)
        assert len(names) == len(set(names))


@pytest.mark.parametrize("linear", ["bf16", "fp8"])
def test_random_weights_have_the_types_of_a_checkpoint_and_sane_values(linear):
    config = AttentionConfig.preset("flash")
    weights = RandomWeights(config, [2], linear)
    given = ds41_tvm.synthetic_weights(config, "s", [2], linear)
    assert set(weights) == set(given)
    assert len(weights) == len(given)
    from ds41_tvm.checkpoint import dequantize_block, scale_name
    from ds41_tvm.numerics.formats import bf16_decode

    for name in ("wkv", "indexer.wk", "q_norm"):
        name = f"layers.2.attn.{name}.weight"
        array = weights[name]
        assert array.dtype == given[name].dtype
        assert array.shape == given[name].shape
        if array.dtype == np.uint8:
            assert weights[scale_name(name)].shape == given[scale_name(name)].shape
            array = dequantize_block(array, weights[scale_name(name)])
        values = bf16_decode(array)
        assert np.isfinite(values).all()
        if values.ndim == 2:
            assert 0.25 < values.std() * values.shape[1] ** 0.5 < 4
            assert abs(values.mean()) < 0.1 * values.std()
        else:
            assert abs(values - 1).max() < 0.2
