"""What ``ds41-tvm tune`` refuses, before anything is measured."""

from __future__ import annotations

from typing import Any

import pytest

from ds41_tvm.cli import run
from ds41_tvm.cli.tune_cmd import parse_time
from ds41_tvm.errors import UsageError

MISTAKES = [
    ([], "either --artifact PATH or --config NAME"),
    (["--config", "tiny", "--artifact", "x"], "either --artifact PATH or --config NAME"),
    (["--artifact", "x", "--layers", "0"], "--config only"),
    (["--artifact", "nowhere"], "nowhere"),
    (["--config", "tiny", "--trials", "0"], "--trials 0"),
    (["--config", "tiny", "--time", "soon"], "--time 'soon'"),
    (["--config", "tiny", "--key", "k"], "--key without --rpc"),
    (["--config", "tiny", "--rpc", "host:1"], "--rpc without --key"),
    (["--config", "tiny", "--rpc", "host", "--key", "k"], "HOST:PORT"),
    (["--config", "tiny", "--target", "cpu:x86-64-v9"], "x86-64-v9"),
    (["--config", "tiny", "--kernels", "nothing"], "matches none"),
    (["--config", "tiny", "--threads", "9999"], "threads is 9999"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", *arguments]) == 2
    shown: Any = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""


def test_no_tracker(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    arguments = ["--config", "tiny", "--layers", "0", "--rpc", "127.0.0.1:1", "--key", "k", "--work", str(tmp_path)]
    assert run(["tune", *arguments, "--out", str(tmp_path)]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("7", 7), (None, float("inf"))]
)
def test_times(text: str | None, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-3s", "3d", "1 2"])
def test_no_times(text: str) -> None:
    with pytest.raises(UsageError):
        parse_time(text)


def test_records_for_compile_must_exist(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    out = ["--config", "tiny", "--out", str(tmp_path / "a")]
    assert run(["compile", *out, "--records", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(["compile", *out, "--records", str(tmp_path), "--no-records"]) == 2
    assert "one of the two" in capsys.readouterr().err
