"""Case files made with the reference, in the layout of the recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.golden import GoldenCase, play, reference_forward
from ds41_tvm.golden.case import case_from
from ds41_tvm.golden.play import reference_caches

# One configuration for most cases, so that its kernels are compiled once: window 5, ratios 3, 8, 4 and 1 with a source
# each, odd counts of heads, sizes that fill no tile, candidate blocks of three.
ODD: dict[str, Any] = {
    "dim": 50, "n_heads": 3, "head_dim": 32, "rope_head_dim": 6, "q_lora_rank": 18, "o_lora_rank": 10, "o_groups": 1,
    "window_size": 5, "compress_ratios": [3, 3, 3, 8, 0, 4, 4, 1, 1, 1], "kv_source_layers": [0, 3, 5, 7],
    "index_source_layers": [0, 1, 3, 5, 7, 8], "candidate_source_layer": 7, "candidate_topk_blocks": 3,
    "candidate_block_size": 3, "index_n_heads": 3, "index_head_dim": 32, "index_topk": 5, "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0, "rope_factor": 2.0, "original_seq_len": 32, "beta_fast": 32, "beta_slow": 1,
    "norm_eps": 1e-20, "max_batch_size": 4, "max_seq_len": 96,
}  # fmt: skip


class Recorder:
    """Writes cases: what the reference gives, laid out by ring slot where the official code does so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self,
        name: str,
        steps: list[int],
        *,
        batch: int = 1,
        ties: str = "torch-cpu",
        seed: str = "odd",
        inputs: Callable[[np.ndarray], np.ndarray] | None = None,
        **config: Any,
    ) -> Path:
        """A case of the configuration `ODD` with some fields replaced; `inputs` changes each input (bf16 bits)."""
        meta = {"config": ODD | config, "seed": seed, "batch": batch, "steps": steps, "ties": ties}
        if ties == "torch-cpu":
            del meta["ties"]  # as in the files that were recorded first
        meta |= {"spread": {}, "selection_differs": []}
        path = self.folder / f"{name}.npz"
        given: dict[str, np.ndarray] = {}
        sizes = AttentionConfig.from_dict(meta["config"])
        case = GoldenCase(path, meta, {})
        if inputs is not None:
            for layer in range(sizes.n_layers):
                for step in range(len(steps)):
                    given[f"x.{layer}.{step}"] = inputs(case.input(layer, step))
        case = case_from(path, {"meta": _text(meta), **given})
        forward, sequences = reference_forward(case)
        produced = play(case, forward) | reference_caches(case, sequences)
        files = (pair for key, value in produced.items() for pair in _official(case, key, value, produced))
        np.savez_compressed(path, meta=_text(meta), **given, **dict(files))
        return path


def _text(meta: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(json.dumps(meta).encode(), np.uint8)


def _official(
    case: GoldenCase, key: str, value: np.ndarray, produced: dict[str, np.ndarray]
) -> list[tuple[str, np.ndarray]]:
    """An array by position as the arrays of a file."""
    what, layer, *rest = key.split(".")
    config, size = case.config, case.config.window_size
    if not rest:
        total = case.start(len(case.steps))
        rows = size if what == "window_cache" else config.max_seq_len // config.compress_ratios[int(layer)]
        cache = np.zeros((config.max_batch_size, rows, value.shape[-1]), np.uint16)
        places = np.arange(max(0, total - size), total) % size if what == "window_cache" else np.arange(value.shape[1])
        cache[: case.batch, places] = value
        return [(key, cache)]
    step = int(rest[0])
    start, end = case.start(step), case.start(step + 1)
    if what in ("idx", "selection"):
        return []
    if what == "window":
        order = np.argsort(value < 0, axis=-1, kind="stable")  # positions first, then -1
        window = np.take_along_axis(value, order, -1)[..., : min(end, size)]
        if step > 0:
            window = np.where(value >= 0, value % size, -1)
        rows = end if step == 0 else size
        picks = produced.get(f"selection.{layer}.{step}")
        if picks is None:
            return [(f"idx.{layer}.{step}", window.astype(np.int32))]
        # As many columns as torch's topk gives.
        count = min(config.index_topk, end // config.compress_ratios[int(layer)])
        shifted = np.where(picks >= 0, picks + rows, -1)[..., :count]
        return [(f"idx.{layer}.{step}", np.concatenate([window, shifted], axis=-1).astype(np.int32))]
    if what == "candidates":
        return [(key, np.packbits(value, axis=-1))]
    if what == "kv_rows" and step > 0:
        first = max(0, start - size + 1)
        ring = np.zeros((case.batch, size, value.shape[-1]), np.uint16)
        ring[:, np.arange(first, end) % size] = value[:, : end - first]
        value = np.concatenate([ring, value[:, end - first :]], axis=1)
    return [(key, value)]


@pytest.fixture
def record(tmp_path: Path) -> Recorder:
    """`record(name, steps, ...)` writes a case file below `tmp_path`."""
    return Recorder(tmp_path)
