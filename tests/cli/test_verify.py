"""`ds41-tvm verify`: cases of every awkward kind pass, and everything that is wrong in one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41_tvm import cli
from ds41_tvm.golden import judge, load_case, play, reference_forward
from ds41_tvm.golden.judge import examine
from ds41_tvm.numerics.formats import bf16_decode, bf16_encode

EDGES = (1, 2, 3, 4, 5, 7, 8, 9)  # around the window of 5 and the ratios 3, 4 and 8


def zero(x: np.ndarray) -> np.ndarray:
    return np.zeros_like(x)


def repeated(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[:, :1], x.shape).copy()


def verify(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any]]:
    code = cli.run(["verify", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def change(path: Path, **arrays: Any) -> None:
    """Replace arrays of a file by what functions make of them; None removes one."""
    with np.load(path) as file:
        held = {name: file[name] for name in file.files}
    for key, function in arrays.items():
        name = key.replace("__", ".")
        if function is None:
            del held[name]
        else:
            held[name] = function(held[name].copy())
    np.savez(path, **held)


def test_awkward_cases_pass_through_compiled_layers(
    record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for prompt in EDGES:
        record(f"prompt{prompt}", [prompt, 1, 1, 1])
    record("batch", [17, 1, 1, 1, 1], batch=3, ties="lowest-index")
    record("zero", [30, *[1] * 9], inputs=zero)
    record("zero_lowest", [10, 1, 1], inputs=zero, batch=2, ties="lowest-index")
    record("repeated", [30, *[1] * 9], inputs=repeated)
    record("tokens", [1] * 25, ties="lowest-index")
    record("free", [30, 1, 1, 1], candidate_source_layer=-1)
    folder = record("long", [60, *[1] * 5], index_topk=80).parent
    code, told = verify(capsys, folder)
    assert (code, told["ok"], told["keys"]) == (0, True, "published")
    cases = {case["name"]: case for case in told["cases"]}
    assert len(cases) == len(EDGES) + 7
    for case in cases.values():
        assert case["findings"] == []
        assert case["mismatches"] == case["rounding_ties"] == case["tie_decided"] == 0
        assert case["worst"]["error"] <= case["worst"]["limit"] == 2e-3
    assert cases["batch"]["rows"] == 3 * 21 * 10
    assert cases["batch"]["selections"] == 3 * 21 * 9
    assert cases["batch"]["ties"] == "lowest-index"
    assert cases["zero"]["ties"] == "torch-cpu"


def test_lines_for_people(record: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = record("case", [9, 1])
    assert cli.run(["verify", str(path), "--reference"]) == 0
    line, last = capsys.readouterr().out.splitlines()
    for text in (
        "case  ok",
        "torch-cpu",
        "layers 0-9",
        "2 steps",
        "100 rows",
        "selections 0 of 90 differ",
        "of 2.0e-03",
        " s",
    ):
        assert text in line
    assert last == "1 of 1 good"
    assert cli.run(["verify", str(path), "--reference", "--verbose", "--steps", "1", "--layers", "0,3-4"]) == 0
    out = capsys.readouterr().out
    assert "layers 0,3-4, 1 steps, 27 rows" in out
    assert "    kv_rows: kv_rows.4.0 0.0e+00 of 2.0e-03" in out


def test_a_wrong_selection_is_named_with_both_values(
    record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = record("good", [9, 1]), record("bad", [9, 1])

    def swap(idx: np.ndarray) -> np.ndarray:
        # Layer 7 has ratio 1: token 8 sees 9 positions and takes 5, in columns 5..9, shifted by the 9 rows.
        taken = set(idx[0, 8, 5:].tolist())
        assert len(taken) == 5
        idx[0, 8, 5] = next(p for p in range(9, 18) if p not in taken)
        return idx

    before = load_case(bad).get("selection", 7, 0)[0, 8]
    change(bad, idx__7__0=swap)
    after = load_case(bad).get("selection", 7, 0)[0, 8]
    lost, gained = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    code, told = verify(capsys, good, bad, "--reference")
    assert (code, told["ok"]) == (1, False)
    assert [case["ok"] for case in told["cases"]] == [True, False]
    assert told["cases"][1]["mismatches"] == 1
    line = f"layer 7 step 0 sequence 0 token 8: selection: got {lost}, expected {gained}".replace(
        "np.int32(", ""
    ).replace(")", "")
    assert told["cases"][1]["findings"] == [line]
    assert cli.run(["verify", str(bad), "--reference"]) == 1
    out = capsys.readouterr().out
    assert "bad  WRONG" in out
    assert f"    {line}\n" in out


def test_wrong_values_are_named_and_long_lists_cut(
    record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = record("bad", [9, *[1] * 11])
    larger = lambda x: bf16_encode(bf16_decode(x) * np.float32(1.01))  # noqa: E731
    change(path, **{f"out__4__{step}": larger for step in range(12)}, window_cache__4=larger)
    assert cli.run(["verify", str(path), "--reference"]) == 1
    out = capsys.readouterr().out
    assert "layer 4 step 0: out error: got 0.00" in out
    assert "expected at most 0.002" in out
    assert "and 5 more: see them with --verbose" in out
    assert cli.run(["verify", str(path), "--reference", "--verbose"]) == 1
    assert "layer 4 at the end: window_cache error" in capsys.readouterr().out


def test_compiled_layers_are_judged_too(record: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = record("bad", [9, 1])
    change(path, out__9__1=lambda x: x ^ 0x8000)
    code, told = verify(capsys, path)
    assert code == 1
    assert [f.split(":")[1] for f in told["cases"][0]["findings"]] == [" out error"]


@pytest.mark.parametrize(("recorded", "other"), [("torch-cpu", "lowest-index"), ("lowest-index", "torch-cpu")])
def test_the_other_tie_rule(
    recorded: str, other: str, record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    zeros = record("zeros", [30, *[1] * 4], ties=recorded, inputs=zero)
    path = record("case", [30, *[1] * 4], ties=recorded)
    code, told = verify(capsys, zeros, path, "--reference", "--ties", other)
    assert code == 0
    assert [case["mismatches"] for case in told["cases"]] == [0, 0]
    assert [case["tie_decided"] > 0 for case in told["cases"]] == [True, True]
    assert {(case["ties"], case["recorded_ties"]) for case in told["cases"]} == {(other, recorded)}

    def swap(idx: np.ndarray) -> np.ndarray:
        taken = set(idx[0, 29, 5:].tolist())
        idx[0, 29, 5] = next(p for p in range(30, 60) if p not in taken)
        return idx

    change(path, idx__7__0=swap)
    assert verify(capsys, path, "--reference", "--ties", other)[1]["cases"][0]["mismatches"] == 1


def test_without_the_option_the_other_tie_rule_is_wrong(record: Callable[..., Path]) -> None:
    case = load_case(record("zeros", [30, 1], inputs=zero))
    assert not case.input(0, 0).any()
    case.ties = "lowest-index"
    produced = play(case, reference_forward(case)[0])
    assert any(finding.kind == "selection" for finding in judge(case, produced))
    case.ties = "torch-cpu"
    verdict = examine(case, produced, ties="lowest-index")
    assert verdict.findings == []
    assert verdict.tie_decided > 0


def test_recorded_numerics_are_verified_and_their_errors_found(
    golden_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = verify(capsys, golden_folder / "numerics.npz")
    assert code == 0
    names = [c["name"] for c in told["cases"][0]["comparisons"]]
    assert {"e4m3", "torch's top-k", "rope_flash_yarn", "latent rows", "latent rows, compiled"} <= set(names)
    path = tmp_path / "numerics.npz"
    path.write_bytes((golden_folder / "numerics.npz").read_bytes())

    def first(x: np.ndarray) -> np.ndarray:
        x.reshape(-1)[0] += 1
        return x

    change(path, e4m3_out=first, topk_set=first, rope_tiny_yarn=first)
    code, told = verify(capsys, path, "--reference")
    assert code == 1
    assert [f.split(":")[0] for f in told["cases"][0]["findings"]] == ["e4m3", "torch's top-k", "rope_tiny_yarn"]
    change(path, topk_set=None)
    assert cli.run(["verify", str(path)]) == 2
    assert "lack topk_set" in capsys.readouterr().err


def test_a_checkpoint_beside_the_file_gives_the_weights(
    golden_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = verify(capsys, golden_folder / "checkpoint_mid_fp8.npz", "--reference", "--steps", 2)
    assert code == 0
    assert told["cases"][0]["linear"] == "fp8"
    copied = tmp_path / "checkpoint_mid_fp8.npz"
    copied.write_bytes((golden_folder / copied.name).read_bytes())
    (tmp_path / "checkpoint_mid_fp8").mkdir()
    assert cli.run(["verify", str(copied), "--reference"]) == 2
    assert "config.json" in capsys.readouterr().err


def text(meta: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(meta).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"meta": None}, "no entry 'meta'"),
        ({"meta": lambda m: m[:20]}, "'meta' is not as expected"),
        ({"meta": lambda _: text([1])}, "it is a list; expected an object"),
        ({"meta": lambda _: text({"seed": "s", "batch": 1})}, "config, steps not given"),
        ({"meta": {"steps": [3, 2]}}, "then 1 for every decoded token"),
        ({"meta": {"steps": []}}, "expected a list of tokens per call"),
        ({"meta": {"batch": 0}}, "batch: 0"),
        ({"meta": {"ties": "random"}}, "ties 'random'"),
        ({"meta": {"linear": "fp4"}}, "linear 'fp4'"),
        ({"meta": {"steps": [96, 1]}}, "exceed max_seq_len 96"),
        ({"meta": {"config": {"dim": 3}}}, "not given"),
        ({"x__0__1": lambda x: x[:, :, 1:]}, "'x.0.1'"),
    ],
)
def test_files_that_are_no_case(
    changes: dict[str, Any], words: str, record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = record("good", [2]), record("bad", [2, 1], inputs=zero)
    some = changes.get("meta")
    if isinstance(some, dict):
        changes = {"meta": lambda meta: text(json.loads(bytes(meta)) | some)}
    change(bad, **changes)
    assert cli.run(["verify", str(good), str(bad), "--reference"]) == 2
    out, err = capsys.readouterr()
    assert out == ""  # the good one has not been run either
    assert "bad.npz" in err
    assert words in err


def test_names_of_arrays_are_checked_and_unknown_kinds_ignored(record: Callable[..., Path]) -> None:
    path = record("case", [3, 1])
    with np.load(path) as file:
        held = dict(file)
    np.savez(path, **held, **{"later_kind.0.0": np.zeros(3)})
    assert len(list(load_case(path).recorded())) > 0
    for name in ("out.10.0", "out.0.2", "out.0", "out.x.0", "window_cache.0.0"):
        np.savez(path, **held, **{name: np.zeros(3)})
        with pytest.raises(cli.UsageError, match=f"'{name}'"):
            load_case(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no path given"),
        (["{folder}/absent.npz"], "absent.npz: no such file"),
        (["{folder}/empty"], "holds no .npz file"),
        (["{folder}/text.npz"], "text.npz is not a golden case"),
        (["{folder}/cut.npz"], "cut.npz is not a golden case"),
        (["{folder}/single.npz"], "single array"),
        (["{folder}/case.npz", "--steps", "0"], "--steps 0"),
        (["{folder}/case.npz", "--layers", "2"], "layer 0 is missing"),
        (["{folder}/case.npz", "--layers", "77"], "0..9"),
        (["{folder}/case.npz", "--threads", "100000"], "threads is 100000"),
        (["{folder}/case.npz", "--target", "gpu:h200"], "unknown kind 'gpu'"),
        (["{folder}/case.npz", "--ties", "random"], "random"),
    ],
)
def test_refusals(
    arguments: list[str],
    words: str,
    record: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("refused too late")

    monkeypatch.setattr("ds41_tvm.golden.verify.build", build)
    case = record("case", [2])
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(case.read_bytes()[:900])
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert cli.run(["verify", *(a.format(folder=tmp_path) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
