"""DeepSeek-V4.1 attention as the official inference code writes it, in torch on the CPU: the yardstick.

One call is either the prefill (``start_pos`` 0, any length) or one decode token, the two forms of the
official ``Attention.forward``. Caches hold fake-quantised bf16 rows, allocated once for ``max_seq_len``;
selections follow torch's CPU ``topk``. Three variants of the same arithmetic, of which the fastest differs by
machine and step:

- ``torch``: bf16 weights and ``nn.functional.linear``, all steps as the official code has them;
- ``torch-f32``: the same with weights widened once to float32, float32 products, results rounded to bf16;
- ``torch-mv``: a faster form: one row (a decode step of batch 1) goes through ``torch.mv``, and a single query takes
  its chosen latents out of the cache, where the official code joins window rows and all latents in a tensor first.

Importing this module needs the extra ``torch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.bench.torch_attention import LayerAttention, Shared, Variant
from ds41_tvm.bench.torch_ops import Tensor, rope_tables, torch
from ds41_tvm.checkpoint import dequantize_block, scale_name
from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.errors import InputError

Array = NDArray[Any]


def to_torch(array: Array) -> Tensor:
    """A tensor with a copy of ``array``: uint16 is taken as bf16 bits, float32 stays as it is.

    Raises ``InputError`` on any other dtype.
    """
    if array.dtype == np.uint16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    if array.dtype == np.float32:
        return torch.from_numpy(np.array(array))
    raise InputError(f"got an array of {array.dtype}; expected uint16 (bf16 bits) or float32")


def to_bits(tensor: Tensor) -> Array:
    """The uint16 bits of a bf16 tensor."""
    bits: Array = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


class TorchOfficial:
    """The attention of several layers sharing one set of slots, as ``Attention`` and its shared runtime do.

    ``weights`` has the names and the encoding of ``Checkpoint.weights``; ``linear`` is its linear mode
    (``fp8``: e4m3 weights are widened to bf16, exactly, and their inputs quantised). ``slots`` is the batch
    that the caches are allocated for (``max_batch_size`` by default). Raises ``ConfigError`` if a layer's
    source is not among ``layers``.
    """

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, Array],
        layers: Iterable[int] | None = None,
        *,
        linear: str = "bf16",
        variant: Variant = "torch",
        slots: int | None = None,
    ) -> None:
        self.config = config
        self.layers = closure(config, layers)
        tables = {yarn: rope_tables(config, yarn) for yarn in (False, True)}
        shared = Shared(config, config.check_linear(linear), variant, config.max_batch_size if slots is None else slots)
        self._shared = shared
        self.attentions: dict[int, LayerAttention] = {}
        for layer in self.layers:  # ascending: sources come before their consumers
            role = config.role(layer)
            sources = (role.kv_source, role.index_source, role.candidate_source)
            self.attentions[layer] = LayerAttention(
                shared,
                role,
                _layer_weights(weights, f"layers.{layer}.attn."),
                tables[role.ratio > 0],
                *(self.attentions.get(layer if source is None else source) for source in sources),
            )

    def publish(self, attention: LayerAttention) -> None:
        """Let every indexer read the keys of `attention`, as after it completed a group: for filled caches."""
        self._shared.keys = attention.key_cache

    def forward(self, layer: int, x: Tensor, start_pos: int, trace: dict[str, Tensor] | None = None) -> Tensor:
        """Output ``[b, s, dim]`` bf16 for input ``x`` ``[b, s, dim]`` bf16, the first token at ``start_pos``.

        ``trace``, where given, receives the intermediate values, most under the names of the golden files.
        At every step the layers are called in ascending order. Raises ``InputError`` on a position or length
        that the official form does not have, ``StepError`` on a layer called before its source.
        """
        if start_pos > 0 and x.size(1) != 1:
            raise InputError(
                f"the official form takes one token a call after the prefill, got {x.size(1)} at position "
                f"{start_pos}; feed them one by one"
            )
        if start_pos + x.size(1) > self.config.max_seq_len:
            raise InputError(
                f"{start_pos} + {x.size(1)} tokens exceed max_seq_len {self.config.max_seq_len}; raise it in the config"
            )
        with torch.inference_mode():
            return self.attentions[layer].forward(x, start_pos, {} if trace is None else trace)


def _layer_weights(weights: Mapping[str, Array], prefix: str) -> dict[str, Tensor]:
    """The layer's tensors by their names behind ``prefix``, e4m3 ones with their scales multiplied in."""
    names = [name for name in weights if name.startswith(prefix)]
    own = {}
    for name in names:
        if name.endswith((".scale", ".e4m3", ".e8m0")):  # scales, and what `wo_a` was stored as
            continue
        array = weights[name]
        if array.dtype == np.uint8:
            array = dequantize_block(array, weights[scale_name(name)])
        own[name.removeprefix(prefix)] = to_torch(array)
    return own
