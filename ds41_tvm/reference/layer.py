"""The attention of all layers, for single sequences: what everything else is measured by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import FP8_LINEARS, AttentionConfig, closure
from ds41_tvm.errors import ConfigError, InputError, MissingTensor, StepError
from ds41_tvm.numerics.formats import F32, U16, bf16_encode, dequantize_weight
from ds41_tvm.reference.attention import sparse_attention, window_indices
from ds41_tvm.reference.candidates import candidate_positions, select_candidate_blocks
from ds41_tvm.reference.compressor import pool_groups
from ds41_tvm.reference.indexer import hidden_positions, index_scores, mask_scores, scale_weights
from ds41_tvm.reference.linear import Accumulate, linear, linear_f32, linear_fp8
from ds41_tvm.reference.norm import rms_norm
from ds41_tvm.reference.output import output_groups
from ds41_tvm.reference.quantize import round_trip
from ds41_tvm.reference.rope import rope_frequencies, rope_table, rotate
from ds41_tvm.reference.sequence import LayerCache, Sequence
from ds41_tvm.reference.topk import TOPK, Ties

Keys = Literal["own", "published"]


class Reference:
    """out = attention(x) of any layer, for a sequence fed in chunks of any size.

    Weights are found by name, ``layers.{l}.attn.{name}``: uint16 = bf16 bits, float32, or uint8 = e4m3 codes
    with e8m0 scales under ``....scale``. `layers` is a subset that holds the sources of its members
    (ConfigError if not). `linear`: ``bf16`` or ``fp8``, where the inputs of `FP8_LINEARS` are quantised.
    `ties`: ``lowest-index`` or ``torch-cpu``. `accumulate`: ``f64`` sums products in float64, ``f32`` is
    faster and depends on the machine.

    `keys`: the index keys that an indexer scores. ``own``: those of its source layer, so that a token's
    result does not depend on how its sequence was cut into calls. ``published``: as the official code does,
    those of the layer that last completed a group of the sequence; in a call that completes none (a decode
    step in the middle of a group) that is a later layer, in the call before, with its first rows.
    """

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, NDArray[Any]],
        layers: Iterable[int] | None = None,
        linear: str = "bf16",
        ties: Ties = "lowest-index",
        keys: Keys = "own",
        accumulate: Accumulate = "f64",
    ) -> None:
        if ties not in TOPK:
            raise ConfigError(f"ties {ties!r}: there is no such rule; expected one of {', '.join(TOPK)}")
        if keys not in ("own", "published"):
            raise ConfigError(f"keys {keys!r}: there is no such rule; expected own or published")
        self.config = config
        self.weights = weights
        self.layers = closure(config, layers)
        self.linear = config.check_linear(linear)
        self.ties = ties
        self.keys = keys
        self.accumulate = accumulate
        self._frequencies = {ratio: rope_frequencies(config, ratio) for ratio in set(config.compress_ratios)}

    def new_sequence(self) -> Sequence:
        """An empty sequence for the layers of this model."""
        return Sequence(self.config, self.layers)

    def forward(
        self, layer: int, x: U16, start_pos: int, sequence: Sequence, trace: dict[str, Any] | None = None
    ) -> U16:
        """Output bf16 bits [n, dim] of `layer` for the tokens at start_pos .. start_pos + n - 1.

        x bf16 bits [n, dim]. The layers run in order, each on the same tokens, before the next tokens come.
        `trace` receives every intermediate under the names of the recorded values; its ``kv_rows`` are the
        window rows from the oldest that any query sees, then the latents, and its ``idx`` points into these.
        Raises InputError, StateError (tokens that do not follow, or too many) and StepError (a source layer
        has not run).
        """
        cfg, n = self.config, len(x)
        self._check(layer, x)
        role, cache = cfg.role(layer), sequence.begin(layer, start_pos, n)
        positions = np.arange(start_pos, start_pos + n)
        table = rope_table(self._frequencies[role.ratio], positions)
        trace = {} if trace is None else trace

        qr = self._norm(layer, "q_norm", self._linear(layer, "wq_a", x))
        q = rotate(self._linear(layer, "wq_b", qr).reshape(n, cfg.n_heads, cfg.head_dim), table)
        cache.add_window(rotate(self._norm(layer, "kv_norm", self._linear(layer, "wkv", x)), table))
        oldest = max(0, start_pos - cfg.window_size + 1)
        rows = cache.window_rows(oldest)
        idx = window_indices(positions, cfg.window_size, oldest)
        trace["window"] = np.where(idx >= 0, idx + oldest, -1)

        if role.kind == "full":
            self._compress(x, cache, sequence, trace)
        if role.kind in ("full", "reindex"):
            self._select(x, qr, positions, sequence, cache, trace)
        if role.kv_source is not None and role.index_source is not None:
            selection = sequence.caches[role.index_source].selection
            assert selection is not None  # `begin` has checked that the layer ran
            picked = np.where(selection >= 0, selection + np.int32(len(rows)), np.int32(-1))
            idx = np.concatenate([idx, picked], axis=-1)
            rows = np.concatenate([rows, sequence.caches[role.kv_source].latent_rows()])
            trace["selection"] = selection

        o = sparse_attention(q, rows, idx, self._weight(layer, "attn_sink"), cfg.head_dim**-0.5)
        back = rotate(o, table, inverse=True)
        grouped = output_groups(back, self._bf16_weight(layer, "wo_a"), cfg.o_groups, self.accumulate)
        out = self._linear(layer, "wo_b", grouped)
        trace.update(qr=qr, q=q, kv_rows=rows, idx=idx, o=o, out=out)
        return out

    def _compress(self, x: U16, cache: LayerCache, sequence: Sequence, trace: dict[str, Any]) -> None:
        """Latents and index keys of the groups that these tokens complete, if any.

        Group j sits at position j * ratio.
        """
        layer, ratio = cache.role.layer, cache.role.ratio
        done, complete = len(cache.latents), cache.length // ratio
        if ratio == 1:
            pooled = self._linear(layer, "compressor.wkv", x)
        else:
            cache.add_members(*(self._pooling(layer, name, x) for name in ("wkv", "wgate")))
            members = slice(done * ratio, complete * ratio)
            shape = (complete - done, ratio, self.config.head_dim)
            pooled = pool_groups(cache.kv[members].reshape(shape), cache.gate[members].reshape(shape))
        if complete == done:
            return
        latent = self._norm(layer, "compressor.norm", pooled)
        table = rope_table(self._frequencies[ratio], np.arange(done, complete) * ratio)
        key = self._norm(layer, "indexer.k_norm", self._linear(layer, "indexer.wk", latent))
        cache.add_latents(rotate(latent, table), rotate(key, table))
        sequence.published = layer
        trace["latent_pre_rope"] = latent

    def _select(
        self,
        x: U16,
        qr: U16,
        positions: NDArray[np.int64],
        sequence: Sequence,
        cache: LayerCache,
        trace: dict[str, Any],
    ) -> None:
        """The compressed positions that each query attends to, out of those whose whole group it can see."""
        cfg, role, layer = self.config, cache.role, cache.role.layer
        assert role.kv_source is not None  # a layer with an indexer has keys to score
        table = rope_table(self._frequencies[role.ratio], positions)
        q = self._linear(layer, "indexer.wq_b", qr).reshape(len(x), cfg.index_n_heads, cfg.index_head_dim)
        q = round_trip("index", rotate(q, table))
        w = scale_weights(self._linear(layer, "indexer.weights_proj", x), cfg.index_head_dim)
        keys = sequence.caches[role.kv_source].key_rows()
        if self.keys == "published":
            keys = sequence.published_keys(len(keys))
        visible, size = (positions + 1) // role.ratio, cfg.candidate_block_size
        allowed = None
        if role.candidate_source is not None:
            blocks = sequence.caches[role.candidate_source].candidates
            assert blocks is not None
            allowed = candidate_positions(blocks, size, len(keys))
        hidden = hidden_positions(len(keys), visible, allowed)
        scores = mask_scores(index_scores(q, keys, w), hidden)
        if role.is_candidate_source:
            cache.candidates = select_candidate_blocks(scores, visible, cfg.candidate_topk_blocks, size, self.ties)
            trace["candidates"] = candidate_positions(cache.candidates, size, len(keys))
        picks = TOPK[self.ties](scores, cfg.index_topk, hidden)
        # torch also picks masked positions where too few can be reached; those not visible yet are dropped.
        picks[picks >= visible[:, None]] = -1
        cache.selection = picks
        trace.update(index_q=q, index_weights=w, index_score=bf16_encode(scores))

    # ---- weights

    def _linear(self, layer: int, name: str, x: U16) -> U16:
        if self.linear == "fp8" and name in FP8_LINEARS:
            codes, scales = self._weight(layer, f"{name}.weight"), self._weight(layer, f"{name}.scale")
            return linear_fp8(x, codes, scales, self.accumulate)
        return linear(x, self._bf16_weight(layer, name), self.accumulate)

    def _pooling(self, layer: int, name: str, x: U16) -> F32:
        return linear_f32(x, self._weight(layer, f"compressor.{name}.weight"), self.accumulate)

    def _norm(self, layer: int, name: str, x: U16) -> U16:
        return rms_norm(x, self._weight(layer, f"{name}.weight"), self.config.norm_eps)

    def _bf16_weight(self, layer: int, name: str) -> NDArray[Any]:
        weight = self._weight(layer, f"{name}.weight")
        if weight.dtype == np.uint8:
            return bf16_encode(dequantize_weight(weight, self._weight(layer, f"{name}.scale")))
        return weight

    def _weight(self, layer: int, name: str) -> NDArray[Any]:
        full = f"layers.{layer}.attn.{name}"
        try:
            return np.asarray(self.weights[full])
        except KeyError:
            raise MissingTensor(
                f"tensor {full!r} is missing; layer {layer} needs it in linear mode {self.linear!r}"
            ) from None

    def _check(self, layer: int, x: U16) -> None:
        if layer not in self.layers:
            raise StepError(f"layer {layer} is not part of this model; expected one of {list(self.layers)}")
        if x.dtype != np.uint16 or x.ndim != 2 or x.shape[1] != self.config.dim or not len(x):
            raise InputError(
                f"x has dtype {x.dtype} and shape {tuple(x.shape)}; expected bf16 bits (uint16) "
                f"[tokens >= 1, {self.config.dim}]"
            )
