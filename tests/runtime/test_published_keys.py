"""keys="published" where the published layer has fewer rows than a query sees: what lies past its end is zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics.formats import bf16_decode
from ds41_tvm.reference.layer import Reference

# Layer 1 publishes every fourth token; layer 0 sees a position for every second one.
CONFIG = AttentionConfig.from_dict(
    AttentionConfig.preset("tiny").to_dict()
    | {
        "compress_ratios": [2, 4], "kv_source_layers": [0, 1], "index_source_layers": [0, 1], "index_topk": 2,
        "candidate_source_layer": -1,
    }
)  # fmt: skip
WEIGHTS = ds41_tvm.synthetic_weights(CONFIG, "published")


class Pair:
    """A runner and the reference with one sequence each."""

    def __init__(self) -> None:
        # Blocks so small that rows past the end lie in blocks that truncation keeps, and in others.
        self.runner = ds41_tvm.build(CONFIG, WEIGHTS, keys="published", block_rows=2, draft=16)
        self.reference = Reference(CONFIG, WEIGHTS, keys="published")
        self.mine, self.theirs = self.runner.new_sequence(), self.reference.new_sequence()

    def feed(self, tokens: int, commit: bool = True) -> Any:
        """The next tokens; compares the scores, unless they are not to be committed."""
        start = self.mine.length
        step = self.runner.step([(self.mine, tokens)])
        for layer in self.runner.layers:
            x = ds41_tvm.random_input("published", layer, 0, 1, 64, CONFIG.dim)[0][start : start + tokens]
            _, trace = self.runner.forward(layer, x, step, trace=True)
            if not commit:
                continue
            expected: dict[str, Any] = {}
            self.reference.forward(layer, x, start, self.theirs, expected)
            wanted = bf16_decode(expected["index_score"])
            np.testing.assert_array_equal(bf16_decode(trace["scores"])[:, : wanted.shape[1]], wanted)
            np.testing.assert_array_equal(trace["topk"], expected["selection"])
        if commit:
            self.runner.commit(step)
        return step

    def truncate(self, length: int) -> None:
        self.mine.truncate(length)
        self.theirs.truncate(length)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("length", [4, 8, 12])
def test_after_truncation(pair: Pair, length: int) -> None:
    pair.truncate(0)
    pair.feed(16)
    pair.truncate(length)
    for _ in range(5):
        pair.feed(1)


@pytest.mark.parametrize("length", [4, 8])
def test_after_a_step_that_was_given_up(pair: Pair, length: int) -> None:
    pair.truncate(0)
    pair.feed(length)
    pair.feed(8, commit=False)
    for _ in range(5):
        pair.feed(1)


def test_planning_no_tokens_leaves_a_live_step_alone(pair: Pair) -> None:
    pair.truncate(0)
    pair.feed(4)
    live = pair.feed(4, commit=False)
    before = pair.runner.caches.keys(1).copy()
    pair.runner.step([(pair.mine, 0)])
    np.testing.assert_array_equal(pair.runner.caches.keys(1), before)
    pair.runner.commit(live)
    assert pair.mine.length == 8
