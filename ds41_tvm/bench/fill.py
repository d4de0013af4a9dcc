"""Sequences of any length without running their prompt, for measurements only.

A decode step costs what the caches hold, not what the prompt was. So a sequence takes its blocks as a commit would,
its rows are written as they would be stored, and its length is set: the next step runs as after a real prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import StateError
from ds41_tvm.numerics import formats
from ds41_tvm.runtime.persist import stored_rows
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.runtime.state import Caches, Sequence

Array = NDArray[Any]
# (name of a tensor as in saved sequences, such as ``latent.20``; number of rows) -> rows as they are stored
Rows = Callable[[str, int], Array]


def fill(runner: Runner, length: int, rows: Rows) -> Sequence:
    """A new sequence of `runner` with `length` tokens whose stored rows are what `rows` gives.

    Raises StateError if `length` is below 1 or above the configuration's ``max_seq_len``.
    """
    return fill_caches(runner.caches, length, rows)


def fill_caches(caches: Caches, length: int, rows: Rows) -> Sequence:
    """As `fill`, for the caches alone."""
    most = caches.config.max_seq_len
    if not 1 <= length <= most:
        raise StateError(f"cannot fill a sequence with {length} tokens: expected 1 to max_seq_len, {most}")
    sequence = Sequence(caches)
    sequence.reserve(length)
    sequence.advance(length)
    # As after a step that completed a group of every source: all have published their keys.
    sequence.published = max((x for layers in caches.sources.values() for x in layers), default=None)
    for name, (pool, key, places) in stored_rows(caches, sequence).items():
        pool.write(key, places, rows(name, len(places)))
    return sequence


class RandomRows:
    """`random_rows` of a configuration, for `fill`."""

    def __init__(self, config: AttentionConfig, seed: int) -> None:
        self._config, self._random = config, np.random.default_rng(seed)

    def __call__(self, name: str, count: int) -> Array:
        return random_rows(self._config, self._random, name.partition(".")[0], count)


def random_rows(config: AttentionConfig, random: np.random.Generator, kind: str, count: int) -> Array:
    """Plausible stored rows: normal window rows and pooling members; latents and keys of random codes.

    The scales of latents (e4m3) and keys (e8m0) are those of rows whose values are about one, as after an RMSNorm.
    """
    c = config
    if kind == "members":
        return random.standard_normal((count, 2, c.head_dim), np.float32)
    if kind == "window":
        values = formats.bf16_encode(random.standard_normal((count, c.head_dim), np.float32))
        return formats.pack_window_row(*formats.quantize_window(values))
    if kind == "latent":
        return packed_rows(random, count, c.head_dim, 16, (0x2A, 0x30))
    return packed_rows(random, count, c.index_head_dim, 32, (126, 128))


def packed_rows(random: np.random.Generator, count: int, dim: int, block: int, scales: tuple[int, int]) -> Array:
    """Rows of random e2m1 codes, then one scale code from scales[0] to scales[1] - 1 for every `block` codes."""
    out = np.empty((count, dim // 2 + dim // block), np.uint8)
    for first in range(0, count, 1 << 16):  # bounds the temporaries
        part = out[first : first + (1 << 16)]
        part[:, : dim // 2] = np.frombuffer(random.bytes(part[:, : dim // 2].size), np.uint8).reshape(len(part), -1)
        part[:, dim // 2 :] = random.integers(*scales, part[:, dim // 2 :].shape, np.uint8)
    return out


def state_bytes(caches: Caches, sequence: Sequence, layer: int) -> int:
    """Bytes of cache that `sequence` holds for one layer: its window ring and, of a source, its blocks and members."""
    total = caches.rings.unit * _row_bytes(caches.rings.arrays[layer])
    role = caches.config.role(layer)
    if role.kind != "full":
        return total
    blocks = caches.blocks[role.ratio]
    held = len(sequence.table(role.ratio)) * blocks.unit
    total += sum(held * _row_bytes(blocks.arrays[layer, what]) for what in ("latent", "key"))
    if role.ratio > 1:
        members = caches.members[role.ratio]
        total += members.unit * _row_bytes(members.arrays[layer])
    return total


def _row_bytes(array: Array) -> int:
    return int(np.prod(array.shape[1:])) * array.itemsize
