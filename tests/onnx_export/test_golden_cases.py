"""Recorded cases through ONNX Runtime: selections, outputs and caches by the rule for every implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41_tvm.golden import judge, load_case
from ds41_tvm.golden.case import GoldenCase
from ds41_tvm.golden.judge import examine
from ds41_tvm.numerics import formats as f
from ds41_tvm.reference.candidates import candidate_positions

CASES = (
    "tiny_prefill12_decode2",
    "tiny_token_by_token",
    "tiny_batch2",
    "mid_prefill150_decode10",
    "checkpoint_mid_fp8",
)


def replay(case: GoldenCase, played: Any) -> dict[str, np.ndarray]:
    """Results by the names of the recorded values."""
    got: dict[str, np.ndarray] = {}
    roles = case.config.roles
    for step in range(len(case.steps)):
        out = played.step({role.layer: f.bf16_decode(case.input(role.layer, step)) for role in roles})
        for role in roles:
            y = out[f"y.{role.layer}"]
            got[f"out.{role.layer}.{step}"] = f.bf16_encode(y)
            np.testing.assert_array_equal(f.bf16_decode(f.bf16_encode(y)), y)
            if role.is_candidate_source:
                length = case.start(step + 1) // role.ratio
                inside = [
                    candidate_positions(b, case.config.candidate_block_size, length)
                    for b in out[f"candidates.{role.layer}"]
                ]
                got[f"candidates.{role.layer}.{step}"] = np.stack(inside)
            if role.index_source is not None:
                got[f"selection.{role.layer}.{step}"] = out[f"selection.{role.index_source}"]
    caches, dim, index_dim = played.session.caches, case.config.head_dim, case.config.index_head_dim
    for role in roles:
        rows = f.unpack_window_row(caches[f"past_window.{role.layer}"], dim)
        got[f"window_cache.{role.layer}"] = f.dequantize_window(*rows)
        if role.kind == "full":
            latents = f.unpack_latent_row(caches[f"past_latent.{role.layer}"], dim)
            keys = f.unpack_index_row(caches[f"past_key.{role.layer}"], index_dim)
            got[f"compress_kv_cache.{role.layer}"] = f.dequantize_latent(*latents)
            got[f"index_k_cache.{role.layer}"] = f.dequantize_index(*keys)
    return got


@pytest.mark.parametrize("name", CASES)
def test_case(golden_folder: Path, exported: Callable[..., Any], name: str) -> None:
    case = load_case(golden_folder / f"{name}.lowest-index.npz")
    played = exported(case.config, case.weights, case.batch, linear=case.linear, keys="published")
    got = replay(case, played)
    assert [str(finding) for finding in judge(case, got)] == []
    # Caches do not depend on the tie rule; they are recorded with the other one.
    other = load_case(golden_folder / f"{name}.npz")
    for what, layer, step in other.recorded():
        if step is None:
            mine, theirs = (f.bf16_decode(a) for a in (got[f"{what}.{layer}"], other.get(what, layer)))
            limit = max(4 * case.spread[what], 2e-3)
            assert np.linalg.norm(mine - theirs) <= limit * np.linalg.norm(theirs), f"{what}.{layer}"


@pytest.mark.slow
def test_released_sizes(golden_folder: Path, exported: Callable[..., Any]) -> None:
    # Recorded with torch's ties: rows that take another one of equal scores are no mismatch. Layer 3 looks inside
    # candidate blocks that differ by ties and are not recorded.
    case = load_case(golden_folder / "flash_dims_prefill200_decode4.npz")
    played = exported(case.config, case.weights, keys="published", weights_as="external")
    verdict = examine(case, replay(case, played), layers=(0, 1, 2), ties="lowest-index")
    assert [str(finding) for finding in verdict.findings] == []
    assert verdict.mismatches == 0


def test_own_keys_differ_from_the_published_ones_only_in_the_middle_of_a_group(
    golden_folder: Path, exported: Callable[..., Any]
) -> None:
    case = load_case(golden_folder / "tiny_token_by_token.lowest-index.npz")
    got = replay(case, exported(case.config, case.weights, keys="own"))
    findings = judge(case, got)
    assert findings
    for finding in findings:
        assert finding.layer in (2, 3)
        assert finding.step is not None
        assert case.start(finding.step + 1) % 2 == 1
