"""The machine's limits: that they are measured, not how high they are."""

from __future__ import annotations

import numpy as np
import pytest

from ds41_tvm.bench import limits, machine
from ds41_tvm.cpu_features import available_threads
from ds41_tvm.target import parse_target


def test_every_limit_of_this_machines_target(target):
    """Each rate follows from work and time: half the passes, about the same rate; never zero."""
    kind = parse_target(target)
    found = limits.Limits(kind, 1)
    needs = {"vnni": "avx512vnni", "bf16": "avx512bf16", "amx": "amx-bf16"}
    assert set(found.kinds) == {"read", "fma"} | {limit for limit, feature in needs.items() if kind.has(feature)}
    sample = found.sample(passes=2)
    assert set(sample) == set(found.kinds)
    for values in sample.values():
        assert len(values) == 2
        assert min(values) > 1e7
    assert max(sample["read"]) < 2e12  # no cache, and no loop that the compiler removed
    assert set(found.sample(("fma",), 1)) == {"fma"}


def test_the_read_buffer_is_far_larger_than_any_cache():
    assert limits.read_bytes() >= min(4 * machine.last_cache(), 1 << 30)
    assert limits.read_bytes() % (64 * 4096) == 0


def test_the_read_kernel_reads_everything():
    kind = parse_target("cpu")
    read = limits._compiled(limits._read, 4096, 0, target=kind)
    x = np.random.default_rng(0).integers(-1000, 1000, (64, 4096)).astype(np.int32)
    given, out = limits.aligned(x.shape, np.int32), limits.aligned((64, 64), np.int32)
    given[:] = x
    read(given, out)
    assert np.array_equal(out, x.reshape(64, -1, 64).sum(1))


@pytest.mark.parametrize("parallel", [False, True])
def test_launches_are_timed_one_by_one(parallel):
    times = limits.launch_times(parse_target("cpu"), min(2, available_threads()), parallel, 7)
    assert len(times) == 7
    assert min(times) > 0


def test_the_machine_is_described():
    made = machine.describe()
    assert made.processors == available_threads()
    assert made.memory > 1 << 28
    assert made.caches
    assert machine.last_cache() == max(made.caches.values())
    assert made.kernel.startswith("Linux")
    assert machine.resident()["peak"] >= machine.resident()["now"] > 1 << 20
