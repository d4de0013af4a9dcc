"""One layer of a step: the kernels in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import FP8_LINEARS, LayerRole
from ds41_tvm.errors import StepError
from ds41_tvm.numerics import formats
from ds41_tvm.packing import aligned, aligned_copy
from ds41_tvm.program import PAD_ROWS, Kernel, Program
from ds41_tvm.runtime.memory import Workspace
from ds41_tvm.runtime.state import Caches
from ds41_tvm.runtime.step import Groups, LayerRows, Step
from ds41_tvm.runtime.weights import LayerWeights

U16 = NDArray[np.uint16]
Array = NDArray[Any]
Trace = dict[str, Any]
# Bytes of index scores held at a time: more queries than fit are processed in turn.
SCORE_BYTES = 32 << 20
# Linear layers that read the input or write the output of a layer.
_OUTER_LINEARS = ("wq_a", "wkv", "compressor.wkv", "compressor.wgate", "indexer.weights_proj", "wo_b")


@dataclass
class Context:
    """What all layers of a runner share."""

    program: Program
    functions: Mapping[str, Callable[..., Any]]
    caches: Caches
    workspace: Workspace
    threads: int
    keys: str

    def __getitem__(self, kernel: Kernel) -> Callable[..., Any]:
        return self.functions[kernel.name]


class Layer:
    """A layer bound to its weights."""

    def __init__(self, context: Context, role: LayerRole, weights: LayerWeights) -> None:
        self.context, self.role, self.weights = context, role, weights
        program = context.program
        self._linears = program.linears(role)
        self._linear_functions = {
            name: {rows: context[k] for rows, k in linear.kernels().items()} for name, linear in self._linears.items()
        }
        self._attention = {split: context[program.attention(role, split)] for split in program.splits()}

    @property
    def whole_rows(self) -> int:
        """Buffers of input and output need no rows beyond the tokens' for one token and for multiples of this."""
        return math.lcm(*(max(f) for name, f in self._linear_functions.items() if name in _OUTER_LINEARS))

    def forward(self, x: U16, step: Step, trace: Trace | None, out: U16 | None = None) -> U16:
        """Output bf16 bits ``[tokens, dim]``; `x` bf16 bits in an aligned buffer of `tokens` + PAD_ROWS rows, or fewer:
        see `whole_rows`.

        The output is a new array, or the first rows of `out`, a buffer like that of x.
        """
        c, n, p, ctx = self.context.program.config, step.tokens, self.context.program, self.context
        rope = step.rope[self.role.ratio > 0]
        qr = self._rows("qr", n, c.q_lora_rank)
        ctx[p.norm(c.q_lora_rank)](self._linear("wq_a", x, n)[:n], self.weights.norm["q_norm"], qr[:n])
        q = self._rows("q", n, c.n_heads, c.head_dim)
        flat_q = self._linear("wq_b", qr, n)[:n].reshape(n, c.n_heads, c.head_dim)
        ctx[p.rope(c.n_heads, c.head_dim)](flat_q, rope, q[:n])

        rows = LayerRows(aligned((n, formats.row_bytes("window", c.head_dim)), np.uint8))
        kv = self._norm_rope("wkv", "kv_norm", x, n, c.head_dim, rope)
        ctx[p.pack("window", 1, c.head_dim)](kv, self._arange(n), rows.window.reshape(n, 1, -1))
        if self.role.kind == "full":
            self._compress(x, step, rows, trace)
        if self.role.kind in ("full", "reindex"):
            self._select(x, qr, step, rows, trace)
        step.done[self.role.layer] = rows

        o = self._rows("o", n, c.n_heads, c.head_dim)
        self._attend(q[:n], step, rows, o[:n])
        back = self._rows("back", n, c.n_heads, c.head_dim)
        ctx[p.rope(c.n_heads, c.head_dim, True)](o[:n], rope, back[:n])
        grouped = self._linear("wo_a", back.reshape(len(back), -1), n)
        if out is None:
            out = aligned((n + PAD_ROWS, c.dim), np.uint16)
        self._linear("wo_b", grouped, n, out)
        if trace is not None:
            trace.update(qr=qr[:n].copy(), q=q[:n].copy(), o=o[:n].copy(), out=out[:n].copy())
        return out[:n]

    # ---- compressed positions

    def _compress(self, x: U16, step: Step, rows: LayerRows, trace: Trace | None) -> None:
        """Latents and index keys of the groups that complete, written into the sequence's blocks."""
        c, n, p, ctx = self.context.program.config, step.tokens, self.context.program, self.context
        layer, ratio = self.role.layer, self.role.ratio
        groups = step.groups[ratio]
        count = len(groups.row)
        if ratio > 1:
            kv, gate = (
                self._linear(name, x, n, aligned((n + PAD_ROWS, c.head_dim), np.float32))[:n]
                for name in ("compressor.wkv", "compressor.wgate")
            )
            rows.members = (kv, gate)
            if not count:
                return
            pooled = self._rows("pooled", count, c.head_dim)[:count]
            ctx[p.pool(ratio)](kv, gate, ctx.caches.members[ratio].arrays[layer], groups.member, pooled)
        else:
            pooled = self._linear("compressor.wkv", x, n)[:n]
        latent = self._rows("latent", count, c.head_dim)
        ctx[p.norm(c.head_dim)](pooled, self.weights.norm["compressor.norm"], latent[:count])
        key = self._norm_rope("indexer.wk", "indexer.k_norm", latent, count, c.index_head_dim, groups.rope)
        keys = ctx.caches.keys(layer)
        ctx[p.pack("index", 1, c.index_head_dim)](key, groups.row, keys.reshape(len(keys), 1, -1))
        turned = self._rows("latent_rope", count, 1, c.head_dim)[:count]
        ctx[p.rope(1, c.head_dim)](latent[:count].reshape(count, 1, -1), groups.rope, turned)
        latents = ctx.caches.latents(layer)
        ctx[p.pack("latent", 1, c.head_dim)](turned, groups.row, latents.reshape(len(latents), 1, -1))
        for i, completes in enumerate(groups.completes):
            if completes:
                step.published[i] = layer
        if trace is not None:
            trace["latent"] = latent[:count].copy()

    def _select(self, x: U16, qr: U16, step: Step, rows: LayerRows, trace: Trace | None) -> None:
        """The compressed positions that each query attends to, ``rows.selection``; a candidate source's blocks too."""
        c, n, p, ctx = self.context.program.config, step.tokens, self.context.program, self.context
        heads, dim = c.index_n_heads, c.index_head_dim
        turned = self._rows("index_rope", n, heads, dim)[:n]
        ctx[p.rope(heads, dim)](self._linear("indexer.wq_b", qr, n)[:n].reshape(n, heads, dim), step.rope[True], turned)
        q = self._rows("index_q", n, heads, formats.row_bytes("index", dim), dtype=np.uint8)[:n]
        ctx[p.pack("index", heads, dim)](turned, self._arange(n), q)
        w = self._rows("index_weights", n, heads)[:n]
        ctx[p.scale_weights()](self._linear("indexer.weights_proj", x, n)[:n], w)
        rows.selection = aligned((n, c.index_topk), np.int32)
        if self.role.is_candidate_source:
            rows.candidates = aligned((n, c.candidate_topk_blocks), np.int32)
        allowed = None
        if self.role.candidate_source is not None:
            allowed = self._source(step, self.role.candidate_source).candidates
        width = max(1, int(step.groups[self.role.ratio].total.max(initial=0)))
        scores = np.full((n, width), 0xFF80, np.uint16) if trace is not None else None
        for first, last, key_layer in self._key_runs(step):
            self._select_run(step, rows, q, w, allowed, first, last, key_layer, scores)
        if trace is not None:
            trace["index_q"] = formats.dequantize_index(*formats.unpack_index_row(q, dim))
            trace["index_weights"] = w.copy()
            trace["scores"] = scores
            if rows.candidates is not None:
                trace["candidates"] = rows.candidates.copy()

    def _key_runs(self, step: Step) -> Iterator[tuple[int, int, int]]:
        """Runs of tokens (first, last + 1, layer whose keys they score), see `Runner` on `keys`."""
        own = self.role.kv_source
        assert own is not None  # an indexer always has a source of keys
        runs: list[list[int]] = []
        for base, count, published in zip(step.base, step.counts, step.published, strict=True):
            layer = published if self.context.keys == "published" and published is not None else own
            if runs and runs[-1][2] == layer:
                runs[-1][1] = int(base) + count
            elif count:
                runs.append([int(base), int(base) + count, layer])
        for first, last, layer in runs:
            yield first, last, layer

    def _select_run(
        self, step: Step, rows: LayerRows, q: Array, w: U16, allowed: Array | None, begin: int, end: int,
        key_layer: int, scores: Array | None,
    ) -> None:  # fmt: skip
        """Score and select the tokens begin..end - 1, as many at a time as their scores fit `SCORE_BYTES`."""
        c, p, ctx = self.context.program.config, self.context.program, self.context
        groups = step.groups[self.role.ratio]
        size, exact_ties = c.candidate_block_size, p.ties == "torch-cpu"
        width = max(1, int(groups.total[begin:end].max(initial=0)))
        used = 0
        if allowed is not None:
            used = min(allowed.shape[1], -(-width // size))
            columns = width if exact_ties else used * size
        else:
            columns = width
        table = self._table(step, key_layer, width)
        chunk = max(1, SCORE_BYTES // (2 * columns))
        for first in range(begin, end, chunk):
            last = min(end, first + chunk)
            part = slice(first, last)
            visible, total = aligned_copy(groups.visible[part]), aligned_copy(groups.total[part])
            s = ctx.workspace.get("scores", (last - first, columns), np.uint16)
            common = (aligned_copy(q[part]), aligned_copy(w[part]), ctx.caches.keys(key_layer), table,
                      aligned_copy(step.sequence[part]), visible)  # fmt: skip
            chosen = ctx.workspace.get("chosen", (last - first, c.index_topk), np.int32)
            if allowed is None:
                ctx[p.scores(False)](*common, s)
                self._topk(c.index_topk, s, total, visible, chosen)
            else:
                blocks = aligned_copy(np.ascontiguousarray(allowed[part, :used]))
                ctx[p.scores(True)](*common, blocks, s)
                if exact_ties:
                    self._topk(c.index_topk, s, total, visible, chosen)
                else:
                    limit = _candidate_columns(blocks, visible, size)
                    ctx[p.topk(c.index_topk, True)](s, limit, blocks, chosen)
            assert rows.selection is not None  # made by _select
            rows.selection[part] = chosen
            if rows.candidates is not None:
                self._candidates(s, total, visible, rows.candidates[part])
            if scores is not None:
                _spread_scores(scores[part], s, None if allowed is None or exact_ties else blocks, size, visible)

    def _candidates(self, s: U16, total: Array, visible: Array, out: Array) -> None:
        """The best candidate blocks of each query, ascending, into `out`."""
        c, p, ctx = self.context.program.config, self.context.program, self.context
        size, n = c.candidate_block_size, len(s)
        best = ctx.workspace.get("block_scores", (n, -(-s.shape[1] // size)), np.uint16)
        ctx[p.block_scores()](s, visible, best)
        chosen = ctx.workspace.get("chosen_blocks", (n, c.candidate_topk_blocks), np.int32)
        self._topk(c.candidate_topk_blocks, best, -(-total // size), -(-visible // size), chosen)
        out[:] = chosen

    def _topk(self, k: int, s: U16, total: Array, limit: Array, out: Array) -> None:
        function = self.context[self.context.program.topk(k)]
        if self.context.program.ties == "torch-cpu":
            function(s, aligned_copy(total), aligned_copy(limit), out)
        else:
            function(s, aligned_copy(limit), out)

    def _table(self, step: Step, key_layer: int, width: int) -> Array:
        """Block table of `key_layer` for `width` positions; block 0, all zeros, where it has none."""
        table = step.groups[self.context.program.config.role(key_layer).ratio].table
        blocks = -(-width // self.context.program.block_rows)
        if table.shape[1] >= blocks:
            return table
        return aligned_copy(np.pad(table, ((0, 0), (0, blocks - table.shape[1]))))

    # ---- attention

    def _attend(self, q: Array, step: Step, rows: LayerRows, o: Array) -> None:
        ctx = self.context
        args: tuple[Array, ...] = (
            q, rows.window, ctx.caches.rings.arrays[self.role.layer], self.weights.sink, step.position, step.sequence,
            step.start, step.base, step.slot,
        )  # fmt: skip
        if self.role.ratio:
            assert self.role.kv_source is not None  # every compressed layer has its sources
            assert self.role.index_source is not None
            selection = self._source(step, self.role.index_source).selection
            assert selection is not None  # an index source leaves one
            groups: Groups = step.groups[self.role.ratio]
            args += (ctx.caches.latents(self.role.kv_source), groups.table, selection)
        # With fewer queries than threads, the heads of a query are shared out.
        split = next((s for s in sorted(self._attention) if s * step.tokens >= ctx.threads), max(self._attention))
        self._attention[split](*args, o)

    def _source(self, step: Step, layer: int) -> LayerRows:
        if layer not in step.done:
            raise StepError(
                f"layer {self.role.layer} reads what layer {layer} leaves in the step, and that has not run; call "
                f"runner.forward for the layers in ascending order"
            )
        return step.done[layer]

    # ---- rows

    def _rows(self, name: str, n: int, *shape: int, dtype: Any = np.uint16) -> Array:
        return self.context.workspace.get(name, (n + PAD_ROWS, *shape), dtype)

    def _arange(self, n: int) -> Array:
        return aligned_copy(np.arange(n, dtype=np.int64))

    def _linear(self, name: str, x: Array, n: int, out: Array | None = None) -> Array:
        """The padded output rows of a linear layer for the first n rows of the padded `x`."""
        linear, ctx = self._linears[name], self.context
        if linear.weight == "fp8" and name in FP8_LINEARS:
            y = self._rows("quantised", n, linear.k)
            ctx[ctx.program.quantize_activation(linear.k)](x[:n], y[:n])
            x = y
        if out is None:
            out = self._rows(name, n, linear.n)
        functions = self._linear_functions[name]
        rows = min(functions) if n == 1 else max(functions)
        tiles = -(-n // rows)
        functions[rows](
            x[: tiles * rows].reshape(tiles, rows, -1),
            *self.weights.linear[name],
            out[: tiles * rows].reshape(tiles, rows, -1),
        )
        return out

    def _norm_rope(self, linear: str, norm: str, x: Array, n: int, dim: int, rope: Array) -> Array:
        """RoPE(norm(linear x)) of one row each: bf16 bits ``[n, 1, dim]``."""
        p, ctx = self.context.program, self.context
        normed = self._rows(f"{linear} norm", n, 1, dim)[:n]
        ctx[p.norm(dim)](self._linear(linear, x, n)[:n], self.weights.norm[norm], normed.reshape(n, dim))
        turned = self._rows(f"{linear} rope", n, 1, dim)[:n]
        ctx[p.rope(1, dim)](normed, rope, turned)
        return turned


def _candidate_columns(blocks: Array, visible: Array, size: int) -> Array:
    """How many columns of compact candidate scores are positions: only the last block can be visible in part."""
    count = (blocks >= 0).sum(1)
    newest = np.take_along_axis(blocks, np.maximum(count - 1, 0)[:, None], 1)[:, 0]
    limit = np.where(count > 0, np.minimum((count - 1) * size + visible - newest * size, count * size), 0)
    return aligned_copy(limit.astype(np.int32))


def _spread_scores(out: Array, s: Array, blocks: Array | None, size: int, visible: Array) -> None:
    """Put the scores of a run into columns that are positions."""
    if blocks is None:
        out[:, : s.shape[1]] = s
        return
    position = np.where(blocks[..., None] >= 0, blocks[..., None] * size + np.arange(size), -1).reshape(len(s), -1)
    token, column = np.nonzero((position >= 0) & (position < visible[:, None]))
    out[token, position[token, column]] = s[token, column]
