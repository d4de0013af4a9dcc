"""What one sequence keeps between calls: caches per layer, and what source layers leave to consumers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig, LayerRole
from ds41_tvm.errors import StateError, StepError
from ds41_tvm.numerics.formats import F32, U8, U16, row_bytes
from ds41_tvm.reference.quantize import pack_rows, unpack_rows


class LayerCache:
    """Caches of one layer, packed as the formats store them; row i of `window`, `kv`, `gate` is position i.

    Nothing is overwritten: the sliding window is a slice of all rows, so taking tokens back is cutting them
    off. `latents` and `keys` belong to ``full`` layers; `kv` and `gate`, the members of groups before
    pooling, to those of ratio > 1. `selection` and `candidates` only hold for the tokens of the last step,
    `start` .. `length` - 1.
    """

    def __init__(self, role: LayerRole, config: AttentionConfig) -> None:
        self.role = role
        self.config = config
        self.start = 0
        self.length = 0
        self.window: U8 = np.zeros((0, row_bytes("window", config.head_dim)), np.uint8)
        self.latents: U8 = np.zeros((0, row_bytes("latent", config.head_dim)), np.uint8)
        self.keys: U8 = np.zeros((0, row_bytes("index", config.index_head_dim)), np.uint8)
        self.kv: F32 = np.zeros((0, config.head_dim), np.float32)
        self.gate: F32 = self.kv
        self.selection: NDArray[np.int32] | None = None
        self.candidates: NDArray[np.int32] | None = None

    def add_window(self, rows: U16) -> None:
        self.window = np.concatenate([self.window, pack_rows("window", rows)])

    def add_latents(self, latents: U16, keys: U16) -> None:
        self.latents = np.concatenate([self.latents, pack_rows("latent", latents)])
        self.keys = np.concatenate([self.keys, pack_rows("index", keys)])

    def add_members(self, kv: F32, gate: F32) -> None:
        self.kv, self.gate = np.concatenate([self.kv, kv]), np.concatenate([self.gate, gate])

    def window_rows(self, first: int) -> U16:
        """Window rows from position `first` on: bf16 bits [length - first, head_dim]."""
        return unpack_rows("window", self.window[first:], self.config.head_dim)

    def latent_rows(self) -> U16:
        """bf16 bits [length // ratio, head_dim]."""
        return unpack_rows("latent", self.latents, self.config.head_dim)

    def key_rows(self) -> U16:
        """bf16 bits [length // ratio, index_head_dim]."""
        return unpack_rows("index", self.keys, self.config.index_head_dim)

    def truncate(self, length: int) -> None:
        self.start = self.length = min(self.length, length)
        groups = self.length // self.role.ratio if self.role.ratio else 0
        self.window, self.kv, self.gate = self.window[:length], self.kv[:length], self.gate[:length]
        self.latents, self.keys = self.latents[:groups], self.keys[:groups]
        self.selection = self.candidates = None


class Sequence:
    """The caches of one sequence for the layers of one model."""

    def __init__(self, config: AttentionConfig, layers: Iterable[int]) -> None:
        self.config = config
        self.caches = {layer: LayerCache(config.role(layer), config) for layer in layers}
        self.published: int | None = None  # the layer that last completed a group (official ``shared_attn.index_k``)

    @property
    def length(self) -> int:
        """Tokens that all layers have seen."""
        return min(cache.length for cache in self.caches.values())

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on. Raises StateError if there are not that many."""
        if not 0 <= length <= self.length:
            raise StateError(
                f"cannot truncate a sequence of {self.length} tokens to {length}; expected 0..{self.length}"
            )
        for cache in self.caches.values():
            cache.truncate(length)
        if length == 0:
            self.published = None

    def published_keys(self, count: int) -> U16:
        """The first `count` key rows of the layer that last completed a group; zeros past its end."""
        keys = np.zeros((count, self.config.index_head_dim), np.uint16)
        if self.published is not None:
            rows = self.caches[self.published].key_rows()[:count]
            keys[: len(rows)] = rows
        return keys

    def begin(self, layer: int, start: int, tokens: int) -> LayerCache:
        """The layer's cache, opened for more tokens.

        Raises StateError if they do not follow the last ones, StepError unless the layers whose latents,
        selection or candidate blocks it reads have just run on the same tokens. Nothing has changed then.
        """
        cache, stop = self.caches[layer], start + tokens
        if start != cache.length:
            raise StateError(
                f"layer {layer} has seen {cache.length} tokens, the call starts at position {start}; "
                f"expected {cache.length}"
            )
        if stop > self.config.max_seq_len:
            raise StateError(
                f"{start} + {tokens} tokens exceed max_seq_len {self.config.max_seq_len}; shorten the "
                f"sequence or raise it"
            )
        role = cache.role
        for source in (role.kv_source, role.index_source, role.candidate_source):
            if source is None or source == layer:
                continue
            other = self.caches[source]
            if (other.start, other.length) != (start, stop):
                last = f"positions {other.start}..{other.length - 1}" if other.length else "nothing"
                raise StepError(
                    f"layer {layer} reads what layer {source} makes of positions {start}..{stop - 1}, but "
                    f"that layer last ran on {last}; run the layers in order, each on the same tokens"
                )
        cache.start, cache.length = start, stop
        cache.selection = cache.candidates = None
        return cache
