"""`build`: from a configuration and weights to a runner, compiled in this process."""

from __future__ import annotations

import os
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
    records: bool | str | os.PathLike[str] = True,
) -> Runner:
    """Compile the kernels of `layers` (None: all) for `target` and bind them to `weights`.

    `weights`: tensors by official name, ``layers.{l}.attn.wq_a.weight`` and so on; bf16 as uint16 bits or
    ml_dtypes.bfloat16, in linear mode ``fp8`` e4m3 codes (uint8) with e8m0 ``.scale``, as `load_checkpoint` and
    `synthetic_weights` give them. `ties`: ``lowest-index`` takes equal scores in ascending position; ``torch-cpu``
    picks what torch's CPU topk picks. `keys`: see `Runner`. `block_rows`: positions per cache block. `draft`: how
    many tokens a sequence can take back. `progress`: called with (kernels done, kernels in all).
    `records`: whether to make kernels as tuning records for this target say: True for those that come with the package,
    False for none, or a folder of such folders. They change no result.

    Raises ConfigError (a layer without its source, a size that fp8 cannot hold), TargetError, CompileError, and
    CheckpointError's classes for weights that are missing or of the wrong shape or dtype.
    """
    from ds41_tvm.compiler.build import compile_kernels
    from ds41_tvm.tune.apply import selection

    program = Program(
        config=config,
        layers=closure(config, layers),
        target=target if isinstance(target, Target) else parse_target(target),
        linear=config.check_linear(linear),
        ties=ties,
        pooling=pooling_format(config, weights),
        grouped=grouped_format(config, linear, weights),
        block_rows=block_rows,
        draft=draft,
    )
    tuned = selection(records)(program)
    functions = compile_kernels(tuned.kernels, program.target, progress)
    return Runner(tuned.program, functions, weights, threads, keys)


def pooling_format(config: AttentionConfig, weights: Mapping[str, Any]) -> Literal["bf16", "f32"]:
    """How the weights of compressors of ratio above 1 are stored: released checkpoints hold bf16, the model f32."""
    for role in config.roles:
        name = f"layers.{role.layer}.attn.compressor.wkv.weight"
        if role.kind == "full" and role.ratio > 1 and name in weights:
            return "f32" if np.asarray(weights[name]).dtype == np.float32 else "bf16"
    return "bf16"


def grouped_format(config: AttentionConfig, linear: str, weights: Mapping[str, Any] | None) -> Literal["bf16", "fp8"]:
    """How ``wo_a`` is stored: as e4m3 codes in linear mode fp8, if `weights` have them for all their layers.

    None for weights that are not known yet: those of a released checkpoint will have them.
    """
    if linear != "fp8":
        return "bf16"
    stems = [f"layers.{layer}.attn.wo_a" for layer in range(config.n_layers)]
    given = [stem for stem in stems if weights is None or f"{stem}.weight" in weights]
    return "fp8" if all(weights is None or f"{stem}.e4m3" in weights for stem in given) else "bf16"
