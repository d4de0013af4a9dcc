"""One attention layer of the torch yardstick: projections, caches, selection, sparse attention, output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ds41_tvm.bench.torch_ops import (
    NEG_INF,
    Tensor,
    candidate_blocks,
    fake_quant_index,
    fake_quant_latent,
    fake_quant_window,
    rms_norm,
    rope,
    torch,
)
from ds41_tvm.config import AttentionConfig, LayerRole
from ds41_tvm.errors import StepError

Variant = Literal["torch", "torch-mv", "torch-f32"]

# Linear mode fp8 quantises the inputs of these; their weights are e4m3.
QUANTISED = frozenset({"wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b"})

# Queries handled at once: bounds the [b, s, h, t] index products and the gathered rows to some hundred MB.
QUERY_CHUNK = 64


@dataclass
class Shared:
    """What all layers have in common, and the index keys published by the last layer to complete a group.

    Every indexer reads ``keys`` until another layer publishes. This is the official rule: at a decode step
    that completes no group of a ratio-2 source, its indexer scores against what the step before left there.
    """

    config: AttentionConfig
    mode: str
    variant: Variant
    slots: int
    keys: Tensor | None = None


class LayerAttention:
    """One layer: its weights, its caches, and what later layers read from it."""

    def __init__(
        self,
        shared: Shared,
        role: LayerRole,
        weights: dict[str, Tensor],
        table: Tensor,
        kv_source: LayerAttention | None,
        index_source: LayerAttention | None,
        candidate_source: LayerAttention | None,
    ) -> None:
        self.config, self.role, self.table, self.shared = shared.config, role, table, shared
        config, slots = shared.config, shared.slots
        self.kv_source = kv_source or self
        self.index_source = index_source or self
        self.candidate_source = candidate_source
        self.product = PRODUCTS[shared.variant]
        widened = {"attn_sink"} | ({"compressor.wkv.weight", "compressor.wgate.weight"} if role.ratio > 1 else set())
        self.w = {
            name: w.float() if shared.variant == "torch-f32" or name in widened else w for name, w in weights.items()
        }
        self.window_cache = torch.zeros(slots, config.window_size, config.head_dim, dtype=torch.bfloat16)
        self.selection: Tensor | None = None  # int64 [b, s, k], -1 where nothing is selected
        self.candidates: Tensor | None = None  # bool [b, s, t]
        if role.kind == "full":
            rows = config.max_seq_len // role.ratio
            self.latent_cache = torch.zeros(slots, rows, config.head_dim, dtype=torch.bfloat16)
            self.key_cache = torch.zeros(slots, rows, config.index_head_dim, dtype=torch.bfloat16)
            self.kv_state = torch.zeros(slots, role.ratio, config.head_dim)
            self.gate_state = torch.zeros(slots, role.ratio, config.head_dim)

    def linear(self, x: Tensor, name: str) -> Tensor:
        if self.shared.mode == "fp8" and name in QUANTISED:
            x = fake_quant_window(x)
        return self.product(x, self.w[f"{name}.weight"])

    def forward(self, x: Tensor, start_pos: int, trace: dict[str, Tensor]) -> Tensor:
        cfg, w, linear = self.config, self.w, self.linear
        batch, tokens, _ = x.shape
        table = self.table[start_pos : start_pos + tokens]

        qr = rms_norm(linear(x, "wq_a"), w["q_norm.weight"], cfg.norm_eps)
        q = rope(linear(qr, "wq_b").unflatten(-1, (cfg.n_heads, cfg.head_dim)), table)
        window = rms_norm(linear(x, "wkv"), w["kv_norm.weight"], cfg.norm_eps)
        window = fake_quant_window(rope(window, table))
        sources = [self._window_rows(window, start_pos)]

        if self.role.ratio > 0:
            seen = (start_pos + tokens) // self.role.ratio
            if self.role.kind == "full":
                self._compress(x, start_pos, trace)
            if self.role.kind != "reuse":
                self._select(x, qr, start_pos, trace)
            selection = _from_source(self.index_source.selection, self.role, self.role.index_source)
            sources.append((self.kv_source.latent_cache[:batch, :seen], selection))

        o = sparse_attention(q, sources, w["attn_sink"], cfg.head_dim**-0.5, self.shared.variant != "torch-mv")
        trace.update(qr=qr, q=q, o=o, window_rows=sources[0][0], window_idx=sources[0][1])
        o = rope(o, table, inverse=True).reshape(batch, tokens, cfg.o_groups, -1)
        wo_a = w["wo_a.weight"].unflatten(0, (cfg.o_groups, cfg.o_lora_rank))
        if self.product is _linear_mv and batch * tokens == 1:
            low = torch.stack([torch.mv(wo_a[g], o[0, 0, g]) for g in range(cfg.o_groups)])[None, None]
        else:
            low = torch.einsum("bsgd,grd->bsgr", o.to(wo_a.dtype), wo_a).bfloat16()
        out = linear(low.flatten(2), "wo_b")
        trace["out"] = out
        return out

    def _window_rows(self, window: Tensor, start_pos: int) -> tuple[Tensor, Tensor]:
        """The rows to attend to and each query's indices into them ``[b, s, window]``; writes the ring."""
        batch, tokens, _ = window.shape
        size = self.config.window_size
        if start_pos > 0:
            self.window_cache[:batch, start_pos % size] = window[:, 0]
            slots = torch.arange(size)
            slots = torch.where(slots <= start_pos, slots, -1)  # all of the ring once it has gone round
            return self.window_cache[:batch], slots.expand(batch, 1, size)
        kept = min(tokens, size)
        self.window_cache[:batch, torch.arange(tokens - kept, tokens) % size] = window[:, -kept:]
        reach = torch.arange(tokens).unsqueeze(1) - size + 1 + torch.arange(size)
        return window, torch.where(reach >= 0, reach, -1).expand(batch, tokens, size)

    def _compress(self, x: Tensor, start_pos: int, trace: dict[str, Tensor]) -> None:
        """Pool the groups that this call completes into latents and index keys, and cache both."""
        cfg, w, ratio = self.config, self.w, self.role.ratio
        batch, tokens, _ = x.shape
        if ratio == 1:
            kv = self.linear(x, "compressor.wkv")
        else:
            wide = x.float()
            kv = torch.nn.functional.linear(wide, w["compressor.wkv.weight"])
            gate = torch.nn.functional.linear(wide, w["compressor.wgate.weight"])
            if start_pos > 0:
                member = start_pos % ratio
                self.kv_state[:batch, member], self.gate_state[:batch, member] = kv[:, 0], gate[:, 0]
                if member != ratio - 1:
                    return
                kv, gate = self.kv_state[:batch], self.gate_state[:batch]
            else:
                whole = tokens - tokens % ratio
                self.kv_state[:batch, : tokens - whole] = kv[:, whole:]
                self.gate_state[:batch, : tokens - whole] = gate[:, whole:]
                if whole == 0:
                    return
                kv, gate = kv[:, :whole], gate[:, :whole]
            kv, gate = kv.unflatten(1, (-1, ratio)), gate.unflatten(1, (-1, ratio))
            kv = (kv * gate.softmax(2)).sum(2).bfloat16()
        latent = rms_norm(kv, w["compressor.norm.weight"], cfg.norm_eps)
        trace["latent_pre_rope"] = latent
        first = start_pos // ratio
        span = slice(first, first + latent.size(1))
        table = self.table[span.start * ratio : span.stop * ratio : ratio]  # group j sits at position j * ratio
        key = rms_norm(self.linear(latent, "indexer.wk"), w["indexer.k_norm.weight"], cfg.norm_eps)
        self.key_cache[:batch, span] = fake_quant_index(rope(key, table))
        self.shared.keys = self.key_cache
        self.latent_cache[:batch, span] = fake_quant_latent(rope(latent, table))

    def _select(self, x: Tensor, qr: Tensor, start_pos: int, trace: dict[str, Tensor]) -> None:
        """Score every compressed position for every query and keep the best ``index_topk``, ascending."""
        cfg, role = self.config, self.role
        batch, tokens, _ = x.shape
        seen = (start_pos + tokens) // role.ratio
        heads = (cfg.index_n_heads, cfg.index_head_dim)
        q = self.linear(qr, "indexer.wq_b").unflatten(-1, heads)
        q = fake_quant_index(rope(q, self.table[start_pos : start_pos + tokens]))
        scale = cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5
        weights = self.linear(x, "indexer.weights_proj") * scale
        published = self.shared.keys  # none before the first complete group
        keys = q.new_empty(batch, 0, cfg.index_head_dim) if published is None else published[:batch, :seen]
        selections, kept, scores = [], [], []
        for begin in range(0, tokens, QUERY_CHUNK):
            part = slice(begin, min(begin + QUERY_CHUNK, tokens))
            score = torch.einsum("bshd,btd->bsht", q[:, part], keys)
            score = (score.relu() * weights[:, part].unsqueeze(-1)).sum(dim=2)
            visible = (torch.arange(start_pos + part.start, start_pos + part.stop).unsqueeze(1) + 1) // role.ratio
            score = score.masked_fill(torch.arange(seen) >= visible, NEG_INF)
            if role.is_candidate_source:
                kept.append(candidate_blocks(score, visible, cfg.candidate_topk_blocks, cfg.candidate_block_size))
            elif self.candidate_source is not None:
                inside = _from_source(self.candidate_source.candidates, role, role.candidate_source)[:, part]
                score = score.masked_fill(~inside, NEG_INF)
            best = score.topk(min(cfg.index_topk, seen), dim=-1, sorted=False).indices.sort(-1).values
            # As the official code: a masked pick that is causally reachable stays.
            selections.append(torch.where(best < visible, best, -1))
            scores.append(score)
        self.selection = torch.cat(selections, dim=1)
        if kept:
            self.candidates = trace["candidates"] = torch.cat(kept, dim=1)
        trace.update(selection=self.selection, index_q=q, index_weights=weights, index_score=torch.cat(scores, dim=1))


def _from_source(value: Tensor | None, role: LayerRole, source: int | None) -> Tensor:
    if value is None:
        raise StepError(f"layer {role.layer} was called before layer {source}, whose selection it reads; call it first")
    return value


def _linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight).bfloat16()


def _linear_mv(x: Tensor, weight: Tensor) -> Tensor:
    if x.numel() == x.size(-1):
        return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
    return torch.nn.functional.linear(x, weight)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": torch.nn.functional.linear,
    "torch-mv": _linear_mv,
    "torch-f32": _linear_f32,
}


def sparse_attention(
    q: Tensor, sources: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float, joined: bool
) -> Tensor:
    """``softmax(scale * q . kv, with the sink in the denominator only) @ kv``, float32 inside.

    ``kv`` are the chosen rows of every source ``(rows [b, n, d] bf16, chosen [b, s, k])``, -1 for nothing;
    ``q`` and the result are ``[b, s, h, d]`` bf16. The official code joins the rows of all sources in one tensor first,
    whatever the context; with ``joined`` False a single query takes its chosen rows only.
    """
    batch, tokens, heads, _ = q.shape
    if tokens == 1 and not joined:
        sources = [_chosen_only(rows, chosen) for rows, chosen in sources]
    offsets = [0] + [rows.size(1) for rows, _ in sources[:-1]]
    table = torch.cat([rows for rows, _ in sources], dim=1)
    if tokens > 1:  # rows are chosen by many queries: widened once
        table = table.float()
    index = torch.cat(
        [torch.where(chosen < 0, -1, chosen + offset) for (_, chosen), offset in zip(sources, offsets, strict=True)],
        dim=-1,
    )
    out = torch.empty_like(q)
    sink = sink.view(1, heads, 1)
    for b in range(batch):
        for begin in range(0, tokens, QUERY_CHUNK):
            part = slice(begin, min(begin + QUERY_CHUNK, tokens))
            picked = index[b, part]
            kv = table[b][picked.clamp_min(0)].float()  # [s, k, d]
            score = torch.bmm(q[b, part].float(), kv.transpose(1, 2)).mul_(scale)
            score.masked_fill_((picked < 0).unsqueeze(1), NEG_INF)
            top = torch.maximum(score.amax(-1, keepdim=True), sink)
            weight = score.sub_(top).exp_()
            total = weight.sum(-1, keepdim=True) + (sink - top).exp()
            out[b, part] = torch.bmm(weight, kv).div_(total).bfloat16()
    return out


def _chosen_only(rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The source ``(rows, chosen)`` of one query a sequence without the rows that it does not choose."""
    batch = torch.arange(rows.size(0)).unsqueeze(1)
    flat = chosen[:, 0]
    return rows[batch, flat.clamp_min(0)], torch.where(chosen < 0, -1, torch.arange(flat.size(1)))
