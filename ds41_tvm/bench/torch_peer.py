"""The official arithmetic in torch as a contestant: prompts, decode steps over filled caches, single operators.

Importing this module needs the extra ``torch``. It runs in a process of its own, see `bench.peer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ds41_tvm.bench.cases import SPARE, Timing
from ds41_tvm.bench.torch_attention import LayerAttention, Variant, sparse_attention
from ds41_tvm.bench.torch_official import TorchOfficial
from ds41_tvm.bench.torch_ops import Tensor, torch
from ds41_tvm.config import AttentionConfig

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1
_SCALE = {"latent": 0.375, "key": 0.5}


class Torch:
    """Layers of `TorchOfficial` with caches of the size that a case needs; `longest`: the longest context of all."""

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, Any],
        layers: Iterable[int],
        variant: Variant,
        threads: int,
        longest: int,
    ) -> None:
        torch.set_num_threads(threads)
        # Rotation tables and the limit of positions; caches are allocated by `_allocate`.
        self.config = msgspec.structs.replace(config, max_seq_len=longest + SPARE)
        self._joined = variant != "torch-mv"
        self._wide = variant == "torch-f32"
        self.model = TorchOfficial(self.config, weights, layers, variant=variant, slots=0)
        self.layers = self.model.layers
        self._random = torch.Generator().manual_seed(0)
        self._position = self._context = self._batch = 0
        self._x = torch.empty(0)

    def prefill(self, tokens: int, chunk: int) -> Timing:
        """A prompt; the official form takes it in one call, whatever `chunk`."""
        del chunk
        self._allocate(tokens, 1)
        self._position = 0
        return self._run(self._input(1, tokens))

    def prepare(self, context: int, batch: int) -> int:
        """Caches as after context - 1 tokens of each of `batch` sequences, filled with plausible rows."""
        self._allocate(context + SPARE, batch)
        for attention in self.model.attentions.values():
            self._fill(attention, context)
        self._position, self._context, self._batch = context - 1, context, batch
        self._x = self._input(batch, 1)
        return context

    def decode(self) -> Timing:
        """One more token for each sequence."""
        if self._position >= self._context + SPARE:
            self._position = self._context - 1
        return self._run(self._x)

    def single(self, what: str, sizes: dict[str, int], times: int) -> list[float]:
        """Seconds of one operator, `times` times after a first one: see `_SINGLES` for names and sizes."""
        with torch.inference_mode():
            run = _SINGLES[what](self, **sizes)
            run()
            return [_seconds(run) for _ in range(times)]

    def _run(self, x: Tensor) -> Timing:
        times = {}
        for layer in self.layers:
            start = time.perf_counter()
            self.model.forward(layer, x, self._position)
            times[layer] = time.perf_counter() - start
        self._position += x.size(1)
        return Timing(times)

    def _input(self, batch: int, tokens: int) -> Tensor:
        return torch.randn(batch, tokens, self.config.dim, generator=self._random).bfloat16()

    def _allocate(self, tokens: int, batch: int) -> None:
        c = self.config
        for attention in self.model.attentions.values():
            attention.window_cache = torch.zeros(batch, c.window_size, c.head_dim, dtype=torch.bfloat16)
            if attention.role.kind == "full":
                rows = tokens // attention.role.ratio
                attention.latent_cache = torch.zeros(batch, rows, c.head_dim, dtype=torch.bfloat16)
                attention.key_cache = torch.zeros(batch, rows, c.index_head_dim, dtype=torch.bfloat16)
                attention.kv_state = torch.zeros(batch, attention.role.ratio, c.head_dim)
                attention.gate_state = torch.zeros(batch, attention.role.ratio, c.head_dim)

    def _fill(self, attention: LayerAttention, context: int) -> None:
        """The caches as the official code leaves them: dequantised bf16 rows, random values of the stored grid."""
        attention.window_cache.normal_(generator=self._random)
        if attention.role.kind == "full":
            rows = context // attention.role.ratio
            self._fill_rows(attention.latent_cache[:, :rows], "latent")
            self._fill_rows(attention.key_cache[:, :rows], "key")
            attention.kv_state.normal_(generator=self._random)
            attention.gate_state.normal_(generator=self._random)
            self.model.publish(attention)

    def _fill_rows(self, cache: Tensor, kind: str) -> None:
        grid = torch.tensor([*_GRID, *(-value for value in _GRID)]).mul_(_SCALE[kind]).bfloat16()
        for batch in cache:
            for part in batch.split(1 << 14):  # bounds the temporaries
                codes = torch.randint(16, part.shape, generator=self._random, dtype=torch.int32)
                part.copy_(grid[codes])

    # ---- single operators

    def _topk(self, n: int, width: int, k: int) -> Callable[[], Any]:
        values = torch.randn(n, width, generator=self._random)
        if not self._wide:
            values = values.bfloat16()
        return lambda: values.topk(k, dim=-1, sorted=False)

    def _scores(self, n: int, positions: int) -> Callable[[], Any]:
        """Scores of all positions of `n` queries, as ``Indexer.forward`` computes them before masking."""
        c = self.config
        q = torch.randn(1, n, c.index_n_heads, c.index_head_dim, generator=self._random).bfloat16()
        keys = torch.empty(1, positions, c.index_head_dim, dtype=torch.bfloat16)
        self._fill_rows(keys, "key")
        weights = torch.randn(1, n, c.index_n_heads, generator=self._random).bfloat16()
        if self._wide:
            q, keys, weights = q.float(), keys.float(), weights.float()

        def run() -> Tensor:
            score = torch.einsum("bshd,btd->bsht", q, keys)
            return (score.relu() * weights.unsqueeze(-1)).sum(dim=2)

        return run

    def _attention(self, n: int, rows: int, latents: int) -> Callable[[], Any]:
        """`n` queries over `rows` window rows and min(latents, index_topk) chosen of `latents` each."""
        c = self.config
        q = torch.randn(1, n, c.n_heads, c.head_dim, generator=self._random).bfloat16()
        window = torch.randn(1, n if n > 1 else rows, c.head_dim, generator=self._random).bfloat16()
        if n > 1:
            reach = torch.arange(n).unsqueeze(1) - rows + 1 + torch.arange(rows)
            sources = [(window, torch.where(reach >= 0, reach, -1).unsqueeze(0))]
        else:
            sources = [(window, torch.arange(rows).view(1, 1, -1))]
        if latents:
            cache = torch.empty(1, latents, c.head_dim, dtype=torch.bfloat16)
            self._fill_rows(cache, "latent")
            k = min(c.index_topk, latents)
            chosen = torch.rand(1, n, latents, generator=self._random).topk(k).indices.sort(-1).values
            if n > 1:  # queries of a prompt see the groups before them only
                visible = ((torch.arange(n) + 1) * latents // n).view(1, n, 1)
                first = torch.arange(k).expand(1, n, k)
                chosen = torch.where(
                    visible > k, chosen % visible.clamp_min(1), torch.where(first < visible, first, -1)
                )
            sources.append((cache, chosen))
        sink = torch.randn(c.n_heads, generator=self._random)
        return lambda: sparse_attention(q, sources, sink, c.head_dim**-0.5, self._joined)

    def _gemm(self, m: int, n: int, k: int) -> Callable[[], Any]:
        """An f32 matrix product."""
        a, b = (torch.randn(shape, generator=self._random) for shape in ((m, k), (n, k)))
        return lambda: torch.nn.functional.linear(a, b)

    def _launch(self) -> Callable[[], Any]:
        """Adding one number to another: what calling an operator costs."""
        x, y = torch.ones(1), torch.ones(1)
        return lambda: torch.add(x, y, out=x)


_SINGLES: dict[str, Callable[..., Callable[[], Any]]] = {
    "topk": Torch._topk,
    "scores": Torch._scores,
    "attention": Torch._attention,
    "gemm": Torch._gemm,
    "launch": Torch._launch,
}


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
