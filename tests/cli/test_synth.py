"""`ds41-tvm synth` writes what `write_synthetic` writes."""

import json

import numpy as np

from ds41_tvm import cli
from ds41_tvm.checkpoint import load_checkpoint, synthetic_weights
from ds41_tvm.config import AttentionConfig


def test_writes_a_checkpoint_that_loads(tmp_path, capsys):
    out = tmp_path / "made"
    assert cli.run(["synth", str(out), "--config", "tiny", "--layers", "0,2", "--seed", "s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layers"] == [0, 2]
    assert told["directory"] == str(out)
    assert told["bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    checkpoint = load_checkpoint(out, layers=[0, 2])
    expected = synthetic_weights(AttentionConfig.preset("tiny"), "s", [0, 2])
    assert set(checkpoint.weights) == set(expected)
    for name in expected:
        assert np.array_equal(checkpoint.weights[name], expected[name]), name


def test_text_form(tmp_path, capsys):
    assert cli.run(["synth", str(tmp_path / "made"), "--layers", "0-1"]) == 0
    out, err = capsys.readouterr()
    assert "layers 0,1" in out
    assert "KiB" in out
    assert err == ""


def test_refusals_leave_what_is_there(tmp_path, capsys):
    (tmp_path / "note.txt").write_text("mine")
    assert cli.run(["synth", str(tmp_path)]) == 2
    assert "note.txt" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]

    out = tmp_path / "made"
    assert cli.run(["synth", str(out), "--layers", "0"]) == 0
    assert cli.run(["synth", str(out), "--layers", "1"]) == 2
    assert cli.run(["synth", str(out), "--layers", "1", "--overwrite"]) == 0
    assert cli.run(["synth", str(tmp_path / "more"), "--layers", "99"]) == 2
    assert not (tmp_path / "more").exists()
