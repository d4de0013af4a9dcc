"""What each kernel of a step has to do, by the counts of `work`, with the rows that it takes and leaves in memory.

`work.layer` counts what a layer cannot do without: weights and caches. A kernel also reads and writes the rows between
kernels; products are counted in either the same. Of kernels that work row by row only bytes are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ds41_tvm.bench import work
from ds41_tvm.bench.work import Work
from ds41_tvm.config import FP8_LINEARS
from ds41_tvm.numerics.formats import RowKind, row_bytes
from ds41_tvm.program import Kernel, Program


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a kernel in a step."""

    kernel: str
    work: Work


def calls(program: Program, layer: int, start: int, count: int, parallel: int) -> Iterator[Call]:
    """The kernels of one layer in a step of `count` tokens after `start` of one sequence, in the order of
    `runtime.layer.Layer`, and those that commit its rows. `parallel`: tasks that fill the device.

    Scores are taken to be held at once (for long prompts they are not: then keys are read several times).
    """
    return _Layer(program, layer, start, count, parallel).calls()


class _Layer:
    def __init__(self, program: Program, layer: int, start: int, count: int, parallel: int) -> None:
        self.program, self.config, self.role = program, program.config, program.config.role(layer)
        self.linears = program.linears(self.role)
        self.start, self.n, self.parallel = start, count, parallel

    @property
    def groups(self) -> int:
        """Groups of tokens that the step completes."""
        return (self.start + self.n) // self.role.ratio - self.start // self.role.ratio

    def calls(self) -> Iterator[Call]:
        c, p, n = self.config, self.program, self.n
        yield from self._linear("wq_a", n)
        yield self._norm(c.q_lora_rank, n)
        yield from self._linear("wq_b", n)
        yield self._rope(c.n_heads, c.head_dim, n)
        yield from self._norm_rope("wkv", c.head_dim, n)
        yield self._pack("window", 1, c.head_dim, n)
        if self.role.kind == "full":
            yield from self._compress()
        if self.role.kind in ("full", "reindex"):
            yield from self._select()
        yield self._attention()
        yield self._rope(c.n_heads, c.head_dim, n, inverse=True)
        yield from self._linear("wo_a", n)
        yield from self._linear("wo_b", n)
        yield self._copy(row_bytes("window", c.head_dim), min(n, c.window_size + p.draft))
        if self.role.kind == "full" and self.role.ratio > 1:
            for _ in range(2):
                yield self._copy(4 * c.head_dim, min(n, self.role.ratio + p.draft))

    def _compress(self) -> Iterator[Call]:
        c, ratio, groups = self.config, self.role.ratio, self.groups
        yield from self._linear("compressor.wkv", self.n)
        if ratio > 1:
            yield from self._linear("compressor.wgate", self.n)
            if not groups:
                return
            moved = groups * (ratio * (8 * c.head_dim + 8) + 2 * c.head_dim)
            yield Call(self.program.pool(ratio).name, Work(bytes=moved))
        yield self._norm(c.head_dim, groups)
        yield from self._norm_rope("indexer.wk", c.index_head_dim, groups)
        yield self._pack("index", 1, c.index_head_dim, groups)
        yield self._rope(1, c.head_dim, groups)
        yield self._pack("latent", 1, c.head_dim, groups)

    def _select(self) -> Iterator[Call]:
        c, p, n = self.config, self.program, self.n
        heads, dim, restricted = c.index_n_heads, c.index_head_dim, self.role.candidate_source is not None
        yield from self._linear("indexer.wq_b", n)
        yield self._rope(heads, dim, n)
        yield self._pack("index", heads, dim, n)
        yield from self._linear("indexer.weights_proj", n)
        yield Call(p.scale_weights().name, Work(bytes=4 * n * heads))
        scored = work.scored(c, self.role, self.start, n)
        pairs = round(scored.dots / (2 * heads * dim))
        blocks = 4 * n * c.candidate_topk_blocks if restricted else 0
        rows = n * heads * (row_bytes("index", dim) + 2) + blocks + 2 * pairs
        yield Call(p.scores(restricted).name, scored + Work(bytes=rows))
        if restricted and p.ties == "lowest-index":
            yield Call(p.candidate_limit().name, Work(bytes=blocks + 8 * n))
        yield self._topk(p.topk(c.index_topk, restricted), c.index_topk, pairs, blocks)
        if self.role.is_candidate_source:
            seen = [-(-(end // self.role.ratio) // c.candidate_block_size) for end in self._ends()]
            yield Call(p.block_scores().name, Work(bytes=2 * pairs + 2 * sum(seen) + 4 * n))
            yield self._topk(p.topk(c.candidate_topk_blocks), c.candidate_topk_blocks, sum(seen), 0)

    def _ends(self) -> range:
        return range(self.start + 1, self.start + self.n + 1)

    def _attention(self) -> Call:
        c, n = self.config, self.n
        rows = n * (4 * c.n_heads * c.head_dim + row_bytes("window", c.head_dim) + 8) + 4 * c.n_heads
        rows += 4 * n * c.index_topk if self.role.ratio else 0
        splits = self.program.splits()
        split = next((s for s in splits if s * n >= self.parallel), max(splits))
        attended = work.attended(c, self.role, self.start, n)
        return Call(self.program.attention(self.role, split).name, attended + Work(bytes=rows))

    # ---- kernels that work row by row, and linear layers

    def _linear(self, name: str, rows: int) -> Iterator[Call]:
        linear = self.linears[name]
        if linear.weight == "fp8" and name in FP8_LINEARS:
            yield Call(self.program.quantize_activation(linear.k).name, Work(bytes=4 * rows * linear.k))
        moved = rows * (2 * linear.groups * linear.k + (4 if linear.out == "f32" else 2) * linear.n)
        kernel = linear.kernels()[1 if rows <= linear.few else linear.rows]
        yield Call(kernel.name, work.linear_layer(linear.n, linear.k, linear.weight, rows) + Work(bytes=moved))

    def _norm(self, dim: int, rows: int) -> Call:
        return Call(self.program.norm(dim).name, Work(bytes=4 * rows * dim + 2 * dim))

    def _rope(self, heads: int, dim: int, rows: int, inverse: bool = False) -> Call:
        moved = rows * (4 * heads * dim + 4 * self.config.rope_head_dim)
        return Call(self.program.rope(heads, dim, inverse).name, Work(bytes=moved))

    def _norm_rope(self, linear: str, dim: int, rows: int) -> Iterator[Call]:
        yield from self._linear(linear, rows)
        yield self._norm(dim, rows)
        yield self._rope(1, dim, rows)

    def _pack(self, kind: RowKind, heads: int, dim: int, rows: int) -> Call:
        moved = rows * (heads * (2 * dim + row_bytes(kind, dim)) + 8)
        return Call(self.program.pack(kind, heads, dim).name, Work(bytes=moved))

    def _topk(self, kernel: Kernel, k: int, pairs: int, more: int) -> Call:
        return Call(kernel.name, Work(bytes=2 * pairs + 4 * self.n * (k + 1) + more))

    def _copy(self, size: int, rows: int) -> Call:
        return Call(self.program.copy_rows(size).name, Work(bytes=rows * (2 * size + 16)))
