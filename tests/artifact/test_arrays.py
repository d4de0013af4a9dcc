"""Arrays of other libraries: taken over without a copy, as input, output and weights."""

import ml_dtypes
import numpy as np
import pytest

import ds41_tvm
from ds41_tvm import errors
from ds41_tvm.packing import aligned
from ds41_tvm.runtime.arrays import as_array


@pytest.fixture(scope="module")
def runner(tiny):
    return ds41_tvm.load(tiny.path)


class Foreign:
    """Nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **more):
        return self._array.__dlpack__(**more)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack_shares_memory():
    array = np.arange(24, dtype=np.uint16).reshape(4, 6)
    for view in (array, array[1:, ::2], array.T):
        got, name = as_array(Foreign(view), "x")
        assert name == "uint16"
        np.testing.assert_array_equal(got, view)
        assert np.shares_memory(got, array)
        assert got.ctypes.data == view.ctypes.data
    got, _ = as_array(Foreign(array), "x")
    kept = got[2:]
    del got
    array[3, 0] = 99
    assert kept[1, 0] == 99
    assert as_array(Foreign(np.zeros((0, 4), np.float32)), "x")[0].shape == (0, 4)


def test_number_formats_come_as_bits():
    for dtype, bits in ((ml_dtypes.bfloat16, np.uint16), (ml_dtypes.float8_e4m3fn, np.uint8)):
        array = np.ones(3, dtype)
        got, name = as_array(array, "x")
        assert got.dtype == bits
        assert name == array.dtype.name
        assert np.shares_memory(got, array)


@pytest.mark.parametrize("tokens", [1, 5, 48])
def test_output_buffers(runner, inputs, tokens):
    x = inputs(runner, 60, tokens)[0]
    sequence = runner.new_sequence()
    step = runner.step([(sequence, tokens)])
    expected = runner.forward(0, x, step).copy()
    places = [np.zeros_like(x), aligned(x.shape, np.uint16), np.zeros((tokens, 2 * x.shape[1]), np.uint16)[:, ::2]]
    for out in places:
        assert runner.forward(0, x, step, out=out) is out
        np.testing.assert_array_equal(out, expected)
    out = np.zeros(x.shape, ml_dtypes.bfloat16)
    runner.forward(0, Foreign(x), step, out=out)
    np.testing.assert_array_equal(out.view(np.uint16), expected)
    backing = np.zeros_like(x)
    foreign = Foreign(backing)
    assert runner.forward(0, x, step, out=foreign) is foreign
    np.testing.assert_array_equal(backing, expected)
    # Over its own input: x is read before out is written.
    same = aligned(x.shape, np.uint16)
    same[...] = x
    runner.forward(0, same, step, out=same)
    np.testing.assert_array_equal(same, expected)


def test_whole_row_tiles_are_used_in_place(runner, monkeypatch, inputs):
    whole = runner.rows_in_place(0)
    layer = runner._layers[0]
    seen = []
    real = layer.forward

    def watch(x, step, trace, out=None):
        seen.append((x.ctypes.data, None if out is None else out.ctypes.data))
        return real(x, step, trace, out)

    monkeypatch.setattr(layer, "forward", watch)
    for tokens, used in ((1, True), (whole, True), (whole + 1, False)):
        x, out = aligned((tokens, runner.config.dim), np.uint16), aligned((tokens, runner.config.dim), np.uint16)
        x[...] = inputs(runner, 61, tokens)[0]
        step = runner.step([(runner.new_sequence(), tokens)])
        runner.forward(0, Foreign(x), step, out=Foreign(out))
        assert (seen[-1] == (x.ctypes.data, out.ctypes.data)) == used
    odd = np.zeros(x.nbytes + 2, np.uint8)[2:].view(np.uint16).reshape(x.shape)[:1]
    step = runner.step([(runner.new_sequence(), 1)])
    runner.forward(0, odd, step, out=odd)
    assert seen[-1][0] != odd.ctypes.data


def test_bad_outputs(runner, inputs):
    x = inputs(runner, 62, 3)[0]
    step = runner.step([(runner.new_sequence(), 3)])
    locked = np.zeros_like(x)
    locked.flags.writeable = False
    for out, words in (
        (np.zeros((2, x.shape[1]), np.uint16), "out has shape"),
        (np.zeros(x.shape, np.float32), "out has dtype float32"),
        (locked, "read-only"),
        ("text", "out has dtype"),
    ):
        with pytest.raises(errors.InputError, match=words):
            runner.forward(0, x, step, out=out)
    assert not step.done


@pytest.mark.torch
def test_torch_tensors(tiny, runner, inputs):
    torch = pytest.importorskip("torch")
    x = inputs(runner, 63, 1)[0]
    tensor = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    out = torch.empty_like(tensor)
    step = runner.step([(runner.new_sequence(), 1)])
    expected = runner.forward(0, x, step).copy()
    assert runner.forward(0, tensor, step, out=out) is out
    np.testing.assert_array_equal(out.view(torch.int16).numpy().view(np.uint16), expected)
    assert as_array(tensor, "x")[0].ctypes.data == tensor.data_ptr()
    weights = {
        name: torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
        if a.dtype == np.uint16
        else torch.from_numpy(a.copy())
        for name, a in tiny.weights.items()
    }
    other = ds41_tvm.load(tiny.path, weights=weights)
    np.testing.assert_array_equal(other.forward(0, x, other.step([(other.new_sequence(), 1)])), expected)
