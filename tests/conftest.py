"""What tests of several folders share: targets that this machine can run, kernels compiled once, hostile buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from ds41_tvm.cpu_features import available_threads
from ds41_tvm.packing import aligned
from ds41_tvm.runtime.threads import use_threads
from ds41_tvm.target import parse_target

# The same examples in every run, and no deadline: a first call may compile. No shrinking: it takes minutes here.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("repeatable")

GOLDEN = Path(__file__).parent / "golden"
MOST_THREADS = min(2, available_threads())


def runs_here(target: str) -> bool:
    return not parse_target(target).missing_here()


TARGETS = [t for t in ("cpu", "cpu:x86-64-v3") if runs_here(t)]
ALL_TARGETS = [t for t in ("cpu", "cpu:x86-64-v4", "cpu:x86-64-v3") if runs_here(t)]


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The recorded values."""
    return GOLDEN


@pytest.fixture(scope="session")
def numerics() -> dict[str, np.ndarray]:
    """Recorded values of conversions, quantisers, selections and rotation tables."""
    with np.load(GOLDEN / "numerics.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """This machine's own target, and the oldest one."""
    return str(request.param)


def hostile(array: np.ndarray) -> np.ndarray:
    """An aligned writable copy of `array`, as kernels take it."""
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


def call(function: Callable[..., Any], inputs: list[np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """What a kernel writes into a new buffer that held garbage, on one thread and on two: the same bits."""
    copies = [hostile(a) for a in inputs]
    results = []
    for threads, garbage in ((1, 0xFF), (MOST_THREADS, 0x00), (MOST_THREADS, 0xA5)):
        use_threads(threads)
        out = aligned(shape, dtype)
        out.view(np.uint8).reshape(-1)[:] = garbage
        function(*copies, out)
        results.append(out)
    for copy, given in zip(copies, inputs, strict=True):
        assert copy.tobytes() == np.ascontiguousarray(given).tobytes(), "a kernel wrote into its input"
    assert all(r.tobytes() == results[0].tobytes() for r in results), "threads or old content changed the result"
    return results[0]


def each_value(task: Any) -> list[dict[str, int]]:
    """As few points of a tuning task as have every value of every knob, each knob's in an order of its own."""
    chance = random.Random(task.name)
    orders = {name: chance.sample(values, len(values)) for name, values in task.knobs}
    most = max(map(len, orders.values()))
    return [{name: order[i % len(order)] for name, order in orders.items()} for i in range(most)]


@pytest.fixture(scope="session", name="each_value")
def _each_value() -> Callable[..., list[dict[str, int]]]:
    """`each_value(task)`."""
    return each_value


@pytest.fixture(scope="session", name="call")
def _call() -> Callable[..., np.ndarray]:
    """`call(function, inputs, shape, dtype)`."""
    return call
