"""`ds41-tvm run`: what it runs is what the package computes, what it reports agrees, and what it refuses it names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds41_tvm
from ds41_tvm import cli
from ds41_tvm.checkpoint import load_checkpoint, write_synthetic
from ds41_tvm.cli import machine, run_check, run_layers
from ds41_tvm.cli.run_input import Inputs, OutputFile, Work, plan_work, read_input
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import InputError, UsageError
from ds41_tvm.reference.layer import Reference

TINY = AttentionConfig.preset("tiny")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(TINY, tmp_path_factory.mktemp("run") / "tiny", linear="bf16", seed="a")


@pytest.fixture
def x(tmp_path: Path) -> Path:
    """Rows for two sequences of 20 tokens."""
    path = tmp_path / "x.npy"
    np.save(path, ds41_tvm.random_input("x", 0, 0, 2, 20, TINY.dim))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any]]:
    code = cli.run(["run", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def directly(checkpoint: Path, layers: list[int], rows: np.ndarray) -> dict[int, np.ndarray]:
    """Outputs of the first sequence in `rows` [tokens, dim], fed at once."""
    opened = load_checkpoint(checkpoint, layers)
    runner = ds41_tvm.build(opened.config, opened.weights, layers)
    step = runner.step([(runner.new_sequence(), len(rows))])
    return {layer: np.asarray(runner.forward(layer, rows, step)) for layer in layers}


def test_without_arguments_every_layer_is_run_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys)
    assert (code, told["ok"]) == (0, True)
    assert told["source"] == "synthetic checkpoint (tiny)"
    assert told["checked"] == {"tokens_of_each_sequence": 48, "all": True}
    assert {entry["role"] for entry in told["layers"]} == {"window", "full", "reindex", "reuse"}
    for entry in told["layers"]:
        check = entry["check"]
        assert check["ok"]
        assert check["rows"] == entry["tokens"] == 48
        assert check["selections"] == (48 if entry["role"] in ("full", "reindex") else 0)
        assert check["selections_that_differ"] == 0
        assert check["error"] <= check["limit"]
        assert entry["prefill_tokens_per_second"] > 0
        assert entry["decode_weight_bytes_per_second"] == pytest.approx(
            entry["weight_bytes"] / entry["decode_seconds_per_step"]
        )
    assert cli.run(["run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "synthetic checkpoint (tiny): 1 sequence(s), prompt 40, then 8 single token(s)" in out
    assert "Every layer agrees with the reference; selections are identical." in out
    assert all(word in out for word in ("window", "reindex", "decode ms", "0 of 48", "KiB"))


def test_outputs_are_those_of_the_layers(
    checkpoint: Path, x: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.npz"
    code, told = run(
        capsys, "--checkpoint", checkpoint, "--layers", "0,2,3", "--input", x, "--decode", 3, "--output", out
    )
    assert code == 0
    assert told["checked"] is None
    assert "check" not in told["layers"][0]
    assert (told["prompts"], told["decode"]) == ([17, 17], 3)
    written, rows = np.load(out), np.load(x)
    assert sorted(written.files) == ["out.0", "out.2", "out.3"]
    assert told["output_arrays"] == {"out.0": [2, 20, 64], "out.2": [2, 20, 64], "out.3": [2, 20, 64]}
    for sequence in range(2):
        for layer, expected in directly(checkpoint, [0, 2, 3], rows[sequence]).items():
            np.testing.assert_array_equal(written[f"out.{layer}"][sequence], expected)
    assert list(tmp_path.glob(".*")) == []


def test_chunks_do_not_matter_and_one_layer_needs_no_names(
    checkpoint: Path, x: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "flat.npy"
    np.save(flat, np.load(x)[0])
    for name, chunk in (("a.npy", 100), ("b.npy", 3)):
        options = ["--checkpoint", checkpoint, "--layers", "0", "--chunk", chunk, "--output", tmp_path / name]
        assert run(capsys, "--input", flat, *options)[0] == 0
    whole, cut = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert whole.shape == (20, 64)
    assert whole.dtype == np.uint16
    np.testing.assert_array_equal(whole, cut)
    np.testing.assert_array_equal(whole, directly(checkpoint, [0], np.load(flat))[0])


def test_prompts_of_several_lengths(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.npz"
    options = ["--checkpoint", checkpoint, "--layers", "0,2,4", "--prompt", "30,7,1", "--decode", 2, "--chunk", 8]
    code, told = run(capsys, *options, "--keys", "published", "--check", "--output", out)
    assert (code, told["prompts"], told["keys"]) == (0, [30, 7, 1], "published")
    assert told["layers"][0]["check"]["rows"] == 32 + 9 + 3
    assert {name: a.shape for name, a in np.load(out).items()} == {
        f"out.{layer}.{i}": (n, 64) for layer in (0, 2, 4) for i, n in enumerate((32, 9, 3))
    }


def test_a_check_that_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = Reference.forward

    def wrong(self: Reference, layer: int, x: Any, start: int, sequence: Any, trace: Any = None) -> Any:
        out = forward(self, layer, x, start, sequence, trace)
        if layer == 2:
            trace["out"] = trace["out"] ^ 0x0020
            trace["selection"] = np.where(trace["selection"] == 0, -1, trace["selection"])
        return out

    monkeypatch.setattr(Reference, "forward", wrong)
    options = ["--checkpoint", str(checkpoint), "--layers", "0,2", "--check"]
    code, told = run(capsys, *options)
    assert (code, told["ok"]) == (1, False)
    assert [entry["check"]["ok"] for entry in told["layers"]] == [True, False]
    assert told["layers"][1]["check"]["selections_that_differ"] > 0
    assert cli.run(["run", *options]) == 1
    assert "Layer 2 does not agree with the reference:" in capsys.readouterr().out


def test_a_large_run_is_checked_in_part(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_check, "LONG", 1e6)
    options = ["--checkpoint", str(checkpoint), "--layers", "0,2", "--check", "--prompt", "30,9"]
    code, told = run(capsys, *options)
    assert code == 0
    assert told["checked"] == {"tokens_of_each_sequence": 16, "all": False}
    assert told["layers"][1]["check"]["rows"] == 16 + 9
    assert cli.run(["run", *options]) == 0
    assert "Checked: the first 16 tokens of each sequence." in capsys.readouterr().out


def test_state_bytes_of_all_layers_are_those_of_the_sequence() -> None:
    runner = ds41_tvm.build(TINY, ds41_tvm.synthetic_weights(TINY, "a"))
    work = Work((40,), 0, 40)
    results = run_layers.feed(runner, work, Inputs(work, TINY.dim, None, "a"), 0, lambda *_: None)
    sequence = runner.new_sequence()
    sequence.reserve(40)
    assert sum(result.state_bytes for result in results.values()) == sequence.state_bytes()


def test_input_by_rule_does_not_depend_on_how_it_is_cut() -> None:
    inputs = Inputs(Work((5, 3), 2, 4), TINY.dim, None, "a")
    whole = ds41_tvm.random_input("a", 3, 0, 2, 7, TINY.dim)
    np.testing.assert_array_equal(inputs.rows(3, [0, 0], [7, 5]), np.concatenate([whole[0], whole[1, :5]]))
    np.testing.assert_array_equal(inputs.rows(3, [4, 2], [1, 0]), whole[0, 4:5])


@pytest.mark.parametrize(
    ("options", "rows", "work"),
    [
        ((None, None, None, None), None, Work((40,), 8, 40)),
        (("7", 0, 3, 2), None, Work((7, 7, 7), 0, 2)),
        (("100,37", 1, None, None), None, Work((100, 37), 1, 100)),
        (("100,37", 1, 2, 9999), None, Work((100, 37), 1, 100)),
        ((None, None, None, None), (2, 20), Work((12, 12), 8, 12)),
        ((None, None, None, None), (1, 3), Work((1,), 2, 1)),
        ((None, None, None, None), (1, 1), Work((1,), 0, 1)),
        (("15,3", 5, None, 4), (2, 20), Work((15, 3), 5, 4)),
    ],
)
def test_plan(options: tuple[Any, ...], rows: tuple[int, int] | None, work: Work) -> None:
    planned = plan_work(*options, None if rows is None else np.zeros((*rows, 4), np.uint16))
    assert planned == work
    steps = list(planned.steps())
    assert tuple(map(sum, zip(*steps, strict=True))) == planned.totals
    assert len(steps) == planned.prefill_steps + planned.decode
    assert max(map(sum, steps[: planned.prefill_steps])) == planned.widest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "0"], "--prompt '0': expected a length of at least 1"),
        (["--prompt", "5,,3"], "--prompt '5,,3'"),
        (["--prompt", "-4"], "--prompt"),
        (["--prompt", "9" * 40], "--prompt '999"),
        (["--prompt", "9999999999"], "expected at most 2147483647"),
        (["--decode", "-1"], "--decode -1"),
        (["--batch", "0"], "--batch 0"),
        (["--batch", "99999999999"], "expected at most 65536"),
        (["--chunk", "0"], "--chunk 0"),
        (["--batch", "3", "--prompt", "5,6"], "--batch has 3 sequences"),
        (["--threads", "0"], "threads is 0"),
        (["--target", "cpu:pentium"], "'pentium'"),
        (["--layers", "3"], "layer 2 is missing"),
        (["--layers", "9"], "0..5"),
        (["--linear", "fp8"], "use linear 'bf16'"),
        (["--checkpoint", "{folder}/absent"], "absent: no such directory"),
        (["--checkpoint", "{folder}"], "config.json"),
        (["--checkpoint", "{checkpoint}", "--prompt", "60", "--decode", "5"], "room for 64"),
        (["--input", "{folder}/absent.npy"], "absent.npy"),
        (["--input", "{folder}/text.npy"], "text.npy"),
        (["--input", "{folder}/f32.npy"], "f32.npy: dtype float32, shape (3, 64); expected bf16 bits"),
        (["--input", "{folder}/narrow.npy"], "narrow.npy: dtype uint16, shape (3, 63)"),
        (["--input", "{folder}/several.npz"], "several.npz"),
        (["--input", "{x}", "--prompt", "5"], "--input holds 20 tokens; --prompt 5 and --decode 8 take 13"),
        (["--input", "{x}", "--decode", "20"], "takes all"),
        (["--input", "{x}", "--batch", "3"], "--input has 2 sequences"),
        (["--output", "{folder}/o.npy"], "there are 6 arrays"),
        (["--output", "{folder}/o.txt"], "ends in .npy"),
        (["--output", "{folder}/text.npy", "--layers", "0"], "text.npy: exists"),
        (["--output", "{folder}/no/such/o.npz"], "cannot be written"),
        (["--output", "{folder}"], "expected a name"),
        (["--output", "/proc/o.npz"], "cannot be written"),
    ],
)
def test_refusals(
    options: list[str],
    words: str,
    checkpoint: Path,
    x: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("refused too late")

    monkeypatch.setattr(run_layers, "build", build)
    (tmp_path / "text.npy").write_text("mine")
    np.save(tmp_path / "f32.npy", np.zeros((3, 64), np.float32))
    np.save(tmp_path / "narrow.npy", np.zeros((3, 63), np.uint16))
    np.savez(tmp_path / "several.npz", np.zeros(3))
    before = sorted(tmp_path.iterdir())
    assert cli.run(["run", *(option.format(folder=tmp_path, checkpoint=checkpoint, x=x) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "text.npy").read_text() == "mine"


def test_what_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("refused too late")

    monkeypatch.setattr(run_layers, "build", build)
    monkeypatch.setattr(machine, "memory", lambda: {"total": 1 << 40, "available": 500 << 20, "limit": None})
    assert cli.run(["run", "--prompt", "2000000", "--batch", "4"]) == 2
    err = capsys.readouterr().err
    assert "this run needs about" in err
    assert "500.0 MiB are available" in err


@pytest.mark.parametrize("moment", ["build", "feed"])
def test_interruption_leaves_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_layers, moment, interrupted)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.run(["run", "--output", str(tmp_path / "o.npz")]) == 130
    assert capsys.readouterr().err == "ds41-tvm: interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "word"), [("SIGTERM", "terminated"), ("SIGHUP", "hung up")])
def test_a_signal_ends_a_run_and_leaves_nothing(name: str, word: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time, tvm_ffi, ds41_tvm.compiler.build\n"
        "from ds41_tvm import cli\nfrom ds41_tvm.cli import run_layers\n"
        "def wait():\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "    time.sleep(60)\n"
        # As during a compilation, where TVM calls back.
        "run_layers.build = lambda *_, **__: tvm_ffi.convert(wait)()\n"
        "sys.argv = ['ds41-tvm', 'run', '--output', os.environ['TMPDIR'] + '/o.npz']\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.stderr.splitlines()[-1] == f"ds41-tvm: {word}"
    assert done.returncode == 128 + getattr(signal, name)
    assert list(tmp_path.iterdir()) == []


def test_output_file_replaces_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "o.npy"
    path.write_text("old")
    with pytest.raises(UsageError, match="exists"):
        OutputFile(path, 1, False)
    with pytest.raises(ZeroDivisionError), OutputFile(path, 1, True):
        raise ZeroDivisionError
    assert path.read_text() == "old"
    with OutputFile(path, 1, True) as file:
        file.write({"out": np.arange(3)})
    np.testing.assert_array_equal(np.load(path), np.arange(3))
    assert [p.name for p in tmp_path.iterdir()] == ["o.npy"]


def test_output_file_must_be_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "folder.npy").mkdir()
    for name, words in (("pipe", "no regular file"), ("folder", "a directory"), ("x" * 300, "cannot be written")):
        with pytest.raises(UsageError, match=words):
            OutputFile(tmp_path / f"{name}.npy", 1, True)


def test_input_is_read_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for shape, flat in (((3, 8), True), ((2, 3, 8), False)):
        np.save(path, np.ones(shape, np.uint16))
        array, stored_flat = read_input(path, 8)
        assert (array.shape, stored_flat) == ((2 if not flat else 1, 3, 8), flat)
    np.save(path, np.ones((3, 8), ">u2"))
    with pytest.raises(InputError, match="dtype >u2"):
        read_input(path, 8)


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_help_is_light(verb: str) -> None:
    code = (
        f"import sys\nfrom ds41_tvm import cli\ncli.run([{verb!r}, '--help'])\n"
        "print(sorted({'tvm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--json" in done.stdout


def test_an_interruption_inside_the_compiler_stays_one() -> None:
    import tvm_ffi

    import ds41_tvm.compiler.build  # noqa: F401

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tvm_ffi.convert(interrupted)()
