"""Which kernels a set of layers needs, as data: shared by the compiler, which makes them, and the runtime, which
calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from ds41_tvm.config import FP8_LINEARS, AttentionConfig, LayerRole
from ds41_tvm.errors import ConfigError
from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.target import SMALL_SHARED, Target

Ties = Literal["lowest-index", "torch-cpu"]
Value = int | float | str
# Linear layers that selections depend on. One bf16 step in their results can tip a quantiser, that a score, and that a
# selection; they are summed with more care, and are an eighth of a layer's products.
SELECTING = frozenset(
    {"wq_a", "compressor.wkv", "compressor.wgate", "indexer.wk", "indexer.wq_b", "indexer.weights_proj"}
)
SHORT = 1024  # inner sizes up to which every linear layer is summed so: they cost little
# Row tile of the linear kernels for many rows by form, if tuning has not chosen another.
ROW_TILES = {"fma": 6, "vbmi": 6, "dot": 8, "amx": 16, "cuda": 16}
FREE_ROWS = frozenset({"fma", "vbmi", "dot"})  # forms whose row tile can be chosen, from 2 to `PAD_ROWS`
PAD_ROWS = 16  # buffers of per-token rows are this much longer than the tokens, so that any row tile fits


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """One compiled function: an operator of `ds41_tvm.kernels` and its static sizes.

    `knobs`: values that tuning chose for the making of its program, see `schedule.space`; they change its speed only,
    and are no part of its name.
    """

    op: str
    params: tuple[tuple[str, Value], ...]
    knobs: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """Symbol in the compiled module."""
        return (
            "__".join([self.op, *(f"{k}_{v}" for k, v in self.params)])
            .replace("-", "m")
            .replace(".", "p")
            .replace("+", "")
        )


def kernel(op: str, **params: Value) -> Kernel:
    """A `Kernel` from keyword arguments, in the order given."""
    return Kernel(op, tuple(params.items()))


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear layer: y of `n` columns from `groups` slices of `k` inputs; `tile` columns packed side by side.

    `weight`: bf16, fp8 or f32; `out`: bf16 or f32; `total`: f32 or f64, see `kernels.linear`; `form`: fma, vbmi (fma
    with fp8 decoded by byte permutes), dot or amx, see `schedule.cpu`, or cuda, see `schedule.cuda`. Up to `few` tokens
    go through the kernel for one row, others through the one for `rows`. `tile`, `rows` and `few` do not change
    results.
    """

    n: int
    k: int
    groups: int
    weight: str
    out: str
    total: str
    tile: int
    form: str
    rows: int
    few: int

    @property
    def sizes(self) -> tuple[Value, ...]:
        """What the layer computes and in which form, without what may be chosen freely."""
        return self.n, self.k, self.groups, self.weight, self.out, self.total, self.form

    def kernels(self) -> dict[int, Kernel]:
        """The kernel for each row tile."""
        names = ("n", "k", "groups", "weight", "out", "total", "tile", "form")
        params = {name: getattr(self, name) for name in names}
        return {rows: kernel("linear", **params, rows=rows) for rows in (1, self.rows)}


def packing_widths(linear: Linear) -> tuple[int, ...]:
    """Packing widths that the kernels of a linear layer can have."""
    # 32 columns of fp8 weights share their scales.
    widest = 64 if linear.form in ("fma", "vbmi") and linear.weight != "fp8" else 32
    least = 16 if linear.form in ("dot", "amx") else 1
    return tuple(t for t in (64, 32, 16, 8, 4, 2, 1) if least <= t <= widest and (linear.n // linear.groups) % t == 0)


def scores_form(target: Target, dim: int) -> dict[str, str]:
    """The parameter `form` of index scores, where a target has integer dot products for this size."""
    return {"form": "vnni"} if target.has("avx512vnni") and dim % 128 == 0 else {}


def _check_choice(linear: Linear) -> None:
    """Raises ConfigError unless the kernels of `linear` exist."""
    known = linear.form in ROW_TILES and min(linear.n, linear.k, linear.groups) >= 1
    if not known or linear.tile not in packing_widths(linear):
        raise ConfigError(f"a linear layer of sizes {linear.sizes} cannot have tiles of {linear.tile} columns")
    most = PAD_ROWS if linear.form in FREE_ROWS else ROW_TILES[linear.form]
    least = 2 if linear.form in FREE_ROWS else most
    if not least <= linear.rows <= most or linear.few < 1:
        raise ConfigError(
            f"a linear layer of sizes {linear.sizes} has tiles of {linear.rows} rows from {linear.few + 1} tokens on; "
            f"expected {least} to {most} rows, from 2 tokens or more on"
        )


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All static choices of a runner. `pooling` is the weight format of compressors of ratio above 1: bf16 or f32;
    `grouped` that of ``wo_a`` in linear mode fp8: its input is bf16 in both.

    `block_rows`: rows of a cache block; `draft`: tokens that a sequence can take back at any time; `choices`: linear
    layers whose tiles tuning chose, used for every layer of these sizes.
    """

    config: AttentionConfig
    layers: tuple[int, ...]
    target: Target
    linear: Literal["bf16", "fp8"] = "bf16"
    ties: Ties = "lowest-index"
    pooling: Literal["bf16", "f32"] = "bf16"
    grouped: Literal["bf16", "fp8"] = "bf16"
    block_rows: int = 128
    draft: int = 64
    choices: tuple[Linear, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("block_rows", 1), ("draft", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected an integer of at least {least}")
        if self.ties not in ("lowest-index", "torch-cpu"):
            raise ConfigError(f"ties is {self.ties!r}; expected 'lowest-index' or 'torch-cpu'")
        if self.grouped == "fp8" and self.linear != "fp8":
            raise ConfigError("grouped is 'fp8' in linear mode 'bf16'; expected 'bf16', or linear mode 'fp8'")
        for choice in self.choices:
            _check_choice(choice)

    def linears(self, role: LayerRole) -> dict[str, Linear]:
        """Linear layers of one layer by official name."""
        c = self.config
        out = {
            "wq_a": self._linear("wq_a", c.q_lora_rank, c.dim),
            "wq_b": self._linear("wq_b", c.n_heads * c.head_dim, c.q_lora_rank),
            "wkv": self._linear("wkv", c.head_dim, c.dim),
            "wo_a": self._linear(
                "wo_a", c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups, c.o_groups, self.grouped
            ),
            "wo_b": self._linear("wo_b", c.dim, c.o_groups * c.o_lora_rank),
        }
        if role.kind == "full":
            if role.ratio > 1:
                for name in ("compressor.wkv", "compressor.wgate"):
                    out[name] = self._linear(name, c.head_dim, c.dim, weight=self.pooling, result="f32")
            else:
                out["compressor.wkv"] = self._linear("compressor.wkv", c.head_dim, c.dim)
            out["indexer.wk"] = self._linear("indexer.wk", c.index_head_dim, c.head_dim)
        if role.kind in ("full", "reindex"):
            out["indexer.wq_b"] = self._linear("indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            out["indexer.weights_proj"] = self._linear("indexer.weights_proj", c.index_n_heads, c.dim)
        return out

    def _linear(
        self, name: str, n: int, k: int, groups: int = 1, weight: str | None = None, result: str = "bf16"
    ) -> Linear:
        if weight is None:
            weight = "fp8" if self.linear == "fp8" and name in FP8_LINEARS else "bf16"
        pairs = self._pairs_form()
        narrow = weight == "fp8" or pairs != "fma" or self.target.is_gpu
        tile = next(t for t in ((32, 16, 8, 4, 2, 1) if narrow else (64, 32, 16, 8, 4, 2, 1)) if (n // groups) % t == 0)
        tables = self.target.has("avx512vbmi")
        takes_pairs = weight != "f32" and k % 32 == 0 and tile >= 16 and (weight != "fp8" or tables)
        form = "cuda" if self.target.is_gpu else pairs if takes_pairs else "fma"
        if form == "fma" and weight == "fp8" and tables:
            form = "vbmi"
        plain = Linear(
            n=n,
            k=k,
            groups=groups,
            weight=weight,
            out=result,
            total="f64" if name in SELECTING or weight == "f32" or k <= SHORT else "f32",
            tile=tile,
            form=form,
            rows=ROW_TILES[form],
            few=1,
        )
        return next((choice for choice in self.choices if choice.sizes == plain.sizes), plain)

    def _pairs_form(self) -> str:
        """How this processor multiplies pairs of bf16 values."""
        return "amx" if self.target.has("amx-bf16") else "dot" if self.target.has("avx512bf16") else "fma"

    def _attention_form(self) -> str:
        if self.target.is_gpu:
            return "cuda"
        pairs = self._pairs_form()
        return "avx512" if pairs == "fma" and self.target.has("avx512bw") else pairs

    # ---- the other kernels, by what they do in a layer

    def norm(self, dim: int) -> Kernel:
        return kernel("rms_norm", dim=dim, eps=self.config.norm_eps)

    def rope(self, heads: int, dim: int, inverse: bool = False) -> Kernel:
        return kernel("rope", heads=heads, dim=dim, rope_dim=self.config.rope_head_dim, inverse=int(inverse))

    def pack(self, kind: str, heads: int, dim: int) -> Kernel:
        return kernel("pack_rows", kind=kind, heads=heads, dim=dim)

    def quantize_activation(self, dim: int) -> Kernel:
        return kernel("quantize_activation", dim=dim)

    def pool(self, ratio: int) -> Kernel:
        return kernel("pool_groups", dim=self.config.head_dim, ratio=ratio)

    def scale_weights(self) -> Kernel:
        c = self.config
        return kernel("scale_weights", heads=c.index_n_heads, factor=c.index_head_dim**-0.5 * c.index_n_heads**-0.5)

    def scores(self, candidates: bool) -> Kernel:
        c = self.config
        params: dict[str, Value] = {
            "heads": c.index_n_heads,
            "dim": c.index_head_dim,
            "block_rows": self.block_rows,
            "candidate_block": c.candidate_block_size if candidates else 0,
            "spread": int(candidates and self.ties == "torch-cpu"),
        }
        return kernel("index_scores", **params, **scores_form(self.target, c.index_head_dim))

    def block_scores(self) -> Kernel:
        return kernel("block_scores", size=self.config.candidate_block_size)

    def candidate_limit(self) -> Kernel:
        return kernel("candidate_limit", size=self.config.candidate_block_size)

    def copy_rows(self, size: int) -> Kernel:
        return kernel("copy_rows", size=size)

    def topk(self, k: int, candidates: bool = False) -> Kernel:
        if self.ties == "torch-cpu":
            return kernel("topk_torch_cpu", k=k)
        return kernel("topk_lowest_index", k=k, size=self.config.candidate_block_size if candidates else 0)

    def attention(self, role: LayerRole, split: int) -> Kernel:
        c = self.config
        return kernel(
            "sparse_attention",
            heads=c.n_heads,
            dim=c.head_dim,
            window=c.window_size,
            ring_rows=c.window_size + self.draft,
            block_rows=self.block_rows,
            k=c.index_topk if role.ratio else 0,
            form=self._attention_form(),
            split=split,
        )

    def splits(self) -> tuple[int, ...]:
        """How many tasks the heads of one query may be cut into: 1, and a few where there are fewer queries than
        threads. All of them at once take more shared memory than a block of some GPUs can have.
        """
        several = tuple(s for s in (2, 8) if self.config.n_heads % s == 0)
        return several if several and self.target.level in SMALL_SHARED else (1, *several)

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that the layers need, each once, sorted."""
        return tuple(sorted(set(self._all()), key=lambda k: k.name))

    def _all(self) -> Iterable[Kernel]:
        c = self.config
        for layer in self.layers:
            role = c.role(layer)
            for linear in self.linears(role).values():
                yield from linear.kernels().values()
            yield from (self.norm(c.q_lora_rank), self.norm(c.head_dim))
            yield from (
                self.rope(c.n_heads, c.head_dim),
                self.rope(c.n_heads, c.head_dim, True),
                self.rope(1, c.head_dim),
            )
            yield from (self.pack("window", 1, c.head_dim), self.copy_rows(row_bytes("window", c.head_dim)))
            yield from (self.attention(role, split) for split in self.splits())
            if self.linear == "fp8":
                yield from (self.quantize_activation(d) for d in (c.dim, c.q_lora_rank, c.o_groups * c.o_lora_rank))
            if role.kind == "full":
                yield from (self.norm(c.index_head_dim), self.rope(1, c.index_head_dim))
                yield from (self.pack("latent", 1, c.head_dim), self.pack("index", 1, c.index_head_dim))
                if role.ratio > 1:
                    yield from (self.pool(role.ratio), self.copy_rows(c.head_dim * 4))
            if role.kind in ("full", "reindex"):
                restricted = role.candidate_source is not None
                yield self.rope(c.index_n_heads, c.index_head_dim)
                yield self.pack("index", c.index_n_heads, c.index_head_dim)
                yield from (self.scale_weights(), self.scores(restricted), self.topk(c.index_topk, restricted))
                if restricted and self.ties == "lowest-index":
                    yield self.candidate_limit()
                if role.is_candidate_source:
                    yield from (self.block_scores(), self.topk(c.candidate_topk_blocks))
