"""torch on the same GPU, if it is installed: its matrix rate, and one layer's linear layers and attention in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds41_tvm.config import AttentionConfig

SIZE = 8192  # of the square product that gives the matrix rate


def rates(device: str) -> dict[str, float]:
    """``matrix``: FLOP a second of a bf16 product; ``copy``: bytes a second, read and written."""
    import torch

    size = SIZE if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    block = torch.zeros((1 << 30) if device == "cuda" else 1 << 26, dtype=torch.uint8, device=device)
    return {
        "matrix": 2 * size**3 / _seconds(lambda: a @ b, device),
        "copy": 2 * block.nbytes / _seconds(block.clone, device),
    }


def layer(config: AttentionConfig, tokens: int, rows: int, device: str) -> dict[str, float]:
    """Seconds of a layer that reuses a selection: its linear layers, and attention over `rows` gathered rows a token.

    The same products as ours on dequantised bf16 rows; norms and RoPE are left out, so that torch is given less to do.
    """
    import torch

    def new(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

    c = config
    x, rank, width = new(tokens, c.dim), c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim
    wq_a, wq_b, wkv = new(c.q_lora_rank, c.dim), new(width, c.q_lora_rank), new(c.head_dim, c.dim)
    wo_a, wo_b = new(c.o_groups, width // c.o_groups, c.o_lora_rank), new(c.dim, rank)
    cache = new(max(rows, tokens), c.head_dim)
    index = torch.randint(0, len(cache), (tokens, rows), device=device)
    sink = torch.zeros(c.n_heads, 1, device=device)
    q = new(tokens, c.n_heads, c.head_dim)

    def attention() -> Any:
        kv = cache[index]
        scores = torch.einsum("thd,trd->thr", q, kv).float() * c.head_dim**-0.5
        weights = torch.cat([scores, sink.expand(tokens, -1, -1)], -1).softmax(-1)[..., :-1]
        return torch.einsum("thr,trd->thd", weights.to(torch.bfloat16), kv)

    def linears() -> Any:
        heads = (x @ wq_a.T) @ wq_b.T
        _ = x @ wkv.T
        grouped = torch.einsum("tgi,gio->tgo", heads.view(tokens, c.o_groups, -1), wo_a)
        return grouped.reshape(tokens, rank) @ wo_b.T

    return {"linears": _seconds(linears, device), "attention": _seconds(attention, device)}


def _seconds(work: Callable[[], Any], device: str) -> float:
    import time

    import torch

    for _ in range(3):
        work()
    if device != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    for _ in range(20):
        work()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) / 20e3
