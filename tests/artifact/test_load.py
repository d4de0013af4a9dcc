"""An artefact runs as what it was compiled from, in a process that never sees the compiler."""

import json
import mmap
from pathlib import Path

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm import errors
from ds41_tvm.golden import judge, load_case, play
from ds41_tvm.golden.runner import runner_caches, runner_forward
from ds41_tvm.packing import ALIGNMENT

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ("tiny_batch2", "tiny_prefill12_decode2", "tiny_token_by_token")


def test_a_fresh_process_maps_no_compiler_and_imports_no_torch(tiny, inputs, python):
    code = (
        "import sys, json\nimport ds41_tvm\n"
        "runner = ds41_tvm.load(sys.argv[1], expect=sys.argv[2])\n"
        "s = runner.new_sequence()\nstep = runner.step([(s, 5)])\n"
        "x = ds41_tvm.random_input('s1', 0, 0, 1, 5, runner.config.dim)[0]\n"
        "out = runner.forward(0, x, step)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(json.dumps({'compiler': 'libtvm_compiler' in maps, 'runtime': 'libtvm_runtime.so' in maps,\n"
        "  'modules': sorted({'torch', 'tvm', 'ml_dtypes', 'rich', 'cyclopts'} & set(sys.modules)),\n"
        "  'ours': sorted(m for m in sys.modules if m.startswith('ds41_tvm')), 'sum': int(out.astype('i8').sum())}))"
    )
    done = python(code, tiny.path, tiny.digest)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["modules"] == []
    assert not found["compiler"]
    assert found["runtime"]
    parts = {name.split(".")[1] for name in found["ours"] if "." in name}
    assert parts.isdisjoint({"compiler", "kernels", "schedule", "cli", "golden", "bench"})
    runner = ds41_tvm.load(tiny.path)
    step = runner.step([(runner.new_sequence(), 5)])
    assert found["sum"] == int(runner.forward(0, inputs(runner, 1, 5)[0], step).astype("i8").sum())


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("ties", ["lowest-index", "torch-cpu"])
def test_recorded_cases(tiny, tmp_path_factory, name, ties):
    case = load_case(GOLDEN / f"{name}{'.lowest-index' if ties == 'lowest-index' else ''}.npz")
    path = tiny.path
    if ties == "torch-cpu":  # most kernels are those compiled already
        path = tmp_path_factory.mktemp("artifacts") / "ties"
        ds41_tvm.compile(case.config, path, ties=ties, pooling=tiny.manifest.options.pooling)
    runner = ds41_tvm.load(path, weights=case.weights, keys="published")
    forward, sequences = runner_forward(case, runner)
    produced = play(case, forward) | runner_caches(case, runner, sequences)
    assert judge(case, produced) == []


def test_packed_weights_are_those_packed_when_loading(tiny, inputs, feed):
    mapped, packed = ds41_tvm.load(tiny.path), ds41_tvm.load(tiny.path, weights=tiny.weights)
    x = inputs(mapped, 2, 11)
    with mapped.new_sequence() as a, packed.new_sequence() as b:
        np.testing.assert_array_equal(feed(mapped, a, x), feed(packed, b, x))


def test_chunks_batches_and_threads_change_no_bit(tiny, inputs, feed):
    one = ds41_tvm.load(tiny.path, threads=1)
    most = ds41_tvm.load(tiny.path)
    x, other = inputs(one, 3, 23), inputs(one, 4, 9)
    whole = feed(one, one.new_sequence(), x)
    pieces = one.new_sequence()
    cut = [feed(one, pieces, x[:, i : i + 5]) for i in range(0, 23, 5)]
    np.testing.assert_array_equal(np.concatenate(cut, axis=1), whole)
    np.testing.assert_array_equal(feed(most, most.new_sequence(), x), whole)
    a, b = most.new_sequence(), most.new_sequence()
    step = most.step([(b, 9), (a, 23)])
    for layer in most.layers:
        out = most.forward(layer, np.concatenate([other[layer], x[layer]]), step)
        np.testing.assert_array_equal(out[9:], whole[layer])


@pytest.mark.slow
def test_same_bits_as_a_runner_built_in_this_process(tiny, inputs):
    loaded = ds41_tvm.load(tiny.path)
    built = ds41_tvm.build(tiny.config, tiny.weights, layers=[0])
    x = inputs(loaded, 5, 7)
    step, other = loaded.step([(loaded.new_sequence(), 7)]), built.step([(built.new_sequence(), 7)])
    np.testing.assert_array_equal(loaded.forward(0, x[0], step), built.forward(0, x[0], other))


def test_weights_of_a_checkpoint_are_packed_when_loading(tiny, tmp_path, inputs, feed):
    folder = ds41_tvm.write_synthetic(tiny.config, tmp_path / "checkpoint", linear="bf16")
    checkpoint = ds41_tvm.load_checkpoint(folder)
    bare = ds41_tvm.compile(folder, tmp_path / "bare", with_weights=False)
    full = ds41_tvm.compile(checkpoint, tmp_path / "full")
    assert not bare.manifest.has_weights
    a, b = ds41_tvm.load(bare.path, weights=folder), ds41_tvm.load(full.path)
    x = inputs(a, 6, 6)
    np.testing.assert_array_equal(feed(a, a.new_sequence(), x), feed(b, b.new_sequence(), x))
    with pytest.raises(errors.NoWeights, match="weights="):
        ds41_tvm.load(bare.path)


def test_a_checkpoint_of_another_configuration_is_refused(tiny, tmp_path):
    import msgspec

    other = msgspec.structs.replace(tiny.config, rope_theta=20000.0)
    folder = ds41_tvm.write_synthetic(other, tmp_path / "checkpoint", linear="bf16")
    with pytest.raises(errors.ConfigMismatch, match=r"rope_theta is 20000.0, the kernels have 10000.0") as caught:
        ds41_tvm.load(tiny.path, weights=folder)
    assert other.digest() in str(caught.value)
    assert tiny.config.digest() in str(caught.value)


def test_weights_lie_in_the_map_aligned_and_stay_clean(tiny, inputs, feed):
    artifact = ds41_tvm.open_artifact(tiny.path)
    assert artifact.weights is not None
    for layer in artifact.weights.values():
        arrays = [a for packed in layer.linear.values() for a in packed] + [*layer.norm.values(), layer.sink]
        for array in arrays:
            assert array.ctypes.data % ALIGNMENT == 0
            base = array
            while isinstance(base, np.ndarray):
                base = base.base
            assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)
    runner = artifact.runner()
    feed(runner, runner.new_sequence(), inputs(runner, 7, 4))
    maps = Path("/proc/self/smaps").read_text().split("\n")
    dirty = [maps[i + 1 : i + 20] for i, line in enumerate(maps) if str(tiny.path) in line and ".safetensors" in line]
    assert dirty, "no weight file is mapped"
    for block in dirty:
        assert next(line for line in block if line.startswith("Private_Dirty:")).split()[1] == "0"


def test_runners_of_one_artefact_share_weights_and_keep_their_own_sequences(tiny, inputs, feed):
    artifact = ds41_tvm.open_artifact(tiny.path)
    first, second = artifact.runner(), artifact.runner(threads=1)
    x = inputs(first, 8, 6)
    a, b = first.new_sequence(), second.new_sequence()
    np.testing.assert_array_equal(feed(first, a, x), feed(second, b, x))
    with pytest.raises(errors.StepError, match="no sequence of this runner"):
        first.step([(b, 1)])
    assert first._layers[0].weights is second._layers[0].weights
