"""Sparse attention against float64, with rings that wrap, blocks in random order, and NaN in all that is not chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_decode, bf16_encode, row_bytes
from ds41_tvm.reference.quantize import pack_rows, unpack_rows
from ds41_tvm.target import parse_target

BLOCK_ROWS, RATIO = 4, 2


@dataclass
class Scene:
    """Queries with the rows that each may see, and the arrays in which a kernel has to find them."""

    inputs: list[np.ndarray]
    rows: list[np.ndarray]  # values of the rows of each query, float64 [count, dim]

    def exact(self, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """The output in float64, and the sum of the magnitudes that make it up."""
        q, sink = bf16_decode(self.inputs[0]).astype(np.float64), self.inputs[3].astype(np.float64)
        out, size = np.zeros(q.shape), np.zeros(q.shape)
        for t, rows in enumerate(self.rows):
            if not len(rows):
                continue
            score = q[t] @ rows.T * dim**-0.5
            top = np.maximum(score.max(-1), sink)[:, None]
            e = np.exp(score - top)
            total = e.sum(-1, keepdims=True) + np.exp(sink[:, None] - top)
            out[t], size[t] = e @ rows / total, e @ abs(rows) / total
        return out, size


def scene(heads: int, dim: int, window: int, ring_rows: int, k: int, scale: float = 2.0, seed: int = 0) -> Scene:
    """Sequences that begin, wrap around the ring, have a single token, and none."""
    rng = np.random.default_rng(seed)
    starts, counts = [0, 23, 7, 40, ring_rows - 1], [9, 4, 0, 1, 7]
    n, seqs = sum(counts), len(counts)
    base = (np.cumsum(counts) - counts).astype(np.int32)
    slot = rng.permutation(np.arange(1, seqs + 1)).astype(np.int32)
    sequence = np.repeat(np.arange(seqs), counts).astype(np.int32)
    position = (np.arange(n) - base[sequence] + np.array(starts)[sequence]).astype(np.int32)
    longest = max(s + c for s, c in zip(starts, counts, strict=True))

    def values(*shape: int) -> np.ndarray:
        x = rng.normal(size=(*shape, dim)) * 2.0 ** rng.integers(-3, 2, size=(*shape, 1))
        return bf16_encode(x.astype(np.float32))

    window_rows = pack_rows("window", values(seqs, longest))
    latent_rows = pack_rows("latent", values(seqs, longest // RATIO))
    fresh = np.zeros((n, row_bytes("window", dim)), np.uint8)
    ring = np.full(((seqs + 2) * ring_rows, row_bytes("window", dim)), 0xFF, np.uint8)
    blocks = longest // RATIO // BLOCK_ROWS + 1
    table = rng.permutation(np.arange(1, seqs * blocks + 1)).reshape(seqs, blocks).astype(np.int32)
    latents = np.full(((seqs * blocks + 2) * BLOCK_ROWS, row_bytes("latent", dim)), 0xFF, np.uint8)
    selected = np.full((n, max(k, 1)), -1, np.int32)
    rows = []
    for t in range(n):
        s, p = sequence[t], position[t]
        fresh[t] = window_rows[s, p]
        seen = np.arange(max(0, p - window + 1), p + 1)
        old = seen[seen < starts[s]]
        ring[slot[s] * ring_rows + old % ring_rows] = window_rows[s, old]
        visible = (p + 1) // RATIO
        chosen = np.sort(rng.permutation(visible)[: rng.integers(0, k + 1) if t % 3 else k])
        selected[t, : len(chosen)] = chosen
        latents[table[s, chosen // BLOCK_ROWS] * BLOCK_ROWS + chosen % BLOCK_ROWS] = latent_rows[s, chosen]
        mine = [unpack_rows("window", window_rows[s, seen], dim), unpack_rows("latent", latent_rows[s, chosen], dim)]
        rows.append(bf16_decode(np.concatenate(mine)).astype(np.float64))
    q = bf16_encode((scale * rng.normal(size=(n, heads, dim))).astype(np.float32))
    sink = rng.normal(size=heads).astype(np.float32)
    inputs = [q, fresh, ring, sink, position, sequence, np.array(starts, np.int32), base, slot]
    return Scene(inputs + [latents, table, selected] * (k > 0), rows)


def assert_rounded(got: np.ndarray, s: Scene, dim: int, slack: float = 2.0**-19) -> None:
    """Exact but for float32 arithmetic, then rounded once to bf16."""
    exact, size = s.exact(dim)
    half_step = np.ldexp(1.0, np.frexp(np.maximum(abs(exact), 1e-30))[1] - 9)
    wrong = ~(abs(bf16_decode(got) - exact) <= half_step + slack * size)  # NaN is wrong too
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}"


SHAPES = [(3, 32, 5, 5), (4, 96, 8, 6), (16, 64, 5, 0), (20, 32, 7, 3)]  # heads, dim, window, k


def program(compiled: Any, form: str, **sizes: int) -> Any:
    """The kernel with the program that `Program` chooses for the target."""
    target = parse_target("cpu:x86-64-v3" if form in ("plain", "opencl") else form)
    features = {"amx": "amx-bf16", "dot": "avx512bf16", "avx512": "avx512bw"}
    products = next((form for form, feature in features.items() if target.has(feature)), "fma")
    split = sizes.pop("split", 1)
    return compiled("sparse_attention", **sizes, block_rows=BLOCK_ROWS, form=products, split=split)


@pytest.mark.parametrize(("heads", "dim", "window", "k"), SHAPES)
def test_rows_out_of_rings_and_blocks(
    call: Any, compiled: Any, form: str, heads: int, dim: int, window: int, k: int
) -> None:
    """However the heads are shared out, the bits are the same."""
    ring_rows = window + 6
    s = scene(heads, dim, window, ring_rows, k)
    splits = [1] if form == "plain" else [x for x in (1, 2) if heads % x == 0]
    results = []
    for split in splits:
        function = program(compiled, form, heads=heads, dim=dim, window=window, ring_rows=ring_rows, k=k, split=split)
        results.append(call(function, s.inputs, s.inputs[0].shape, np.uint16))
        assert results[-1].tobytes() == results[0].tobytes(), f"split {split}"
    assert_rounded(results[0], s, dim)


@pytest.fixture
def small(compiled: Any, form: str) -> Any:
    return program(compiled, form, heads=3, dim=32, window=5, ring_rows=11, k=5)


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_flat_and_peaked_weights(call: Any, small: Any, scale: float) -> None:
    """Scores of hundreds lose absolute precision in float32: some 2^-24 of them, in the exponent."""
    s = scene(3, 32, 5, 11, 5, scale=scale, seed=1)
    assert_rounded(
        call(small, s.inputs, s.inputs[0].shape, np.uint16), s, 32, slack=2.0**-19 if scale == 0 else 2.0**-13
    )


@pytest.mark.parametrize("sink", [-np.inf, -200.0, 20.0, 87.0, 95.0, 500.0, 1e30, np.inf])
def test_sinks_of_any_size(call: Any, small: Any, sink: float) -> None:
    """A sink far above the scores takes all weight; far below, none."""
    s = scene(3, 32, 5, 11, 5, scale=0.5, seed=2)
    s.inputs[3][:] = [sink, 0.0, sink]
    got = call(small, s.inputs, s.inputs[0].shape, np.uint16)
    with np.errstate(invalid="ignore"):
        exact, size = s.exact(32)
    if sink == np.inf:
        exact[:, [0, 2]] = 0
        size[:, [0, 2]] = 0
    half_step = np.ldexp(1.0, np.frexp(np.maximum(abs(exact), 1e-30))[1] - 9)
    np.testing.assert_array_less(abs(bf16_decode(got) - exact), half_step + 2.0**-17 * size)


def test_scores_far_below_the_sink(call: Any, small: Any) -> None:
    """Every score near -110, the sink at 0: e^110 does not fit float32, and the output is zero to bf16's eye."""
    s = scene(3, 32, 5, 11, 5, seed=3)
    first = s.rows[0][0]
    s.inputs[0][0] = bf16_encode(np.tile(-first / np.square(first).sum() * 110 * 32**0.5, (3, 1)).astype(np.float32))
    got = bf16_decode(call(small, s.inputs, s.inputs[0].shape, np.uint16))
    assert (abs(got[0]) < 1e-30).all()


def test_bad_rows_and_queries_stay_alone(call: Any, small: Any) -> None:
    s = scene(3, 32, 5, 11, 5, seed=4)
    good = call(small, s.inputs, s.inputs[0].shape, np.uint16)
    s.inputs[0][3, 1] = 0x7FC0  # one head of one query
    s.inputs[1][20] = 0xFF  # the last query's own row
    got = call(small, s.inputs, s.inputs[0].shape, np.uint16)
    same = np.ones(good.shape[:2], bool)
    same[3, 1] = False
    same[20] = False
    np.testing.assert_array_equal(got[same], good[same])
    assert np.isnan(bf16_decode(got[20])).all()


def test_no_queries(call: Any, small: Any) -> None:
    s = scene(3, 32, 5, 11, 5)
    inputs = [a[:0] if i in (0, 1, 4, 5, 11) else a for i, a in enumerate(s.inputs)]
    assert call(small, inputs, (0, 3, 32), np.uint16).size == 0


def test_many_calls_on_changing_thread_counts(call: Any, small: Any) -> None:
    s = scene(3, 32, 5, 11, 5, seed=6)
    first = call(small, s.inputs, s.inputs[0].shape, np.uint16)
    for _ in range(15):  # three runs each
        assert call(small, s.inputs, s.inputs[0].shape, np.uint16).tobytes() == first.tobytes()
