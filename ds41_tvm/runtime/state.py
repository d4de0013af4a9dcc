"""Sequences and the packed caches they own.

Everything is addressed by absolute position. A sequence has one slot in the rings (window rows of every layer, pooling
members of every source of ratio above 1; position p at row ``slot * ring + p % ring``) and a list of blocks per
compression ratio (latents and index keys of its source layers; group j in block ``j // block_rows``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import StateError
from ds41_tvm.numerics import formats
from ds41_tvm.program import Program
from ds41_tvm.runtime.device import Array, Device, Host
from ds41_tvm.runtime.memory import RowPool


class Caches:
    """The pools of one runner, in the memory of its device."""

    def __init__(self, program: Program, device: Device | None = None) -> None:
        c = self.config = program.config
        self.device = device or Host()
        self.program = program
        self.identity: dict[str, str] = {}  # of the runner: what saved sequences are checked against
        self.window_ring = c.window_size + program.draft
        roles = [c.role(layer) for layer in program.layers]
        row = (formats.row_bytes("window", c.head_dim),)
        self.rings = RowPool(self.window_ring, dict.fromkeys(program.layers, (row, np.uint8)), self.device)
        self.sources = {
            ratio: tuple(r.layer for r in roles if r.kind == "full" and r.ratio == ratio)
            for ratio in sorted({r.ratio for r in roles if r.kind == "full"})
        }
        self.members = {
            ratio: RowPool(ratio + program.draft, dict.fromkeys(layers, ((2, c.head_dim), np.float32)), self.device)
            for ratio, layers in self.sources.items()
            if ratio > 1
        }
        latent, key = (formats.row_bytes("latent", c.head_dim),), (formats.row_bytes("index", c.index_head_dim),)
        self.blocks = {
            ratio: RowPool(
                program.block_rows,
                {
                    (layer, what): (shape, np.uint8)
                    for layer in layers
                    for what, shape in (("latent", latent), ("key", key))
                },
                self.device,
            )
            for ratio, layers in self.sources.items()
        }

    def latents(self, layer: int) -> Array:
        """All latent rows of a source layer: uint8 [rows, bytes]."""
        return self.blocks[self.config.role(layer).ratio].arrays[layer, "latent"]

    def keys(self, layer: int) -> Array:
        """All index key rows of a source layer: uint8 [rows, bytes]."""
        return self.blocks[self.config.role(layer).ratio].arrays[layer, "key"]


class Sequence:
    """One sequence of a runner: its length, its place in the pools, views of its caches in the official layout."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self.length = 0
        # Rings hold the positions from `highest - ring` on: what was written there last, taken back or not.
        self.highest = 0
        self.published: int | None = None
        self.written = 0  # groups of the first so many tokens may have been written, taken back or not
        self.stamp = 0  # another number after every change: a step that knows an older one is stale
        self.slot = caches.rings.take()
        self.member_slots = {ratio: pool.take() for ratio, pool in caches.members.items()}
        self._blocks: dict[int, list[int]] = {ratio: [] for ratio in caches.blocks}
        self._tables: dict[int, NDArray[np.int32]] = {ratio: np.zeros(0, np.int32) for ratio in caches.blocks}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Sequence {'closed' if self._closed else f'of {self.length} tokens'}>"

    # ---- length

    def truncate(self, length: int) -> None:
        """Take back the tokens from position `length` on, e.g. rejected drafts.

        Any number down to `Program.draft` tokens below the greatest length so far can be taken back, or all of them;
        what the rings hold for the tokens that remain would otherwise be overwritten. Raises StateError beyond that.
        """
        self.check_open()
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or not 0 <= length <= self.length:
            raise StateError(f"cannot truncate to {length!r}: expected an integer from 0 to the length, {self.length}")
        if length == self.length:
            return
        if length == 0:
            self.highest = 0
            self.published = None
        elif length < self.highest - self._caches.program.draft:
            raise StateError(
                f"cannot truncate a sequence that had {self.highest} tokens to {length}: its rings hold what the last "
                f"{self._caches.program.draft} tokens need to be taken back, no more; truncate to 0 and feed the "
                f"tokens again, or build the runner with a larger draft"
            )
        self.length = int(length)
        self.touch()
        for ratio, blocks in self._blocks.items():
            keep = -(-(self.length // ratio) // self._caches.program.block_rows)
            for block in blocks[keep:]:
                self._caches.blocks[ratio].give(block)
            del blocks[keep:]
            self._tables[ratio] = np.array(blocks, np.int32)

    def close(self) -> None:
        """Hand all memory back to the runner. The sequence cannot be used after that; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._caches.rings.give(self.slot)
        for ratio, slot in self.member_slots.items():
            self._caches.members[ratio].give(slot)
        for ratio, blocks in self._blocks.items():
            for block in blocks:
                self._caches.blocks[ratio].give(block)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raises StateError if the sequence is closed."""
        if self._closed:
            raise StateError("the sequence is closed; make a new one with runner.new_sequence()")

    def belongs_to(self, caches: Caches) -> bool:
        """Whether the sequence was made by the runner with these caches."""
        return self._caches is caches

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the packed caches to a file that `Runner.restore` reads, replacing it in one step."""
        from ds41_tvm.runtime.persist import save_sequence

        self.check_open()
        save_sequence(self._caches, self, Path(path))

    # ---- used by steps

    def touch(self) -> None:
        """Make every step stale that was planned for this sequence before."""
        self.stamp += 1

    def reserve(self, length: int) -> None:
        """Have blocks for the groups of `length` tokens."""
        if length > self.length:
            self._clear_published_keys()
            self.written = max(self.written, length)
        for ratio, blocks in self._blocks.items():
            needed = -(-(length // ratio) // self._caches.program.block_rows)
            if needed > len(blocks):
                blocks.extend(self._caches.blocks[ratio].take() for _ in range(needed - len(blocks)))
                self._tables[ratio] = np.array(blocks, np.int32)

    def _clear_published_keys(self) -> None:
        """Zero what tokens that were taken back, or steps never committed, left past the end of the published keys.

        With published keys a layer of a lower ratio scores rows there, zeros in the official code. Nothing else does.
        """
        if self.published is None or self._caches.identity.get("keys") != "published":
            return
        ratio = self._caches.config.role(self.published).ratio
        end = min(self.written // ratio, len(self._blocks[ratio]) * self._caches.program.block_rows)
        rows = self.rows(ratio, np.arange(self.length // ratio, end))
        zeros = np.zeros((len(rows), formats.row_bytes("index", self._caches.config.index_head_dim)), np.uint8)
        self._caches.blocks[ratio].write((self.published, "key"), rows, zeros)

    def table(self, ratio: int) -> NDArray[np.int32]:
        """Block numbers of the sequence's groups, int32."""
        return self._tables[ratio]

    def rows(self, ratio: int, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pool rows of the given groups."""
        size = self._caches.program.block_rows
        return self._tables[ratio][groups // size].astype(np.int64) * size + groups % size

    def advance(self, length: int) -> None:
        """The sequence now has `length` tokens."""
        self.length = length
        self.touch()
        self.highest = max(self.highest, length)

    # ---- views

    def window_cache(self, layer: int) -> NDArray[np.uint16]:
        """Dequantised window ring in the official layout: bf16 bits [window_size, head_dim], position p at p %
        window_size.

        Rows of positions that do not exist yet are zero.
        """
        self.check_open()
        self._check_layer(layer, self._caches.program.layers, "part of this runner")
        c, ring = self._caches.config, self._caches.window_ring
        positions = np.arange(max(0, self.length - c.window_size), self.length)
        out = np.zeros((c.window_size, c.head_dim), np.uint16)
        rows = self._caches.rings.read(layer, self.slot * ring + positions % ring)
        out[positions % c.window_size] = formats.dequantize_window(*formats.unpack_window_row(rows, c.head_dim))
        return out

    def compress_kv_cache(self, layer: int) -> NDArray[np.uint16]:
        """Dequantised latents: bf16 bits [length // ratio, head_dim]; `layer` is a source layer."""
        rows = self._compressed(layer, "latent")
        return formats.dequantize_latent(*formats.unpack_latent_row(rows, self._caches.config.head_dim))

    def index_k_cache(self, layer: int) -> NDArray[np.uint16]:
        """Dequantised index keys: bf16 bits [length // ratio, index_head_dim]; `layer` is a source layer."""
        rows = self._compressed(layer, "key")
        return formats.dequantize_index(*formats.unpack_index_row(rows, self._caches.config.index_head_dim))

    def _compressed(self, layer: int, what: str) -> NDArray[np.uint8]:
        self.check_open()
        self._check_layer(layer, [x for layers in self._caches.sources.values() for x in layers], "a source of latents")
        ratio = self._caches.config.role(layer).ratio
        rows = self.rows(ratio, np.arange(self.length // ratio))
        return self._caches.blocks[ratio].read((layer, what), rows)

    def _check_layer(self, layer: int, known: Any, what: str) -> None:
        if layer not in known:
            raise StateError(f"layer {layer!r} is not {what}; expected one of {list(known)}")

    def state_bytes(self) -> int:
        """Bytes of cache that the sequence holds: its slots in the rings and its blocks."""
        caches = self._caches
        return (
            caches.rings.unit_bytes
            + sum(pool.unit_bytes for pool in caches.members.values())
            + sum(len(self._blocks[ratio]) * pool.unit_bytes for ratio, pool in caches.blocks.items())
        )
