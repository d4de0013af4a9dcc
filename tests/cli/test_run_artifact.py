"""`ds41-tvm run --artifact`: layers out of a compiled folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ds41_tvm
from ds41_tvm import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of one window layer, and the artefact compiled from it."""
    root = tmp_path_factory.mktemp("run_artifact")
    config = ds41_tvm.AttentionConfig.preset("tiny")
    checkpoint = ds41_tvm.write_synthetic(config, root / "checkpoint", linear="bf16", layers=[0])
    ds41_tvm.compile(checkpoint, root / "artifact", layers=[0])
    return Path(checkpoint), root / "artifact"


def test_its_layers_run_and_agree(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, artifact = folders
    args = ["run", "--artifact", str(artifact), "--prompt", "5", "--decode", "2", "--json"]
    assert cli.run(args) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["layer"] for entry in told["layers"]] == [0]
    assert told["checked"] is None
    assert cli.run([*args, "--checkpoint", str(checkpoint), "--check"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layers"][0]["check"] == pytest.approx(told["layers"][0]["check"] | {"ok": True, "rows": 7})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--check"], "give --checkpoint beside --artifact"),
        (["--layers", "0"], "leave them out"),
        (["--linear", "fp8"], "leave them out"),
        (["--target", "cpu:x86-64-v3"], "leave them out"),
        (["--prompt", "1000"], "max_seq_len"),
    ],
)
def test_what_contradicts_it_is_refused(
    folders: tuple[Path, Path], extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["run", "--artifact", str(folders[1]), *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["run", "--artifact", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
