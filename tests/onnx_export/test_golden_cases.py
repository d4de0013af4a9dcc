"""Recorded cases through ONNX Runtime: selections, outputs and caches by the rule for every implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41_tvm.golden import judge, load_case
from ds41_tvm.golden.case import GoldenCase
from ds41_tvm.numerics import formats as f

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
            np.testing.assert_array_equal(got[f"{what}.{layer}"], other.get(what, layer), err_msg=f"{what}.{layer}")


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
