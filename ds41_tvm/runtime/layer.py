"""One layer of a step: the kernels in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import FP8_LINEARS, LayerRole
from ds41_tvm.numerics import formats
from ds41_tvm.program import PAD_ROWS, Kernel, Program
from ds41_tvm.runtime.device import Array, Device
from ds41_tvm.runtime.memory import Workspace
from ds41_tvm.runtime.state import Caches
from ds41_tvm.runtime.step import Groups, LayerRows, Step
from ds41_tvm.runtime.weights import LayerWeights

Trace = dict[str, Any]
# Linear layers that read the input or write the output of a layer.
_OUTER_LINEARS = ("wq_a", "wkv", "compressor.wkv", "compressor.wgate", "indexer.weights_proj", "wo_b")


@dataclass
class Context:
    """What all layers of a runner share."""

    program: Program
    functions: Mapping[str, Callable[..., Any]]
    caches: Caches
    workspace: Workspace
    device: Device
    keys: str
    _found: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __getitem__(self, kernel: Kernel) -> Callable[..., Any]:
        return self.functions[kernel.name]

    def of(self, what: Callable[..., Kernel], *sizes: Any) -> Callable[..., Any]:
        """The function of the kernel ``what(program, *sizes)``, found by name once: names are long."""
        key = what, *sizes
        if key not in self._found:
            self._found[key] = self[what(self.program, *sizes)]
        return self._found[key]

    def fitting(self, array: Array, name: str) -> Array:
        """`array`, or a copy in scratch memory of that name if kernels cannot take it where it lies."""
        if self.device.fits(array):
            return array
        out = self.workspace.get(name, array.shape, array.dtype)
        self.device.copy(out, array)
        return out


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

    def forward(self, x: Array, step: Step, trace: Trace | None, out: Array | None = None) -> Array:
        """Output bf16 bits ``[tokens, dim]``; `x` bf16 bits in an aligned buffer of `tokens` + PAD_ROWS rows, or fewer:
        see `whole_rows`.

        The output is a new array, or the first rows of `out`, a buffer like that of x.
        """
        c, n, ctx = self.context.program.config, step.tokens, self.context
        rope = step.plan.rope[self.role.ratio > 0]
        qr = self._rows("qr", n, c.q_lora_rank)
        ctx.of(Program.norm, c.q_lora_rank)(self._linear("wq_a", x, n)[:n], self.weights.norm["q_norm"], qr[:n])
        q = self._rows("q", n, c.n_heads, c.head_dim)
        flat_q = self._linear("wq_b", qr, n)[:n].reshape(n, c.n_heads, c.head_dim)
        ctx.of(Program.rope, c.n_heads, c.head_dim)(flat_q, rope, q[:n])

        rows = step.rows[self.role.layer]
        kv = self._norm_rope("wkv", "kv_norm", x, n, c.head_dim, rope)
        ctx.of(Program.pack, "window", 1, c.head_dim)(kv, step.plan.rows, rows.window.reshape(n, 1, -1))
        if self.role.kind == "full":
            self._compress(x, step, rows, trace)
        if self.role.kind in ("full", "reindex"):
            self._select(x, qr, step, rows, trace)
        step.done[self.role.layer] = rows

        o = self._rows("o", n, c.n_heads, c.head_dim)
        self._attend(q[:n], step, rows, o[:n])
        back = self._rows("back", n, c.n_heads, c.head_dim)
        ctx.of(Program.rope, c.n_heads, c.head_dim, True)(o[:n], rope, back[:n])
        grouped = self._linear("wo_a", back.reshape(len(back), -1), n)
        if out is None:
            out = ctx.device.empty((n + PAD_ROWS, c.dim), np.uint16)
        self._linear("wo_b", grouped, n, out)
        if trace is not None:
            trace.update({k: ctx.device.download(a[:n]) for k, a in {"qr": qr, "q": q, "o": o, "out": out}.items()})
        return out[:n]

    def mark_done(self, step: Step) -> None:
        """What the step knows once this layer has run: its rows, and whose index keys were published last."""
        step.done[self.role.layer] = step.rows[self.role.layer]
        self._publish(step)

    def _publish(self, step: Step) -> None:
        if self.role.kind == "full":
            for i, completes in enumerate(step.groups[self.role.ratio].completes):
                if completes:
                    step.published[i] = self.role.layer

    # ---- compressed positions

    def _compress(self, x: Array, step: Step, rows: LayerRows, trace: Trace | None) -> None:
        """Latents and index keys of the groups that complete, written into the sequence's blocks."""
        c, n, ctx = self.context.program.config, step.tokens, self.context
        layer, ratio = self.role.layer, self.role.ratio
        groups = step.groups[ratio]
        count = groups.count
        if rows.members is not None:
            kv, gate = (
                self._linear(name, x, n, out)[:n]
                for name, out in zip(("compressor.wkv", "compressor.wgate"), rows.members, strict=True)
            )
            if not count:
                return
            pooled = self._rows("pooled", count, c.head_dim)[:count]
            ctx.of(Program.pool, ratio)(kv, gate, ctx.caches.members[ratio].arrays[layer], groups.member, pooled)
        else:
            pooled = self._linear("compressor.wkv", x, n)[:n]
        latent = self._rows("latent", count, c.head_dim)
        ctx.of(Program.norm, c.head_dim)(pooled, self.weights.norm["compressor.norm"], latent[:count])
        key = self._norm_rope("indexer.wk", "indexer.k_norm", latent, count, c.index_head_dim, groups.rope)
        keys = ctx.caches.keys(layer)
        ctx.of(Program.pack, "index", 1, c.index_head_dim)(key, groups.row, keys.reshape(len(keys), 1, -1))
        turned = self._rows("latent_rope", count, 1, c.head_dim)[:count]
        ctx.of(Program.rope, 1, c.head_dim)(latent[:count].reshape(count, 1, -1), groups.rope, turned)
        latents = ctx.caches.latents(layer)
        ctx.of(Program.pack, "latent", 1, c.head_dim)(turned, groups.row, latents.reshape(len(latents), 1, -1))
        self._publish(step)
        if trace is not None:
            trace["latent"] = ctx.device.download(latent[:count])

    def _select(self, x: Array, qr: Array, step: Step, rows: LayerRows, trace: Trace | None) -> None:
        """The compressed positions that each query attends to, ``rows.selection``; a candidate source's blocks too."""
        c, n, ctx = self.context.program.config, step.tokens, self.context
        heads, dim = c.index_n_heads, c.index_head_dim
        turned = self._rows("index_rope", n, heads, dim)[:n]
        ctx.of(Program.rope, heads, dim)(
            self._linear("indexer.wq_b", qr, n)[:n].reshape(n, heads, dim), step.plan.rope[True], turned
        )
        q = self._rows("index_q", n, heads, formats.row_bytes("index", dim), dtype=np.uint8)[:n]
        ctx.of(Program.pack, "index", heads, dim)(turned, step.plan.rows, q)
        w = self._rows("index_weights", n, heads)[:n]
        ctx.of(Program.scale_weights)(self._linear("indexer.weights_proj", x, n)[:n], w)
        allowed = None
        if self.role.candidate_source is not None:
            allowed = step.done[self.role.candidate_source].candidates
        width = max(1, int(step.groups[self.role.ratio].most.max(initial=0)))
        scores = np.full((n, width), 0xFF80, np.uint16) if trace is not None else None
        for first, last, key_layer in self._key_runs(step):
            self._select_run(step, rows, q, w, allowed, first, last, key_layer, scores)
        if trace is not None:
            trace["index_q"] = formats.dequantize_index(*formats.unpack_index_row(ctx.device.download(q), dim))
            trace["index_weights"] = ctx.device.download(w)
            trace["scores"] = scores
            if rows.candidates is not None:
                trace["candidates"] = ctx.device.download(rows.candidates)

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
        self, step: Step, rows: LayerRows, q: Array, w: Array, allowed: Array | None, begin: int, end: int,
        key_layer: int, scores: NDArray[np.uint16] | None,
    ) -> None:  # fmt: skip
        """Score and select the tokens begin..end - 1, as many at a time as their scores fit `Device.score_bytes`."""
        c, p, ctx = self.context.program.config, self.context.program, self.context
        groups, table = step.groups[self.role.ratio], self._table(step, key_layer)
        size, exact_ties = c.candidate_block_size, p.ties == "torch-cpu"
        width = ctx.device.leap(max(1, int(groups.most[begin:end].max(initial=0))))
        used = 0
        if allowed is not None:
            # Elsewhere than on the host, all columns: they stay one piece of memory, and kernels skip those without.
            used = min(allowed.shape[1], -(-width // size)) if ctx.device.on_host else allowed.shape[1]
        columns = width if allowed is None or exact_ties else used * size
        chunk = max(1, ctx.device.score_bytes // (2 * columns))
        assert rows.selection is not None  # every layer with an indexer has memory for one
        for first in range(begin, end, chunk):
            last = min(end, first + chunk)
            part = slice(first, last)
            visible = ctx.fitting(groups.visible[part], "visible")
            total = ctx.fitting(groups.total[part], "total") if exact_ties else None
            s = ctx.workspace.get("scores", (last - first, columns), np.uint16)
            common = (ctx.fitting(q[part], "some q"), ctx.fitting(w[part], "some w"), ctx.caches.keys(key_layer), table,
                      ctx.fitting(step.plan.sequence[part], "some sequence"), visible)  # fmt: skip
            place, chosen = self._target(rows.selection[part], "chosen")
            blocks = None
            if allowed is None:
                ctx.of(Program.scores, False)(*common, s)
                self._topk(c.index_topk, s, total, visible, chosen)
            else:
                some = allowed[part] if used == allowed.shape[1] else np.ascontiguousarray(allowed[part, :used])
                blocks = ctx.fitting(some, "some blocks")
                ctx.of(Program.scores, True)(*common, blocks, s)
                if exact_ties:
                    self._topk(c.index_topk, s, total, visible, chosen)
                else:
                    limit = ctx.workspace.get("limit", (last - first,), np.int32)
                    ctx.of(Program.candidate_limit)(blocks, visible, limit)
                    ctx.of(Program.topk, c.index_topk, True)(s, limit, blocks, chosen)
            if place is not chosen:
                ctx.device.copy(place, chosen)
            if rows.candidates is not None:
                self._candidates(s, groups, visible, part, rows.candidates[part])
            if scores is not None:
                of_blocks = None if blocks is None or exact_ties else ctx.device.download(blocks)
                _spread_scores(scores[part], ctx.device.download(s), of_blocks, size, ctx.device.download(visible))

    def _candidates(self, s: Array, groups: Groups, visible: Array, part: slice, out: Array) -> None:
        """The best candidate blocks of each query, ascending, into `out`."""
        c, ctx = self.context.program.config, self.context
        n, columns = s.shape
        best = ctx.workspace.get("block_scores", (n, -(-columns // c.candidate_block_size)), np.uint16)
        ctx.of(Program.block_scores)(s, visible, best)
        place, chosen = self._target(out, "chosen_blocks")
        assert groups.visible_blocks is not None  # planned for the ratio of the candidate source
        assert groups.total_blocks is not None
        total = ctx.fitting(groups.total_blocks[part], "total_blocks")
        self._topk(c.candidate_topk_blocks, best, total, ctx.fitting(groups.visible_blocks[part], "limit"), chosen)
        if place is not chosen:
            ctx.device.copy(place, chosen)

    def _target(self, array: Array, name: str) -> tuple[Array, Array]:
        """`array`, and where a kernel can write its values: there, or in scratch memory of that name."""
        if self.context.device.fits(array):
            return array, array
        return array, self.context.workspace.get(name, array.shape, array.dtype)

    def _topk(self, k: int, s: Array, total: Array, limit: Array, out: Array) -> None:
        function = self.context.of(Program.topk, k)
        if self.context.program.ties == "torch-cpu":
            function(s, total, limit, out)
        else:
            function(s, limit, out)

    def _table(self, step: Step, key_layer: int) -> Array:
        """Block table of `key_layer`; block 0, all zeros, where it has none."""
        return step.groups[self.context.program.config.role(key_layer).ratio].table

    # ---- attention

    def _attend(self, q: Array, step: Step, rows: LayerRows, o: Array) -> None:
        ctx, plan = self.context, step.plan
        args: tuple[Array, ...] = (
            q, rows.window, ctx.caches.rings.arrays[self.role.layer], self.weights.sink, plan.position, plan.sequence,
            plan.start, plan.base, plan.slot,
        )  # fmt: skip
        if self.role.ratio:
            assert self.role.kv_source is not None  # every compressed layer has its sources
            assert self.role.index_source is not None
            selection = step.done[self.role.index_source].selection
            assert selection is not None  # an index source leaves one
            groups: Groups = step.groups[self.role.ratio]
            args += (ctx.caches.latents(self.role.kv_source), groups.table, selection)
        # With fewer queries than the device runs at a time, the heads of a query are shared out.
        split = next(
            (s for s in sorted(self._attention) if s * step.tokens >= ctx.device.parallel), max(self._attention)
        )
        self._attention[split](*args, o)

    # ---- rows

    def _rows(self, name: str, n: int, *shape: int, dtype: Any = np.uint16) -> Array:
        return self.context.workspace.get(name, (n + PAD_ROWS, *shape), dtype)

    def _linear(self, name: str, x: Array, n: int, out: Array | None = None) -> Array:
        """The padded output rows of a linear layer for the first n rows of the padded `x`."""
        linear, ctx = self._linears[name], self.context
        if linear.weight == "fp8" and name in FP8_LINEARS:
            y = self._rows("quantised", n, linear.k)
            ctx.of(Program.quantize_activation, linear.k)(x[:n], y[:n])
            x = y
        if out is None:
            out = self._rows(name, n, linear.n)
        functions = self._linear_functions[name]
        rows = 1 if n <= linear.few else linear.rows
        tiles = -(-n // rows)
        functions[rows](
            x[: tiles * rows].reshape(tiles, rows, -1),
            *self.weights.linear[name],
            out[: tiles * rows].reshape(tiles, rows, -1),
        )
        return out

    def _norm_rope(self, linear: str, norm: str, x: Array, n: int, dim: int, rope: Array) -> Array:
        """RoPE(norm(linear x)) of one row each: bf16 bits ``[n, 1, dim]``."""
        ctx = self.context
        normed = self._rows(f"{linear} norm", n, 1, dim)[:n]
        ctx.of(Program.norm, dim)(self._linear(linear, x, n)[:n], self.weights.norm[norm], normed.reshape(n, dim))
        turned = self._rows(f"{linear} rope", n, 1, dim)[:n]
        ctx.of(Program.rope, 1, dim)(normed, rope, turned)
        return turned


def _spread_scores(
    out: NDArray[np.uint16],
    s: NDArray[np.uint16],
    blocks: NDArray[np.int32] | None,
    size: int,
    visible: NDArray[np.int32],
) -> None:
    """Put the scores of a run into columns that are positions."""
    if blocks is None:
        columns = min(s.shape[1], out.shape[1])
        out[:, :columns] = s[:, :columns]
        return
    position = np.where(blocks[..., None] >= 0, blocks[..., None] * size + np.arange(size), -1).reshape(len(s), -1)
    token, column = np.nonzero((position >= 0) & (position < visible[:, None]))
    out[token, position[token, column]] = s[token, column]
