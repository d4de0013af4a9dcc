"""Small models to run, and what the tests do with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.config import AttentionConfig
from ds41_tvm.cpu_features import available_threads
from ds41_tvm.golden import load_case
from ds41_tvm.numerics.formats import bf16_encode
from ds41_tvm.runtime.memory import RowPool
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.runtime.state import Sequence

# Blocks and slack so small that every test crosses them.
BLOCK_ROWS, DRAFT = 4, 6

# Every ratio, odd counts of heads, sizes that fill no tile, candidate blocks of three.
ODD = AttentionConfig(
    dim=50, n_heads=3, head_dim=32, rope_head_dim=6, q_lora_rank=18, o_lora_rank=10, o_groups=1, window_size=5,
    compress_ratios=(3, 3, 3, 8, 0, 4, 4, 1, 1, 1), kv_source_layers=(0, 3, 5, 7),
    index_source_layers=(0, 1, 3, 5, 7, 8), candidate_source_layer=7, candidate_topk_blocks=3,
    candidate_block_size=3, index_n_heads=3, index_head_dim=32, index_topk=5, rope_theta=10000.0,
    compress_rope_theta=40000.0, rope_factor=2.0, original_seq_len=32, beta_fast=32.0, beta_slow=1.0,
    norm_eps=1e-20, max_seq_len=96,
)  # fmt: skip

Fed = dict[int, dict[str, np.ndarray]]


@dataclass(repr=False)
class Model:
    """A configuration with weights and its runners by number of threads."""

    config: AttentionConfig
    weights: Any
    linear: str
    runners: dict[int, Runner]
    _alone: dict[tuple[int, int], tuple[Fed, dict[str, np.ndarray]]] = field(default_factory=dict)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<Model {self.linear} of dim {self.config.dim}>")  # for Hypothesis: short

    @property
    def runner(self) -> Runner:
        return self.runners[1]

    def inputs(self, seed: int, length: int) -> np.ndarray:
        """bf16 bits [layers, length, dim]."""
        rng = np.random.default_rng(seed)
        shape = (self.config.n_layers, length, self.config.dim)
        return bf16_encode(rng.uniform(-1.5, 1.5, size=shape).astype(np.float32))

    def feed(
        self, runner: Runner, parts: list[tuple[Sequence, np.ndarray]], commit: bool = True
    ) -> tuple[list[Fed], Any]:
        """One step of (sequence, x [layers, tokens, dim]): results by part and layer, and the step."""
        step = runner.step([(sequence, x.shape[1]) for sequence, x in parts])
        cuts = np.cumsum([x.shape[1] for _, x in parts])[:-1]
        found: list[Fed] = [{} for _ in parts]
        for layer in runner.layers:
            rows = np.concatenate([x[layer] for _, x in parts])
            out, trace = runner.forward(layer, rows, step, trace=True)
            kept = {"out": out} | {what: trace[what] for what in ("topk", "candidates") if what in trace}
            for what, array in kept.items():
                for part, piece in zip(found, np.split(array, cuts), strict=True):
                    part.setdefault(layer, {})[what] = piece.copy()
        if commit:
            runner.commit(step)
        return found, step

    def run(self, runner: Runner, sequence: Sequence, x: np.ndarray, chunk: int = 0) -> Fed:
        """Feed x to one sequence, `chunk` tokens at a time (0: all at once)."""
        size = chunk or max(1, x.shape[1])
        pieces = [self.feed(runner, [(sequence, x[:, i : i + size])])[0][0] for i in range(0, x.shape[1], size)]
        return join(pieces)

    def caches(self, sequence: Sequence, runner: Runner | None = None) -> dict[str, np.ndarray]:
        """Everything that a sequence shows of its caches."""
        runner = runner or next(r for r in self.runners.values() if sequence.belongs_to(r.caches))
        out = {f"window {layer}": sequence.window_cache(layer) for layer in runner.layers}
        for layer in runner.layers:
            if self.config.role(layer).kind == "full":
                out[f"latents {layer}"] = sequence.compress_kv_cache(layer)
                out[f"keys {layer}"] = sequence.index_k_cache(layer)
        return out

    def alone(self, seed: int, length: int) -> tuple[Fed, dict[str, np.ndarray]]:
        """Results and caches of a sequence of its own, fed at once on one thread."""
        if (seed, length) not in self._alone:
            with self.runner.new_sequence() as sequence:
                found = self.run(self.runner, sequence, self.inputs(seed, length))
                self._alone[seed, length] = found, self.caches(sequence)
        return self._alone[seed, length]


def join(pieces: list[Fed]) -> Fed:
    """Results of consecutive pieces of one sequence as one; pieces of no token add nothing."""
    pieces = [p for p in pieces if len(next(iter(p.values()))["out"])] or pieces[:1] or [{}]
    return {
        layer: {what: np.concatenate([p[layer][what] for p in pieces]) for what in pieces[0][layer]}
        for layer in pieces[0]
    }


def assert_same(got: Fed, expected: Fed, rows: slice = slice(None)) -> None:
    """`got` has the bits of those rows of `expected`."""
    for layer, arrays in got.items():
        for what, array in arrays.items():
            np.testing.assert_array_equal(array, expected[layer][what][rows], err_msg=f"{what} of layer {layer}")


def assert_same_caches(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for what, array in got.items():
        np.testing.assert_array_equal(array, expected[what], err_msg=what)


def poison(runner: Runner, live: list[Sequence], back: int = 0) -> None:
    """Fill all scratch memory and every cache row that no token and no view after `length - back` of the live sequences
    may read with 0xFF bytes: NaN in every format. Unit 0 of a pool stays zero, as promised to block tables.
    """
    caches, window = runner.caches, runner.config.window_size

    def fill(pool: RowPool, keep: list[np.ndarray]) -> None:
        for array in pool.arrays.values():
            bad = np.ones(len(array), bool)
            bad[: pool.unit] = False
            for rows in keep:
                bad[rows] = False
            array.view(np.uint8).reshape(len(array), -1)[bad] = 0xFF

    def ring(pool: RowPool, slot: int, first: int, length: int) -> np.ndarray:
        return slot * pool.unit + np.arange(max(0, first), length) % pool.unit

    fill(caches.rings, [ring(caches.rings, s.slot, s.length - back - window, s.length) for s in live])
    for ratio, pool in caches.members.items():
        firsts = [(s.length - back) // ratio * ratio for s in live]
        fill(pool, [ring(pool, s.member_slots[ratio], f, s.length) for s, f in zip(live, firsts, strict=True)])
    for ratio, pool in caches.blocks.items():
        fill(pool, [s.rows(ratio, np.arange(s.length // ratio)) for s in live])
    runner.workspace.fill(0xFF)


def _model(config: AttentionConfig, weights: Any, linear: str = "bf16") -> Model:
    options: Any = {"linear": linear, "block_rows": BLOCK_ROWS, "draft": DRAFT}
    threads = sorted({1, min(2, available_threads())})
    return Model(config, weights, linear, {n: ds41_tvm.build(config, weights, threads=n, **options) for n in threads})


@pytest.fixture(scope="session")
def odd() -> Model:
    """Sizes that fit nothing."""
    return _model(ODD, ds41_tvm.synthetic_weights(ODD, "odd"))


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The preset; four heads, so that a single token's are shared out between two threads."""
    config = AttentionConfig.preset("tiny")
    return _model(config, ds41_tvm.synthetic_weights(config, "tiny"))


@pytest.fixture(scope="session")
def fp8(golden_folder: Path) -> Model:
    """The recorded checkpoint in linear mode fp8."""
    case = load_case(golden_folder / "checkpoint_mid_fp8.lowest-index.npz")
    return _model(case.config, case.weights, "fp8")


@pytest.fixture(scope="session", params=["odd", "tiny", "fp8"])
def model(request: pytest.FixtureRequest) -> Model:
    """Each of the models."""
    found: Model = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def same() -> Any:
    """`assert_same`, `assert_same_caches`, `poison`, `join` as attributes."""

    class Tools:
        results = staticmethod(assert_same)
        caches = staticmethod(assert_same_caches)
        poison = staticmethod(poison)
        join = staticmethod(join)

    return Tools
