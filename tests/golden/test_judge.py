"""Reading cases, and what the judge lets pass and what it finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds41_tvm.errors import UsageError
from ds41_tvm.golden import GoldenCase, judge, load_case
from ds41_tvm.golden.judge import relative_error
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode

FOLDER = Path(__file__).parent
FULL = "tiny_prefill12_decode2.npz"


def recorded(case: GoldenCase) -> dict[str, np.ndarray]:
    """The recorded arrays themselves, as an implementation that does everything right would give them."""
    return {
        f"{what}.{layer}" if step is None else f"{what}.{layer}.{step}": case.get(what, layer, step).copy()
        for what, layer, step in case.recorded()
    }


@pytest.fixture
def case() -> GoldenCase:
    return load_case(FOLDER / FULL)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[tmcf]*_*.npz")), ids=lambda path: path.name)
def test_every_case_passes_as_recorded(path: Path) -> None:
    case = load_case(path)
    assert judge(case, recorded(case)) == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[tmcf]*_*.npz")), ids=lambda path: path.name)
def test_window_parts_are_the_last_positions(path: Path) -> None:
    case = load_case(path)
    for what, layer, step in case.recorded():
        if what == "window" and step is not None:
            chosen = case.get(what, layer, step)
            for token in range(chosen.shape[1]):
                last = case.start(step) + token
                first = max(0, last - case.config.window_size + 1)
                assert sorted(p for p in chosen[0, token].tolist() if p >= 0) == list(range(first, last + 1))


def test_rows_are_by_position_also_after_the_ring_went_round(case: GoldenCase) -> None:
    before, after = case.get("kv_rows", 0, 0), case.get("kv_rows", 0, 1)
    np.testing.assert_array_equal(after[:, :-1], before[:, -7:])
    np.testing.assert_array_equal(case.get("window_cache", 0)[:, :-1], case.get("kv_rows", 0, 1)[:, 1:])


def test_weights_and_inputs_follow_from_their_names(case: GoldenCase) -> None:
    assert case.input(3, 0).shape == (1, 12, 64)
    assert (case.input(3, 0) != case.input(2, 0)).any()
    assert case.weights["layers.2.attn.compressor.wkv.weight"].dtype == np.float32
    fp8 = load_case(FOLDER / "checkpoint_mid_fp8.lowest-index.npz")
    assert fp8.weights["layers.0.attn.wq_a.weight"].dtype == np.uint8


def test_a_swapped_position_is_found(case: GoldenCase) -> None:
    produced = recorded(case)
    produced["selection.4.2"][0, 0, 0] = 3 if 3 not in produced["selection.4.2"][0, 0] else 2
    findings = judge(case, produced)
    assert [(f.layer, f.step, f.row, f.kind) for f in findings] == [(4, 2, (0, 0), "selection")]
    assert "layer 4 step 2 sequence 0 token 0: selection: got" in str(findings[0])


def test_order_and_width_of_a_selection_do_not_matter(case: GoldenCase) -> None:
    produced = recorded(case)
    wide = np.concatenate([produced["selection.4.0"][..., ::-1], np.full((1, 12, 3), -1)], axis=-1)
    produced["selection.4.0"] = wide
    assert judge(case, produced) == []


@pytest.mark.parametrize(
    "what", ["out.3.1", "o.0.0", "qr.0.0", "latent_pre_rope.2.2", "window_cache.1", "index_k_cache.4"]
)
def test_a_wrong_value_is_found(case: GoldenCase, what: str) -> None:
    produced = recorded(case)
    produced[what][0, 0] = bf16_encode(bf16_decode(produced[what][0, 0]) * np.float32(1.1))
    assert [f.kind for f in judge(case, produced)] == [f"{what.split('.')[0]} error"]


def test_rounding_passes_and_nan_does_not(case: GoldenCase) -> None:
    produced = recorded(case)
    produced["out.0.0"][0, 0, 0] ^= 1
    assert judge(case, produced) == []
    produced["out.0.0"][0, 0, 0] = 0x7FC0
    assert [f.kind for f in judge(case, produced)] == ["out error"]


def test_rows_whose_selection_differs_are_not_compared(case: GoldenCase) -> None:
    produced = recorded(case)
    produced["selection.2.0"][0, 11] = -1
    produced["out.2.0"][0, 11] = 0
    assert [f.kind for f in judge(case, produced)] == ["selection"]


def test_candidates_and_hidden_scores_must_be_equal(case: GoldenCase) -> None:
    produced = recorded(case)
    produced["candidates.4.0"][0, 5, 0] ^= True
    produced["index_score.5.0"][0, 0, -1] = 0
    findings = judge(case, produced)
    assert sorted((f.kind, f.row) for f in findings) == [("candidates", (0, 5)), ("hidden scores", None)]


def test_missing_arrays_and_wrong_shapes_are_found(case: GoldenCase) -> None:
    produced = recorded(case)
    del produced["out.1.0"], produced["selection.5.2"], produced["qr.0.0"]
    produced["out.0.1"] = produced["out.0.1"][..., :-1]
    produced["selection.2.0"] = produced["selection.2.0"][:, :-1]
    kinds = sorted((f.layer, f.step, f.kind) for f in judge(case, produced))
    assert kinds == [(0, 1, "out shape"), (1, 0, "out"), (2, 0, "selection shape"), (5, 2, "selection")]
    assert judge(case, {k: v for k, v in recorded(case).items() if k.split(".")[1] == "0"}, layers=[0]) == []


def flash_with_one_row_changed(steps: int) -> tuple[GoldenCase, dict[str, np.ndarray]]:
    """A selected position swapped for one whose recorded score lies at least `steps` bf16 steps away."""
    case = load_case(FOLDER / "flash_dims_prefill200_decode4.npz")
    produced = recorded(case)
    scores, selection = case.get("index_score", 2, 0)[0], produced["selection.2.0"][0]
    for token in range(199, 64, -1):
        outside = [p for p in range(token + 1) if p not in selection[token] and scores[token, p] < 0x7F80]
        for column, inside in enumerate(selection[token]):
            for other in outside:
                if abs(int(scores[token, inside]) - int(scores[token, other])) == steps:
                    selection[token, column] = other
                    return case, produced
    raise AssertionError("no such pair of scores")


def test_a_rounding_tie_passes_where_the_case_has_some() -> None:
    case, produced = flash_with_one_row_changed(1)
    assert judge(case, produced) == []
    case.selection_differs = []
    assert [f.kind for f in judge(case, produced)] == ["selection"]


def test_more_than_a_rounding_tie_does_not_pass() -> None:
    case, produced = flash_with_one_row_changed(2)
    assert [f.kind for f in judge(case, produced)] == ["selection"]


def test_many_rounding_ties_do_not_pass() -> None:
    case, produced = flash_with_one_row_changed(1)
    scores, selection = case.get("index_score", 2, 0), produced["selection.2.0"]
    for token in range(190, 199):
        scores[0, token] = scores[0, token, 0]  # everything ties with everything
        selection[0, token] = np.arange(selection.shape[-1])
    produced["index_score.2.0"] = scores
    assert [f.kind for f in judge(case, produced)] == ["selections that differ by rounding"]


def test_relative_error() -> None:
    one = np.array([3.0, 4.0])
    assert relative_error(one * 1.01, one) == pytest.approx(0.01)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.array([1.0, 0]), np.zeros(2)) == float("inf")
    assert relative_error(np.array([np.nan, 4.0]), one) == float("inf")


def test_a_file_that_is_no_case_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"numerics\.npz is not a golden case"):
        load_case(FOLDER / "numerics.npz")
    with pytest.raises(UsageError, match=r"absent\.npz"):
        load_case(tmp_path / "absent.npz")
    (tmp_path / "bad.npz").write_text("hello")
    with pytest.raises(UsageError, match=r"bad\.npz"):
        load_case(tmp_path / "bad.npz")
