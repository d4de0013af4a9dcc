"""`build`: from a configuration and weights to a runner, compiled in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.program import Program, Ties
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.target import Target, parse_target


def build(
    config: AttentionConfig,
    weights: Mapping[str, Any],
    layers: Iterable[int] | None = None,
    target: str | Target = "cpu",
    linear: Literal["bf16", "fp8"] = "bf16",
    ties: Ties = "lowest-index",
    threads: int | None = None,
    keys: Literal["own", "published"] = "own",
    block_rows: int = 128,
    draft: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Runner:
    """Compile the kernels of `layers` (None: all) for `target` and bind them to `weights`.

    `weights`: tensors by official name, ``layers.{l}.attn.wq_a.weight`` and so on; bf16 as uint16 bits or
    ml_dtypes.bfloat16, in linear mode ``fp8`` e4m3 codes (uint8) with e8m0 ``.scale``, as `load_checkpoint` and
    `synthetic_weights` give them. `ties`: ``lowest-index`` takes equal scores in ascending position; ``torch-cpu``
    picks what torch's CPU topk picks. `keys`: see `Runner`. `block_rows`: positions per cache block. `draft`: how
    many tokens a sequence can take back. `progress`: called with (kernels done, kernels in all).

    Raises ConfigError (a layer without its source, a size that fp8 cannot hold), TargetError, CompileError, and
    CheckpointError's classes for weights that are missing or of the wrong shape or dtype.
    """
    from ds41_tvm.compiler.build import compile_program

    program = Program(
        config=config,
        layers=closure(config, layers),
        target=target if isinstance(target, Target) else parse_target(target),
        linear=config.check_linear(linear),
        ties=ties,
        pooling=pooling_format(config, weights),
        block_rows=block_rows,
        draft=draft,
    )
    return Runner(program, compile_program(program, progress), weights, threads, keys)


def pooling_format(config: AttentionConfig, weights: Mapping[str, Any]) -> Literal["bf16", "f32"]:
    """How the weights of compressors of ratio above 1 are stored: released checkpoints hold bf16, the model f32."""
    for role in config.roles:
        name = f"layers.{role.layer}.attn.compressor.wkv.weight"
        if role.kind == "full" and role.ratio > 1 and name in weights:
            return "f32" if np.asarray(weights[name]).dtype == np.float32 else "bf16"
    return "bf16"
