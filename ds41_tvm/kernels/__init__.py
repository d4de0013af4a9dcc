"""One TensorIR factory per operator: static sizes in, unscheduled PrimFunc out. See `reference` for what each
computes.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx import PrimFunc

from ds41_tvm.kernels import (
    attention,
    candidates,
    compressor,
    indexer,
    linear,
    norm,
    quantize,
    rope,
    rows,
    topk,
    topk_torch,
)

# By operator name, as in `program.Kernel.op`.
FACTORIES: dict[str, Callable[..., PrimFunc]] = {
    "linear": linear.linear,
    "rms_norm": norm.rms_norm,
    "rope": rope.rope,
    "pack_rows": quantize.pack_rows,
    "quantize_activation": quantize.quantize_activation,
    "pool_groups": compressor.pool_groups,
    "scale_weights": indexer.scale_weights,
    "index_scores": indexer.index_scores,
    "block_scores": candidates.block_scores,
    "candidate_limit": candidates.candidate_limit,
    "copy_rows": rows.copy_rows,
    "topk_lowest_index": topk.topk_lowest_index,
    "topk_torch_cpu": topk_torch.topk_torch_cpu,
    "sparse_attention": attention.sparse_attention,
}
