"""The runner on a device whose memory the host cannot reach: whole layers give the bits that the host gives.

The recorded cases run on it in `test_golden_cases`.
"""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds41_tvm.compiler.build import compile_program
from ds41_tvm.errors import CaptureError, HostAccess, InputError, StateError, StepError, UsageError
from ds41_tvm.runtime.device_array import DeviceArray
from ds41_tvm.runtime.device_base import STAGES, block_size, stream_handle
from ds41_tvm.runtime.device_emulated import Emulated, hidden
from ds41_tvm.runtime.runner import Runner

LENGTHS = (37, 22, 9)


def emulated(model: Any, **options: Any) -> Runner:
    """The model's runner on an emulated device of its own: the same kernels, split as two threads split them."""
    program = model.runner.program
    return Runner(program, compile_program(program), model.weights, device=Emulated(2), **options)


def poison(runner: Runner, live: list[Any]) -> None:
    """Scratch memory and every cache row that nobody may read become NaN patterns; as `poison` of the host's tests."""
    caches, window, device = runner.caches, runner.config.window_size, runner.device

    def fill(pool: Any, keep: list[np.ndarray]) -> None:
        for array in pool.arrays.values():
            content = device.download(array)
            bad = np.ones(len(content), bool)
            bad[: pool.unit] = False
            for rows in keep:
                bad[rows] = False
            content.view(np.uint8).reshape(len(content), -1)[bad] = 0xFF
            device.scatter(array, np.arange(len(content)), content)

    def ring(pool: Any, slot: int, first: int, length: int) -> np.ndarray:
        return slot * pool.unit + np.arange(max(0, first), length) % pool.unit

    fill(caches.rings, [ring(caches.rings, s.slot, s.length - window, s.length) for s in live])
    for ratio, pool in caches.members.items():
        fill(pool, [ring(pool, s.member_slots[ratio], s.length // ratio * ratio, s.length) for s in live])
    for ratio, pool in caches.blocks.items():
        fill(pool, [s.rows(ratio, np.arange(s.length // ratio)) for s in live])
    runner.workspace.fill(0xFF)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_chunks_and_batches_give_the_bits_of_the_host(model: Any, same: Any, seed: int) -> None:
    """Random cuts of three sequences, everything unused poisoned in between, against each alone on the host."""
    rng, runner = np.random.default_rng(seed), emulated(model)
    runner.device.score_bytes = 80 if seed == 3 else 1 << 20
    x = [model.inputs(i, length) for i, length in enumerate(LENGTHS)]
    sequences = [runner.new_sequence() for _ in LENGTHS]
    pieces: list[list[Any]] = [[] for _ in LENGTHS]
    while any(s.length < length for s, length in zip(sequences, LENGTHS, strict=True)):
        parts, order = [], rng.permutation(3)
        for i in order:
            begin = sequences[i].length
            parts.append((sequences[i], x[i][:, begin : begin + int(rng.integers(0, 9))]))
        poison(runner, sequences)
        for i, found in zip(order, model.feed(runner, parts)[0], strict=True):
            pieces[i].append(found)
    for i, length in enumerate(LENGTHS):
        expected, caches = model.alone(i, length)
        same.results(same.join(pieces[i]), expected)
        same.caches(model.caches(sequences[i], runner), caches)


def test_saved_sequences_move_between_host_and_device(tiny: Any, same: Any, tmp_path: Path) -> None:
    runner = emulated(tiny)
    x, (expected, caches) = tiny.inputs(0, LENGTHS[0]), tiny.alone(0, LENGTHS[0])
    first = runner.new_sequence()
    tiny.run(runner, first, x[:, :20])
    first.save(tmp_path / "device")
    host = tiny.runner.restore(tmp_path / "device")
    same.results(tiny.run(tiny.runner, host, x[:, 20:30]), expected, slice(20, 30))
    host.save(tmp_path / "host")
    host.close()
    again = runner.restore(tmp_path / "host")
    same.results(tiny.run(runner, again, x[:, 30:]), expected, slice(30, None))
    same.caches(tiny.caches(again, runner), caches)
    again.truncate(34)
    same.results(tiny.run(runner, again, x[:, 34:]), expected, slice(34, None))


# ---- decode steps: what happens in them, and as graphs


def decoding(model: Any, runner: Runner, seed: int, prompt: int) -> SimpleNamespace:
    """A sequence with a prompt, and buffers for inputs and outputs of single tokens on the device."""
    sequence, x = runner.new_sequence(), model.inputs(seed, LENGTHS[0])
    model.run(runner, sequence, x[:, :prompt])
    shape = (1, runner.config.dim)
    buffers = [{layer: runner.device.empty(shape, np.uint16) for layer in runner.layers} for _ in range(2)]
    return SimpleNamespace(sequence=sequence, x=x, given=buffers[0], out=buffers[1])


def feed(runner: Runner, d: SimpleNamespace) -> None:
    """The next token's inputs, written over the last one's."""
    for layer, array in d.given.items():
        runner.device.scatter(array, np.arange(1), d.x[layer, d.sequence.length, None])


def outputs(runner: Runner, d: SimpleNamespace) -> dict[int, np.ndarray]:
    return {layer: runner.device.download(array) for layer, array in d.out.items()}


def test_a_warm_decode_step_takes_no_memory_and_waits_for_nothing(model: Any) -> None:
    runner = emulated(model)
    d = decoding(model, runner, 0, 20)
    expected, _ = model.alone(0, LENGTHS[0])
    for token in range(20, LENGTHS[0]):
        feed(runner, d)
        step = runner.step([(d.sequence, 1)])
        if token < 20 + 8:  # every number of completed groups of ratios up to 8 has been seen then
            for layer in runner.layers:
                runner.forward(layer, d.given[layer], step, out=d.out[layer])
            runner.commit(step)
        else:
            queued = len(runner.device.queue)
            with runner.device.frozen():
                for layer in runner.layers:
                    assert runner.forward(layer, d.given[layer], step, out=d.out[layer]) is d.out[layer]
                runner.commit(step)
            assert len(runner.device.queue) > queued + 10 * len(runner.layers)
        for layer, out in outputs(runner, d).items():
            np.testing.assert_array_equal(out, expected[layer]["out"][token, None], err_msg=f"{layer} at {token}")


def test_the_frozen_device_notices() -> None:
    device = Emulated()
    with device.frozen():
        with pytest.raises(AssertionError, match="memory were taken"):
            device.empty((3,), np.uint8)
        with pytest.raises(AssertionError, match="waited"):
            device.synchronize()


def next_step(runner: Runner, graphs: list[Any], d: SimpleNamespace) -> tuple[Any, Any]:
    """A step of one token and the graph that runs it, if there is one."""
    for graph in graphs:
        try:
            step = graph.step([(d.sequence, 1)])
        except StepError:
            continue
        if graph.fits(step):
            return step, graph
    return runner.step([(d.sequence, 1)]), None


def test_graphs_of_a_decode_step(model: Any) -> None:
    """One graph for every number of groups that a step completes; replayed on, they give the bits of single calls."""
    runner = emulated(model)
    d = decoding(model, runner, 0, 8)
    expected, caches = model.alone(0, LENGTHS[0])
    graphs: list[Any] = []
    shapes: set[Any] = set()
    replays = 0
    for token in range(8, LENGTHS[0]):
        feed(runner, d)
        step, graph = next_step(runner, graphs, d)
        shape = runner.signature(step)
        if graph is None and shape[:2] in shapes:
            graph = runner.capture(step, d.given, d.out)
            assert not step.done
            graphs.append(graph)
        if graph is None:
            for layer in runner.layers:
                runner.forward(layer, d.given[layer], step, out=d.out[layer])
            shapes.add(shape[:2])
            runner.commit(step)
        else:
            replays += 1
            with runner.device.frozen():
                graph.replay(step)
                runner.commit(step)
        for layer, out in outputs(runner, d).items():
            np.testing.assert_array_equal(out, expected[layer]["out"][token, None], err_msg=f"{layer} at {token}")
    assert len(graphs) > 1
    assert replays > 10
    got = model.caches(d.sequence, runner)
    for what, array in caches.items():
        np.testing.assert_array_equal(got[what], array, err_msg=what)


def test_graphs_that_do_not_fit(tiny: Any) -> None:
    runner = emulated(tiny)
    d = decoding(tiny, runner, 0, 9)
    cold = emulated(tiny)  # has no scratch memory yet
    step = cold.step([(cold.new_sequence(), 1)])
    given = {layer: cold.device.empty((1, cold.config.dim), np.uint16) for layer in cold.layers}
    with pytest.raises(CaptureError, match="run a step of the same shape once before"):
        cold.capture(step, given, given)
    assert not step.done
    step = runner.step([(d.sequence, 1)])
    for layer in runner.layers:
        runner.forward(layer, d.given[layer], step, out=d.out[layer])
    runner.commit(step)
    step = runner.step([(d.sequence, 1)])
    with pytest.raises(InputError, match=r"x\[0\] cannot be used where it lies"):
        runner.capture(step, {**d.given, 0: d.x[0, 10, None]}, d.out)
    with pytest.raises(InputError, match="out has no array for layer 3"):
        runner.capture(step, d.given, {layer: d.out[layer] for layer in range(3)})
    graph = runner.capture(step, d.given, d.out)
    two = runner.step([(d.sequence, 2)])
    with pytest.raises(CaptureError, match="captured for the signature"):
        graph.replay(two)
    with pytest.raises(StepError, match="not like the given one"):
        graph.step([(d.sequence, 2)])
    other = runner.new_sequence()
    same_shape = [graph.step([(sequence, 1)]) for sequence in (d.sequence, d.sequence)]
    with pytest.raises(StepError, match="has its memory now"):
        runner.forward(0, d.given[0], same_shape[0])
    with pytest.raises(StepError, match="not planned by this runner"):
        runner.step([(other, 1)], like=tiny.runner.step([]))
    with pytest.raises(UsageError, match="graphs are captured on a device"):
        tiny.runner.capture(tiny.runner.step([]), {}, {})


# ---- arrays of a device


@pytest.mark.parametrize(
    "use",
    [
        lambda a: np.asarray(a), lambda a: a + 1, lambda a: a[0], lambda a: a[::2], lambda a: list(a),
        lambda a: float(a), lambda a: np.zeros((3, 4), np.float32).__setitem__(slice(None), a),
    ],
)  # fmt: skip
def test_the_host_cannot_read_values(use: Any) -> None:
    array = Emulated().zeros((3, 4), np.float32)
    with pytest.raises((HostAccess, TypeError)):
        use(array)


def test_views_share_memory() -> None:
    device = Emulated()
    values = np.arange(24, dtype=np.uint32).reshape(4, 6)
    array = device.upload(values)
    assert (len(array), array.shape, array.ndim, array.nbytes) == (4, (4, 6), 2, 96)
    np.testing.assert_array_equal(device.download(array[1:3]), values[1:3])
    np.testing.assert_array_equal(device.download(array[-1:]), values[-1:])
    np.testing.assert_array_equal(device.download(array[3:1]), values[3:1])
    np.testing.assert_array_equal(device.download(array.reshape(2, -1, 3)), values.reshape(2, -1, 3))
    np.testing.assert_array_equal(device.download(array[1:].view(np.uint8)), values[1:].view(np.uint8))
    np.testing.assert_array_equal(device.download(array[:0].reshape(0, 3, 2)), values[:0].reshape(0, 3, 2))
    with pytest.raises(ValueError, match="24 values"):
        array.reshape(5, 5)
    with pytest.raises(ValueError, match="equal shapes"):
        device.copy(array, array[1:])
    with pytest.raises(AttributeError):
        _ = array.__cuda_array_interface__
    device.fill(array[2:], 0xFF)
    device.copy(array[:1], array[3:])
    np.testing.assert_array_equal(device.download(array)[:, 0], [2**32 - 1, 6, 2**32 - 1, 2**32 - 1])


def test_memory_is_reused_in_order() -> None:
    """A block goes back when the last array of it goes, and what was asked for before still finds its content."""
    device = Emulated()
    array = device.upload(np.arange(100, dtype=np.int64))
    part, target = array[50:], device.empty((50,), np.int64)
    device.copy(target, part)
    address = array.address
    del array
    gc.collect()
    other = device.empty((100,), np.int64)
    assert other.address != address, "a view still uses it"
    del part
    gc.collect()
    again = device.empty((100,), np.int64)
    assert again.address == address
    assert (device.download(again.view(np.uint8)) == 0xFF).all(), "what is handed back is not kept"
    np.testing.assert_array_equal(device.download(target), np.arange(50, 100))


def test_block_sizes() -> None:
    sizes = [1, 256, 257, 5000, 1 << 20, (1 << 20) + 1, 3 << 20, 10**9]
    for size in sizes:
        found = block_size(size)
        assert size <= found <= max(256, 2 * size)
        assert found % 256 == 0
        assert block_size(found) == found
    assert block_size(10**9) < 1.2e9


def test_packed_uploads_keep_their_content_until_they_ran() -> None:
    """More uploads than buffers on the host, all planned before the first one runs."""
    device = Emulated()
    placed = [
        device.place({"a": np.full(7, i), "b": np.full((3, 100 * i), i, np.float32)}, {"c": ((5,), np.uint8)})
        for i in range(3 * STAGES)
    ]
    for i, arrays in enumerate(placed):
        assert (device.download(arrays["a"]) == i).all()
        assert (device.download(arrays["b"]) == i).all()
        assert arrays["c"].shape == (5,)
        assert all(array.address % 64 == 0 for array in arrays.values())
    again = device.place({"a": np.full(7, 9), "b": np.zeros((3, 0), np.float32)}, {"c": ((5,), np.uint8)}, placed[0])
    assert again["a"].address == placed[0]["a"].address
    assert (device.download(placed[0]["a"]) == 9).all()


class Foreign:
    """An array of another library, which shares its memory through DLPack only."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()


def test_inputs_and_outputs_through_dlpack(tiny: Any) -> None:
    runner, expected = emulated(tiny), tiny.alone(0, LENGTHS[0])[0]
    x = tiny.inputs(0, LENGTHS[0])
    with runner.new_sequence() as sequence:
        step = runner.step([(sequence, LENGTHS[0])])
        for layer in runner.layers:
            out = np.full((LENGTHS[0], runner.config.dim), 7, np.uint16)
            given = Foreign(out)
            assert runner.forward(layer, Foreign(x[layer]), step, out=given) is given
            runner.device.synchronize()
            np.testing.assert_array_equal(out, expected[layer]["out"])
            answer = runner.forward(layer, Foreign(x[layer]), step)
            assert isinstance(answer, DeviceArray)
            shared = np.from_dlpack(answer)
            np.testing.assert_array_equal(shared, expected[layer]["out"])
            address = answer.address
            del answer
            gc.collect()
            assert runner.device.empty(shared.shape, np.uint16).address != address, "still shared"
            np.testing.assert_array_equal(shared, expected[layer]["out"])
            into = np.zeros_like(out)
            assert runner.forward(layer, x[layer], step, out=into) is into
            np.testing.assert_array_equal(into, expected[layer]["out"])
        for wrong, message in (
            (Foreign(x[0][:5]), r"x is uint16 \[5, "),
            (Foreign(x[0].view(np.int16)), "x is int16"),
            (Foreign(x[0].T.copy().T), "x is not contiguous"),
            (Foreign(x[0], (2, 3)), "DLPack type 2, number 3"),
            (Other().zeros(x[0].shape, np.uint16), "x lies on an emulated device"),
        ):
            with pytest.raises(InputError, match=message):
                runner.forward(0, wrong, step)
        frozen = x[0].copy()
        frozen.flags.writeable = False
        with pytest.raises(InputError, match="read-only"):
            runner.forward(0, x[0], step, out=frozen)


class Other(Emulated):
    dlpack = (1, 1)


def test_an_empty_capsule_is_freed() -> None:
    from ds41_tvm.runtime import device_array

    array = Emulated().zeros((2, 3), np.uint16)
    before = len(device_array._exported)
    capsule = array.__dlpack__()
    assert len(device_array._exported) == before + 1
    del capsule
    gc.collect()
    assert len(device_array._exported) == before


# ---- streams


def test_streams(tiny: Any) -> None:
    runner = emulated(tiny)
    x = tiny.inputs(0, 3)
    with runner.new_sequence() as sequence:
        runner.device.streams.clear()
        step = runner.step([(sequence, 3)], stream=5)
        assert runner.device.streams == {5}
        runner.forward(0, x[0], step, stream=SimpleNamespace(cuda_stream=6))
        assert runner.device.streams == {5, 6}
        for layer in runner.layers[1:]:
            runner.forward(layer, x[layer], step, stream=SimpleNamespace(ptr=7))
        runner.device.streams.clear()
        runner.commit(step, stream=8)
        assert runner.device.streams == {8}
        assert runner.device.stream == 0


def test_stream_handles() -> None:
    protocol = type("Stream", (), {"__cuda_stream__": lambda self: (0, 9)})()
    assert [stream_handle(s) for s in (3, protocol, SimpleNamespace(ptr=4))] == [3, 9, 4]
    for wrong in ("0", True, object()):
        with pytest.raises(HostAccess, match="expected a handle"):
            stream_handle(wrong)


def test_kernels_get_aligned_arrays_only(tiny: Any) -> None:
    device = Emulated()
    call = device.bind({"f": lambda a: None})["f"]
    with pytest.raises(AssertionError, match="a kernel got"):
        call(device.zeros((4,), np.uint8)[1:])
    assert hidden(device.zeros((0, 3), np.float32)).shape == (0, 3)
    with pytest.raises(AssertionError, match="no call where there is nothing to do"):
        call(device.zeros((0, 3), np.float32))


def test_nothing_is_asked_of_the_device_where_there_is_nothing_to_do(tiny: Any) -> None:
    """A GPU refuses grids of 0 blocks: no kernel gets an array of 0 rows, in steps of 0 tokens and groups that wait."""
    runner, given = emulated(tiny), tiny.inputs(0, 9)
    first, second = runner.new_sequence(), runner.new_sequence()
    for parts in ([], [(first, 0)], [(first, 1), (second, 0)], [(second, 0)], [(first, 0), (second, 1)], [(first, 7)]):
        step, before = runner.step(parts), len(runner.device.queue)
        for layer in runner.layers:
            out = runner.forward(layer, given[layer, : step.tokens], step)
            assert out.shape == (step.tokens, runner.config.dim)
        runner.commit(step)
        if not step.tokens:
            assert len(runner.device.queue) - before <= 1  # the plan
    assert (first.length, second.length) == (8, 1)
    nothing = {layer: runner.device.empty((0, runner.config.dim), np.uint16) for layer in runner.layers}
    with pytest.raises(CaptureError, match="the step has 0 tokens"):
        runner.capture(runner.step([(first, 0)]), nothing, nothing)


def test_closing_on_a_device(tiny: Any) -> None:
    runner = emulated(tiny)
    sequence = runner.new_sequence()
    sequence.close()
    with pytest.raises(StateError, match="closed"):
        runner.step([(sequence, 1)])
