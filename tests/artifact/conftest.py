"""One artefact of the model `tiny`, compiled once, and copies of it to spoil."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.golden import load_case
from ds41_tvm.runtime.runner import Runner

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE = str(Path(__file__).parents[2])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The artefact at `path` of `case`'s configuration and `weights`, its `digest` and `manifest`. Do not change it."""
    case = load_case(GOLDEN / "tiny_batch2.lowest-index.npz")
    out = tmp_path_factory.mktemp("artifacts") / "tiny"
    made = ds41_tvm.compile(case.config, out, case.weights)
    return SimpleNamespace(
        path=out, digest=made.digest, manifest=made.manifest, config=case.config, weights=case.weights, case=case
    )


@pytest.fixture
def copy(tiny: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the artefact, to be changed."""
    return Path(shutil.copytree(tiny.path, tmp_path / "copy"))


def inputs(runner: Runner, seed: int, tokens: int) -> np.ndarray:
    """bf16 bits [layers, tokens, dim]."""
    c = runner.config
    return np.stack([ds41_tvm.random_input(f"s{seed}", i, 0, 1, tokens, c.dim)[0] for i in range(c.n_layers)])


def feed(runner: Runner, sequence: Any, x: np.ndarray) -> np.ndarray:
    """One step of one sequence through all layers: outputs [layers, tokens, dim]."""
    step = runner.step([(sequence, x.shape[1])])
    out = np.stack([runner.forward(layer, x[layer], step) for layer in runner.layers])
    runner.commit(step)
    return out


def python(code: str, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds this package."""
    path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}, **more,
    )  # fmt: skip


@pytest.fixture(scope="session", name="inputs")
def _inputs() -> Any:
    """`inputs(runner, seed, tokens)`."""
    return inputs


@pytest.fixture(scope="session", name="feed")
def _feed() -> Any:
    """`feed(runner, sequence, x)`."""
    return feed


@pytest.fixture(scope="session", name="python")
def _python() -> Any:
    """`python(code, *arguments)`."""
    return python
