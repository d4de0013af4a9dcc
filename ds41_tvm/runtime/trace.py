"""Intermediates of a forward call, by absolute position.

| name | shape | what |
|---|---|---|
| qr, q, o, out | [n, ...] | low-rank query; heads after RoPE; output before the inverse rotation; output (bf16 bits) |
| latent | [groups, head_dim] | latents that completed, if any, before RoPE (sources) |
| index_q, index_weights | [n, heads, dim], [n, heads] | after RoPE and quantisation; scaled (layers with an indexer) |
| scores | [n, width] | index scores by position, bf16 bits, -infinity where hidden or not a candidate |
| candidates | [n, candidate_topk_blocks] | candidate blocks, -1 = none (candidate source) |
| topk | [n, index_topk] | selected compressed positions, ascending, -1 = none (compressed layers) |
| window | [n, window_size] | window positions, -1 = none |
| kv_rows | one array per sequence | rows that its queries see: window positions from the oldest on, then latents |
| idx | [n, window_size + index_topk] | the same choice as indices into the sequence's kv_rows, -1 = none |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig, LayerRole
from ds41_tvm.numerics import formats
from ds41_tvm.runtime.step import Step

if TYPE_CHECKING:
    from ds41_tvm.runtime.runner import Runner


def add_positions(runner: Runner, layer: int, step: Step, trace: dict[str, Any]) -> None:
    """Add ``window``, ``topk``, ``kv_rows`` and ``idx`` to a trace; to that of a step without tokens the rest, too."""
    c, role = runner.config, runner.config.role(layer)
    if not step.tokens:
        trace.update(_of_no_tokens(c, role))
    first = np.maximum(step.position - c.window_size + 1, 0)[:, None]
    window = first + np.arange(c.window_size)
    window = np.where(window <= step.position[:, None], window, -1).astype(np.int32)
    oldest = np.maximum(step.start - c.window_size + 1, 0)
    rows = [_window_rows(runner, layer, step, i, int(oldest[i])) for i in range(len(step.sequences))]
    idx = np.where(window >= 0, window - oldest[step.sequence][:, None], -1)
    if role.index_source is not None and role.kv_source is not None:
        selection = step.done[role.index_source].selection
        assert selection is not None  # an index source leaves one
        selection = runner.device.download(selection)
        trace["topk"] = selection
        counts = np.array([len(r) for r in rows], np.int64)
        idx = np.concatenate([idx, np.where(selection >= 0, selection + counts[step.sequence][:, None], -1)], axis=1)
        rows = [np.concatenate([r, _latents(runner, role.kv_source, step, i)]) for i, r in enumerate(rows)]
    trace["window"], trace["kv_rows"], trace["idx"] = window, tuple(rows), idx.astype(np.int32)


def _of_no_tokens(c: AttentionConfig, role: LayerRole) -> dict[str, NDArray[Any]]:
    """What kernels would leave in a trace, with no rows."""
    shapes = {"qr": (c.q_lora_rank,), "q": (c.n_heads, c.head_dim), "o": (c.n_heads, c.head_dim), "out": (c.dim,)}
    if role.kind in ("full", "reindex"):
        heads = c.index_n_heads
        shapes.update(index_q=(heads, c.index_head_dim), index_weights=(heads,), scores=(1,))
    found: dict[str, NDArray[Any]] = {name: np.zeros((0, *shape), np.uint16) for name, shape in shapes.items()}
    if role.is_candidate_source:
        found["candidates"] = np.zeros((0, c.candidate_topk_blocks), np.int32)
    return found


def _window_rows(runner: Runner, layer: int, step: Step, i: int, oldest: int) -> NDArray[np.uint16]:
    """Window rows of sequence i from position `oldest` to the end of the step, dequantised."""
    ring, dim = runner.caches.window_ring, runner.config.head_dim
    old = runner.caches.rings.read(layer, int(step.slot[i]) * ring + np.arange(oldest, step.start[i]) % ring)
    first = int(step.base[i])
    new = runner.device.download(step.done[layer].window[first : first + step.counts[i]]).reshape(-1, old.shape[1])
    return formats.dequantize_window(*formats.unpack_window_row(np.concatenate([old, new]), dim))


def _latents(runner: Runner, source: int, step: Step, i: int) -> NDArray[np.uint16]:
    """Latent rows of sequence i, those that complete in the step included, dequantised."""
    ratio, dim = runner.config.role(source).ratio, runner.config.head_dim
    groups = np.arange((int(step.start[i]) + step.counts[i]) // ratio)
    rows = runner.caches.blocks[ratio].read((source, "latent"), step.sequences[i].rows(ratio, groups))
    return formats.dequantize_latent(*formats.unpack_latent_row(rows, dim))
