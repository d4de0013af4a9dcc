"""What may be used from several threads and processes, and what is refused by name."""

import threading

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm import errors


def test_one_runner_per_thread_over_one_artefact(tiny, inputs, feed):
    artifact = ds41_tvm.open_artifact(tiny.path)
    alone = artifact.runner()
    expected = {seed: feed(alone, alone.new_sequence(), inputs(alone, seed, 9)) for seed in range(3)}
    failures = []

    def work(seed):
        try:
            runner = artifact.runner()
            for _ in range(5):
                with runner.new_sequence() as sequence:
                    np.testing.assert_array_equal(feed(runner, sequence, inputs(runner, seed, 9)), expected[seed])
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_runner_may_move_between_threads_but_not_be_in_two(tiny, monkeypatch, inputs, feed):
    runner = ds41_tvm.load(tiny.path)
    x, sequence = inputs(runner, 70, 8), runner.new_sequence()
    results = [feed(runner, sequence, x[:, :4])]
    mover = threading.Thread(target=lambda: results.append(feed(runner, sequence, x[:, 4:])))
    mover.start()
    mover.join()
    np.testing.assert_array_equal(np.concatenate(results, axis=1), feed(runner, runner.new_sequence(), x))

    inside, leave = threading.Event(), threading.Event()
    layer = runner._layers[0]
    real = layer.forward

    def slow(*arguments):
        inside.set()
        leave.wait(30)
        return real(*arguments)

    monkeypatch.setattr(layer, "forward", slow)
    step = runner.step([(runner.new_sequence(), 2)])
    first = threading.Thread(target=lambda: runner.forward(0, x[0, :2], step))
    first.start()
    try:
        assert inside.wait(30)
        for call in (lambda: runner.forward(0, x[0, :2], step), lambda: runner.commit(step), lambda: runner.step([])):
            with pytest.raises(errors.UsedConcurrently, match="another thread"):
                call()
    finally:
        leave.set()
        first.join()
    runner.forward(0, x[0, :2], step)


FORK = """
import os, sys, threading
import numpy as np, ds41_tvm
from ds41_tvm.errors import AfterFork
runner = ds41_tvm.load(sys.argv[1])
x = ds41_tvm.random_input("s1", 0, 0, 1, 4, runner.config.dim)[0]

def forward():
    return runner.forward(0, x, runner.step([(runner.new_sequence(), 4)])).copy()

def in_child(work):
    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refused():
    try:
        forward()
    except AfterFork as error:
        return 0 if "spawn" in str(error) else 2
    return 1

def in_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(np.array_equal(forward(), expected)))
    thread.start()
    thread.join()
    return 0 if found == [True] else 3

def before():
    return 0 if forward().shape == (4, runner.config.dim) else 4

print(in_child(before), end=" ")   # loaded before the fork, nothing run: the child may run kernels
expected = forward()
print(in_child(refused), in_child(in_new_thread), np.array_equal(forward(), expected))
"""


def test_fork(tiny, python):
    done = python(FORK, tiny.path, timeout=120)
    assert done.stdout.split() == ["0", "0", "0", "True"], done.stderr
