"""`ds41-tvm bench`: what it measures and how it is told, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds41_tvm import cli


def test_every_layer_and_phase_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    sizes = ["--config", "tiny", "--layers", "all", "--prompt", "6", "--decode", "1", "--rounds", "1"]
    assert cli.run(["bench", *sizes, "--against", "none", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert {(row["layer"], row["phase"]) for row in told["rows"]} == {
        (layer, phase) for layer in range(6) for phase in ("prefill", "decode")
    }
    assert all(row["fastest"] <= row["seconds"] <= row["slowest"] for row in told["rows"])
    decode = [row for row in told["rows"] if row["phase"] == "decode"]
    assert all(
        row["share_of_read_bandwidth"] == pytest.approx(row["bytes_per_second"] / told["read_bandwidth"])
        for row in decode
    )
    assert "read bandwidth" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [["--against", "numpy"], ["--rounds", "0"], ["--decode", "0"]])
def test_nonsense_is_refused(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--config", "tiny", *extra]) == 2
    assert "expected peers among" in capsys.readouterr().err
