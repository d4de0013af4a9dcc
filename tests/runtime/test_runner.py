"""Inputs, the order of calls, steps that no longer fit, and rows that are no numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError, InputError, MissingTensor, StepError, TargetError, WrongDtype, WrongShape
from ds41_tvm.numerics.formats import bf16_decode

BAD = (0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x7F01)  # NaNs and infinities


@pytest.fixture
def step(tiny: Any) -> Any:
    with tiny.runner.new_sequence() as sequence:
        yield tiny.runner.step([(sequence, 5)])


# ---- inputs


def odd_byte(x: np.ndarray) -> np.ndarray:
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    out = buffer[1:].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def read_only(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    out.flags.writeable = False
    return out


LAYOUTS = {
    "fortran": np.asfortranarray,
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every third column": lambda x: np.repeat(x, 3, axis=1)[:, ::3],
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "odd byte": odd_byte,
    "read-only": read_only,
    "masked array": np.ma.masked_array,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.uint16, ml_dtypes.bfloat16])
def test_any_layout_is_read_as_what_it_means(tiny: Any, step: Any, layout: str, dtype: Any) -> None:
    x = tiny.inputs(3, 5)[0]
    expected = tiny.runner.forward(0, x, step)
    given = LAYOUTS[layout](x.view(dtype))
    before = np.array(given).copy()
    got = tiny.runner.forward(0, given, step)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint16), expected)
    assert np.array(given).tobytes() == before.tobytes(), "the input was written to"


SWAPPED = np.dtype(ml_dtypes.bfloat16).newbyteorder(">")
WRONG = {
    "float32": lambda x: bf16_decode(x),
    "float16": lambda x: x.view(np.float16),
    "int16": lambda x: x.view(np.int16),
    "swapped uint16": lambda x: x.astype(">u2"),
    "swapped bf16": lambda x: x.view(ml_dtypes.bfloat16).astype(SWAPPED),
    "numbers": lambda x: x.tolist(),
    "objects": lambda x: x.astype(object),
    "text": lambda x: "x",
    "nothing": lambda x: None,
    "ragged": lambda x: [x[0], x[1][:3]],
    "transposed": lambda x: x.T,
    "flat": lambda x: x.reshape(-1),
    "one more axis": lambda x: x[None],
    "a row less": lambda x: x[:4],
    "a row more": lambda x: np.concatenate([x, x[:1]]),
    "a column less": lambda x: x[:, :-1],
    "bytes": lambda x: x.view(np.uint8),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_bf16_of_the_right_shape_is_refused(tiny: Any, step: Any, what: str) -> None:
    with pytest.raises(InputError, match="x "):
        tiny.runner.forward(0, WRONG[what](tiny.inputs(3, 5)[0]), step)
    assert not step.done


def test_torch_like_objects_that_numpy_cannot_read(tiny: Any, step: Any) -> None:
    class Tensor:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("Got unsupported ScalarType BFloat16")

    with pytest.raises(InputError, match="Tensor that NumPy cannot read"):
        tiny.runner.forward(0, Tensor(), step)


# ---- order of calls


@pytest.mark.parametrize("layer", [-1, 6, "0", None, 1.5])
def test_layers_that_are_not_there(tiny: Any, step: Any, layer: Any) -> None:
    with pytest.raises(StepError, match="not part of this runner"):
        tiny.runner.forward(layer, tiny.inputs(0, 5)[0], step)


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_layer_before_its_sources_is_refused_and_leaves_nothing(tiny: Any, tokens: int) -> None:
    x = tiny.inputs(0, tokens)
    with tiny.runner.new_sequence() as sequence:
        step = tiny.runner.step([(sequence, tokens)])
        for layer, source in ((3, 2), (5, 4)):
            with pytest.raises(StepError, match=f"layer {layer} reads what layer {source} leaves"):
                tiny.runner.forward(layer, x[layer], step)
        assert not step.done
        tiny.runner.forward(0, x[0], step)
        with pytest.raises(StepError, match=r"layers \[1, 2, 3, 4, 5\] have not run"):
            tiny.runner.commit(step)


def test_keys_of_a_layer_that_has_not_run_are_not_read() -> None:
    """Layer 1 has an indexer of its own and no candidates, and still reads the keys of layer 0."""
    config = AttentionConfig.preset("tiny").to_dict() | {
        "compress_ratios": [2, 2], "kv_source_layers": [0], "index_source_layers": [0, 1], "candidate_source_layer": -1,
    }  # fmt: skip
    config = AttentionConfig.from_dict(config)
    runner = ds41_tvm.build(config, ds41_tvm.synthetic_weights(config, "order"), block_rows=4, draft=6)
    step = runner.step([(runner.new_sequence(), 4)])
    with pytest.raises(StepError, match="layer 1 reads what layer 0 leaves"):
        runner.forward(1, np.zeros((4, config.dim), np.uint16), step)


def test_a_step_is_committed_once(tiny: Any) -> None:
    with tiny.runner.new_sequence() as sequence:
        _, step = tiny.feed(tiny.runner, [(sequence, tiny.inputs(0, 3))])
        for use in (lambda: tiny.runner.commit(step), lambda: tiny.runner.forward(0, tiny.inputs(0, 3)[0], step)):
            with pytest.raises(StepError, match="committed already"):
                use()
        assert sequence.length == 3


def test_something_else_than_a_step(tiny: Any) -> None:
    for thing in (None, 3, object()):
        with pytest.raises(StepError, match="not planned by this runner"):
            tiny.runner.forward(0, tiny.inputs(0, 1)[0], thing)
        with pytest.raises(StepError, match="not planned by this runner"):
            tiny.runner.commit(thing)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda s: [(s, -1)], "at least 0"),
        (lambda s: [(s, 1.0)], "at least 0"),
        (lambda s: [(s, True)], "at least 0"),
        (lambda s: [(s, None)], "at least 0"),
        (lambda s: [(s, 1), (s, 2)], "occurs twice"),
        (lambda s: [(None, 1)], "no sequence of this runner"),
        (lambda s: [s], "pairs"),
        (lambda s: 7, "pairs"),
    ],
)
def test_malformed_steps(tiny: Any, parts: Any, message: str) -> None:
    with tiny.runner.new_sequence() as sequence:
        with pytest.raises(StepError, match=message):
            tiny.runner.step(parts(sequence))
        step = tiny.runner.step([(sequence, np.int64(2))])
        assert step.tokens == 2


def names_of(trace: dict[str, Any]) -> dict[str, Any]:
    """Names, dtypes and shapes of a row of what every trace has; scores are as wide as the context."""
    arrays = {name: array for name, array in trace.items() if name not in ("kv_rows", "latent")}
    return {name: (array.dtype, array.shape[1:] if name != "scores" else ()) for name, array in arrays.items()}


def test_a_step_of_nothing(tiny: Any) -> None:
    with tiny.runner.new_sequence() as sequence:
        tiny.run(tiny.runner, sequence, tiny.inputs(0, 3))
        step, x = tiny.runner.step([(sequence, 2)]), tiny.inputs(1, 2)
        usual = {
            layer: names_of(tiny.runner.forward(layer, x[layer], step, trace=True)[1]) for layer in tiny.runner.layers
        }
        before = tiny.caches(sequence)
        for parts in ([], [(sequence, 0)]):
            step = tiny.runner.step(parts)
            for layer in tiny.runner.layers:
                out, trace = tiny.runner.forward(layer, np.zeros((0, tiny.config.dim), np.uint16), step, trace=True)
                assert out.shape == (0, tiny.config.dim)
                assert names_of(trace) == usual[layer], f"layer {layer}"
            tiny.runner.commit(step)
        assert sequence.length == 3
        for what, array in tiny.caches(sequence).items():
            np.testing.assert_array_equal(array, before[what], err_msg=what)


# ---- steps that no longer fit


def test_abandoned_steps_change_nothing(model: Any, same: Any) -> None:
    """At every length a step of random tokens and NaN is run and thrown away."""
    runner, x = model.runner, model.inputs(0, 17)
    with runner.new_sequence() as sequence:
        pieces = []
        for begin in range(17):
            other = model.inputs(50 + begin, 5)
            other[:, 2::2] = 0xFFFF
            model.feed(runner, [(sequence, other)], commit=False)
            pieces.append(model.feed(runner, [(sequence, x[:, begin : begin + 1])])[0][0])
            assert sequence.length == begin + 1
        same.results(same.join(pieces), model.alone(0, 17)[0])
        same.caches(model.caches(sequence), model.alone(0, 17)[1])


def test_of_two_steps_for_the_same_tokens_only_the_last_planned_lives(tiny: Any, same: Any) -> None:
    """They write the same cache rows: the older one could not be committed with its own."""
    runner = tiny.runner
    with runner.new_sequence() as sequence:
        tiny.run(runner, sequence, tiny.inputs(0, 8))
        _, older = tiny.feed(runner, [(sequence, tiny.inputs(1, 4))], commit=False)
        _, newer = tiny.feed(runner, [(sequence, tiny.inputs(2, 4))], commit=False)
        with pytest.raises(StepError, match="planned for, since"):
            runner.commit(older)
        runner.commit(newer)
        got = tiny.caches(sequence)
    with runner.new_sequence() as sequence:
        tiny.run(runner, sequence, tiny.inputs(0, 8))
        tiny.run(runner, sequence, tiny.inputs(2, 4))
        same.caches(got, tiny.caches(sequence))


def test_a_step_planned_before_a_truncation_cannot_write_into_freed_blocks(tiny: Any, same: Any) -> None:
    """The length is the same again, but the blocks that the step knows belong to another sequence by now."""
    runner = tiny.runner
    with runner.new_sequence() as one, runner.new_sequence() as other:
        tiny.run(runner, one, tiny.inputs(0, 8))
        _, stale = tiny.feed(runner, [(one, tiny.inputs(1, 8))], commit=False)
        one.truncate(7)
        tiny.run(runner, other, tiny.inputs(2, 9))
        before = tiny.caches(other)
        tiny.run(runner, one, tiny.inputs(3, 1))
        assert one.length == 8
        for layer in runner.layers:
            with pytest.raises(StepError, match="plan a new step"):
                runner.forward(layer, tiny.inputs(4, 8)[layer], stale)
        with pytest.raises(StepError, match="plan a new step"):
            runner.commit(stale)
        same.caches(tiny.caches(other), before)


def test_a_step_is_stale_once_its_sequence_has_moved_on(tiny: Any) -> None:
    runner = tiny.runner
    with runner.new_sequence() as sequence, runner.new_sequence() as other:
        step = runner.step([(sequence, 2), (other, 2)])
        tiny.run(runner, other, tiny.inputs(0, 1))
        with pytest.raises(StepError, match="sequence 1 of the step"):
            runner.forward(0, tiny.inputs(0, 4)[0], step)
        assert (sequence.length, other.length) == (0, 1)


# ---- rows that are no numbers


@pytest.mark.parametrize("bits", BAD)
def test_a_bad_row_stays_in_its_sequence(model: Any, same: Any, bits: int) -> None:
    """A batch of three, in two steps; the middle one has a bad row in each, all or in part."""
    runner, lengths = model.runners[max(model.runners)], (13, 11, 12)
    x = [model.inputs(seed, length) for seed, length in enumerate(lengths)]
    x[1][:, 4] = bits
    x[1][:, 9, ::3] = bits
    sequences = [runner.new_sequence() for _ in x]
    pieces: list[list[Any]] = [[] for _ in x]
    for cut in (slice(0, 6), slice(6, None)):
        same.poison(runner, sequences)
        found, _ = model.feed(runner, [(s, part[:, cut]) for s, part in zip(sequences, x, strict=True)])
        for mine, piece in zip(pieces, found, strict=True):
            mine.append(piece)
    for i in (0, 2):
        same.results(same.join(pieces[i]), model.alone(i, lengths[i])[0])
        same.caches(model.caches(sequences[i]), model.alone(i, lengths[i])[1])
    # Its own tokens before the bad one are as they were, and its selections are positions that exist.
    mine = same.join(pieces[1])
    same.results({k: {w: a[:4] for w, a in v.items()} for k, v in mine.items()}, model.alone(1, 11)[0], slice(0, 4))
    for layer, arrays in mine.items():
        if "topk" in arrays:
            visible = (np.arange(11) + 1) // model.config.compress_ratios[layer]
            assert (arrays["topk"] < visible[:, None]).all()
            assert (arrays["topk"] >= -1).all()
    for sequence in sequences:
        sequence.close()


def test_a_bad_token_makes_its_own_output_bad(model: Any) -> None:
    runner, x = model.runner, model.inputs(0, 6)
    x[:, 5] = 0x7FC0
    with runner.new_sequence() as sequence:
        found = model.run(runner, sequence, x)
    for layer, arrays in found.items():
        assert np.isnan(bf16_decode(arrays["out"][5])).all(), layer


# ---- building


def test_weights_that_do_not_fit(tiny: Any) -> None:
    name = "layers.2.attn.wkv.weight"
    weights = {n: np.asarray(tiny.weights[n]) for n in tiny.weights}
    for change, error in (
        (lambda w: w[:-1], WrongShape),
        (lambda w: w.T, WrongShape),
        (lambda w: bf16_decode(w), WrongDtype),
        (lambda w: w.astype(">u2"), WrongDtype),
        (lambda w: w.view(np.int16), WrongDtype),
    ):
        with pytest.raises(error, match=name):
            ds41_tvm.build(tiny.config, weights | {name: change(weights[name])}, block_rows=4, draft=6)
    del weights[name]
    with pytest.raises(MissingTensor, match=name):
        ds41_tvm.build(tiny.config, weights, block_rows=4, draft=6)


def test_weights_in_any_layout_and_as_bfloat16(tiny: Any, same: Any) -> None:
    weights: dict[str, Any] = {}
    for i, name in enumerate(tiny.weights):
        w = np.asarray(tiny.weights[name])
        w = [np.asfortranarray, odd_byte, read_only][i % 3](w)
        weights[name] = w.view(ml_dtypes.bfloat16) if w.dtype == np.uint16 and i % 2 else w
    runner = ds41_tvm.build(tiny.config, weights, block_rows=4, draft=6)
    with runner.new_sequence() as sequence:
        same.results(tiny.run(runner, sequence, tiny.inputs(0, 9)), tiny.alone(0, 9)[0])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keys": "mine"}, ConfigError),
        ({"ties": "first"}, ConfigError),
        ({"linear": "fp4"}, ConfigError),
        ({"block_rows": 0}, ConfigError),
        ({"draft": -1}, ConfigError),
        ({"layers": [5]}, ConfigError),
        ({"target": "gpu"}, TargetError),
        ({"target": "cpu:x86-64-v9"}, TargetError),
    ],
)
def test_options_that_mean_nothing(tiny: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ds41_tvm.build(tiny.config, tiny.weights, **({"block_rows": 4, "draft": 6} | options))
