"""The table of what each layer's role needs from a checkpoint: names, shapes, storage types.

Names are the released ones (``model.safetensors.index.json`` of DeepSeek-V4.1-Flash): no ``model.`` prefix,
and the scale of ``...wq_a.weight`` is ``...wq_a.scale``. Types are those of safetensors headers.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config import AttentionConfig, LayerRole

BF16, F32, E4M3, E8M0 = "BF16", "F32", "F8_E4M3", "F8_E8M0"
SCALE_BLOCK = 32  # quantization_config.weight_block_size: one scale per 32x32 block of a weight

LINEAR = (E4M3, BF16)  # released e4m3 with a scale; bf16 in a dequantised checkpoint
PLAIN = (BF16,)
PROMOTED = (BF16, F32)  # the compressor at ratio > 1 computes in f32: bf16 as released, or already promoted
SINK = (F32,)


class TensorSpec(NamedTuple):
    """One tensor that a layer needs. A weight stored as ``F8_E4M3`` needs its ``scale_name`` too."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def is_linear(self) -> bool:
        """Whether the weight is one that the release quantises."""
        return E4M3 in self.dtypes


def expected_tensors(config: AttentionConfig, layer: int) -> list[TensorSpec]:
    """What ``layer`` needs; weights are ``[out, in]``. Names after ``layers.{layer}.attn.``::

    wq_a.weight                  [q_lora_rank, dim]                                   every layer
    q_norm.weight                [q_lora_rank]                                        every layer
    wq_b.weight                  [n_heads*head_dim, q_lora_rank]                      every layer
    wkv.weight                   [head_dim, dim]                                      every layer
    kv_norm.weight               [head_dim]                                           every layer
    wo_a.weight                  [o_groups*o_lora_rank, n_heads*head_dim/o_groups]    every layer
    wo_b.weight                  [dim, o_groups*o_lora_rank]                          every layer
    attn_sink                    [n_heads]                                            every layer
    compressor.wkv.weight        [head_dim, dim]                                      full
    compressor.wgate.weight      [head_dim, dim]                                      full, ratio > 1
    compressor.norm.weight       [head_dim]                                           full
    indexer.wk.weight            [index_head_dim, head_dim]                           full
    indexer.k_norm.weight        [index_head_dim]                                     full
    indexer.wq_b.weight          [index_n_heads*index_head_dim, q_lora_rank]          full, reindex
    indexer.weights_proj.weight  [index_n_heads, dim]                                 full, reindex
    """
    c, role = config, config.role(layer)
    heads, groups = c.n_heads * c.head_dim, c.o_groups * c.o_lora_rank
    rows: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [
        ("wq_a.weight", (c.q_lora_rank, c.dim), LINEAR),
        ("q_norm.weight", (c.q_lora_rank,), PLAIN),
        ("wq_b.weight", (heads, c.q_lora_rank), LINEAR),
        ("wkv.weight", (c.head_dim, c.dim), LINEAR),
        ("kv_norm.weight", (c.head_dim,), PLAIN),
        ("wo_a.weight", (groups, heads // c.o_groups), LINEAR),
        ("wo_b.weight", (c.dim, groups), LINEAR),
        ("attn_sink", (c.n_heads,), SINK),
    ]
    if role.kind == "full":
        rows.append(("compressor.wkv.weight", (c.head_dim, c.dim), PROMOTED if role.ratio > 1 else PLAIN))
        if role.ratio > 1:
            rows.append(("compressor.wgate.weight", (c.head_dim, c.dim), PROMOTED))
        rows += [
            ("compressor.norm.weight", (c.head_dim,), PLAIN),
            ("indexer.wk.weight", (c.index_head_dim, c.head_dim), PLAIN),
            ("indexer.k_norm.weight", (c.index_head_dim,), PLAIN),
        ]
    if role.kind in ("full", "reindex"):
        rows += [
            ("indexer.wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), LINEAR),
            ("indexer.weights_proj.weight", (c.index_n_heads, c.dim), PLAIN),
        ]
    return [TensorSpec(prefix(layer) + name, shape, dtypes) for name, shape, dtypes in rows]


SOURCE_ONLY = (
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "compressor.norm.weight",
    "indexer.wk.weight",
    "indexer.k_norm.weight",
    "indexer.wq_b.weight",
    "indexer.weights_proj.weight",
)


def unexpected_names(config: AttentionConfig, layer: int) -> list[str]:
    """Names whose presence says that the checkpoint gives ``layer`` another role than ``config`` does."""
    expected = {spec.name for spec in expected_tensors(config, layer)}
    return [name for name in (prefix(layer) + suffix for suffix in SOURCE_ONLY) if name not in expected]


def prefix(layer: int) -> str:
    """What the names of a layer's attention tensors begin with."""
    return f"layers.{layer}.attn."


def code_names(weight: str) -> tuple[str, str]:
    """Names under which codes and scales of ``wo_a`` are handed on beside its bf16 values, where it is stored so."""
    stem = weight.removesuffix(".weight")
    return f"{stem}.e4m3", f"{stem}.e8m0"


def scale_name(weight: str) -> str:
    """Name of the scale beside the weight ``...weight``."""
    return weight.removesuffix("weight") + "scale"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale of a weight of ``shape``: one per 32x32 block, incomplete blocks included."""
    return tuple(-(-size // SCALE_BLOCK) for size in shape)


def describe(role: LayerRole) -> str:
    """A layer and its role, for messages."""
    return f"layer {role.layer} ({role.kind}, ratio {role.ratio})"
