"""Index scores, bit by bit, with keys scattered over a poisoned pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ds41_tvm.numerics.formats import bf16_encode, row_bytes
from ds41_tvm.reference.indexer import index_scores, scale_weights
from ds41_tvm.reference.quantize import pack_rows, unpack_rows

MASKED = 0xFF80
DENSE = [(3, 32, 4), (17, 64, 3), (2, 128, 8), (3, 256, 3)]  # heads, dim, rows of a block


@dataclass
class Scene:
    """Queries of three sequences whose keys lie in blocks in random order; all other rows are NaN patterns."""

    q: np.ndarray
    w: np.ndarray
    keys: np.ndarray
    table: np.ndarray
    sequence: np.ndarray
    visible: np.ndarray
    expected: list[np.ndarray]  # scores of the visible positions of each query

    @property
    def inputs(self) -> list[np.ndarray]:
        return [self.q, self.w, self.keys, self.table, self.sequence, self.visible]


def scene(heads: int, dim: int, block_rows: int, visible: list[int], seed: int = 0) -> Scene:
    rng = np.random.default_rng(seed)
    n, longest = len(visible), max(visible)
    sequence = rng.integers(0, 3, size=n).astype(np.int32)
    blocks = -(-longest // block_rows) + 1
    pool = rng.permutation(np.arange(1, 3 * blocks + 2))  # block 0 stays unused, the last one too
    table = pool[: 3 * blocks].reshape(3, blocks).astype(np.int32)
    keys = np.full(((3 * blocks + 2) * block_rows, row_bytes("index", dim)), 0xFF, np.uint8)
    own = pack_rows("index", bf16_encode(rng.normal(size=(3, longest, dim)).astype(np.float32)))
    own[:, ::11] = own[:, :1]  # repeated keys: equal scores
    for s in range(3):
        seen = max([v for v, owner in zip(visible, sequence, strict=True) if owner == s], default=0)
        p = np.arange(seen)
        keys[table[s, p // block_rows] * block_rows + p % block_rows] = own[s, :seen]
    q = pack_rows("index", bf16_encode((2 * rng.normal(size=(n, heads, dim))).astype(np.float32)))
    w = bf16_encode(rng.normal(size=(n, heads)).astype(np.float32))
    w[0] = 0x8000
    expected = [
        index_scores(
            unpack_rows("index", q[t : t + 1], dim),
            unpack_rows("index", own[sequence[t], : visible[t]], dim),
            w[t : t + 1],
        )[0]
        for t in range(n)
    ]
    return Scene(q, w, keys, table, sequence, np.array(visible, np.int32), expected)


@pytest.mark.parametrize(("heads", "dim", "block_rows"), DENSE)
@pytest.mark.parametrize("longest", [13, 511, 512, 513])
def test_every_visible_position(call: Any, compiled: Any, heads: int, dim: int, block_rows: int, longest: int) -> None:
    """The width is the longest context, or leaves a column over; hidden ones are -infinity."""
    s = scene(heads, dim, block_rows, [longest, 0, 1, 9, longest - 1, 7, 8])
    function = compiled("index_scores", heads=heads, dim=dim, block_rows=block_rows, candidate_block=0, spread=0)
    for width in (longest, longest + 1):
        got = call(function, s.inputs, (7, width), np.uint16)
        for t, scores in enumerate(s.expected):
            np.testing.assert_array_equal(got[t, : len(scores)], scores, err_msg=f"query {t}")
            assert (got[t, len(scores) :] == MASKED).all()


def candidates(s: Scene, size: int, count: int, seed: int) -> np.ndarray:
    """Per query some of the blocks with something visible, ascending, then -1."""
    rng = np.random.default_rng(seed)
    out = np.full((len(s.visible), count), -1, np.int32)
    for t, visible in enumerate(s.visible):
        blocks = -(-int(visible) // size)
        kept = np.sort(rng.permutation(blocks)[: min(count, blocks) if t % 2 == 0 else min(count, blocks) // 2])
        if blocks and t % 3 == 0 and len(kept):
            kept[-1] = blocks - 1  # the newest, visible in part
        out[t, : len(kept)] = kept
    return out


@pytest.mark.parametrize(
    ("heads", "dim", "size", "spread"), [(3, 32, 3, 0), (3, 32, 3, 1), (17, 64, 8, 0), (5, 128, 8, 0), (2, 256, 3, 1)]
)
@pytest.mark.parametrize(("longest", "count"), [(20, 3), (700, 180), (5, 9)])
def test_positions_of_candidate_blocks(
    call: Any, compiled: Any, heads: int, dim: int, size: int, spread: int, longest: int, count: int
) -> None:
    s = scene(heads, dim, 4, [longest, 0, 1, 5, longest - 1, longest - 3, longest // 2 + 1, 2], seed=longest)
    chosen = candidates(s, size, count, seed=count)
    function = compiled("index_scores", heads=heads, dim=dim, block_rows=4, candidate_block=size, spread=spread)
    width = longest + 1 if spread else count * size
    got = call(function, [*s.inputs, chosen], (len(chosen), width), np.uint16)
    expected = np.full_like(got, MASKED)
    for t, blocks in enumerate(chosen):
        for c, block in enumerate(blocks[blocks >= 0]):
            for i in range(size):
                position = block * size + i
                if position < s.visible[t]:
                    expected[t, position if spread else c * size + i] = s.expected[t][position]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dim", [32, 128])
def test_bad_keys_and_queries_stay_in_their_columns_and_rows(call: Any, compiled: Any, dim: int) -> None:
    s = scene(3, dim, 4, [30, 30, 30, 30])
    function = compiled("index_scores", heads=3, dim=dim, block_rows=4, candidate_block=0, spread=0)
    good = call(function, s.inputs, (4, 30), np.uint16)
    s.q[1] = 0xFF
    owner = int(s.sequence[2])
    s.keys[s.table[owner, 17 // 4] * 4 + 17 % 4] = 0xFF
    got = call(function, s.inputs, (4, 30), np.uint16)
    touched = np.zeros((4, 30), bool)
    touched[1] = True
    touched[s.sequence == owner, 17] = True
    np.testing.assert_array_equal(got[~touched], good[~touched])
    # relu(NaN) is 0, so NaN products count nothing.
    np.testing.assert_array_equal(got[touched], 0)


def test_no_queries(call: Any, compiled: Any) -> None:
    s = scene(3, 32, 4, [5])
    function = compiled("index_scores", heads=3, dim=32, block_rows=4, candidate_block=0, spread=0)
    inputs = [a[:0] if i in (0, 1, 4, 5) else a for i, a in enumerate(s.inputs)]
    assert call(function, inputs, (0, 5), np.uint16).size == 0


@pytest.mark.parametrize("heads", [1, 3, 32])
def test_scaled_weights(call: Any, compiled: Any, heads: int) -> None:
    """All bf16 patterns."""
    w = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)[: (1 << 16) // heads * heads].reshape(-1, heads)
    got = call(compiled("scale_weights", heads=heads, factor=128**-0.5 * heads**-0.5), [w], w.shape, np.uint16)
    expected = scale_weights(w, 128)
    bad = (w & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal((got & 0x7FFF) > 0x7F80, bad)
    np.testing.assert_array_equal(got[~bad], expected[~bad])
