"""`ds41-tvm bench`: what it measures and how it is told, not how fast anything is."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ds41_tvm import cli
from ds41_tvm.bench import limits
from ds41_tvm.bench.result import Result, read_result, write_result

FEW = ["--config", "tiny", "--prefill", "8,20", "--batch", "1,3", "--rounds", "1"]
SIZES = [*FEW, "--context", "9,30"]


@pytest.fixture(scope="module", autouse=True)
def small_read_buffer() -> Iterator[None]:
    """Nothing here depends on how fast memory is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "read_bytes", lambda: 4 << 20)
        limits._buffers.cache_clear()
        yield
    limits._buffers.cache_clear()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run beside a peer in a process of its own: its JSON file, and what it printed."""
    file, out = tmp_path_factory.mktemp("bench") / "bench.json", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.run(["bench", *SIZES, "--against", "onnxruntime", "--json", str(file)]) == 0
    return file, out.getvalue()


@pytest.fixture(scope="module")
def result(told: tuple[Path, str]) -> Result:
    return read_result(told[0])


def test_every_kind_of_work_is_measured_in_every_layer_that_does_it(result: Result) -> None:
    layers = {what: {r.layer for r in result.rows if r.what == what} for what in {r.what for r in result.rows}}
    everywhere, indexers = {0, 2, 3, 4, 5}, {2, 4, 5}
    assert layers == {
        "prefill": everywhere, "decode": everywhere, "batch": everywhere, "attention": everywhere, "topk": indexers,
        "scores": indexers, "launch": {None},
    }  # fmt: skip
    assert {r.context for r in result.rows if r.what == "decode"} == {9, 30}
    assert {r.tokens for r in result.rows if r.what == "prefill"} == {8, 20}
    assert {r.batch for r in result.rows if r.what == "batch"} == {1, 3}
    assert {r.tokens for r in result.rows if r.what == "attention"} == {1, 20}
    assert {r.role for r in result.rows if r.what == "decode"} == {"window", "full", "reuse", "reindex"}
    assert len({r.name for r in result.rows}) == len(result.rows)


def test_rows_follow_from_their_times_work_and_limits(result: Result) -> None:
    for row in result.rows:
        s = row.seconds
        assert 0 < s.low <= s.q1 <= s.median <= s.q3 <= s.high
        assert 0 <= row.others <= 1.05
        for peer in row.peers.values():
            assert peer.ratio == pytest.approx(peer.seconds.median / s.median)
        if row.what in ("prefill", "decode", "batch"):
            assert set(row.peers) == {"onnxruntime"}
            assert row.share == pytest.approx(row.floor / s.median)
            assert row.gflops == pytest.approx((row.work.flops + row.work.dots) / s.median / 1e9)
            assert row.gbytes == pytest.approx(row.work.bytes / s.median / 1e9)
            products = next(kind for kind in ("amx", "bf16", "fma") if kind in row.of)
            assert max(row.of["read"], row.of[products]) <= row.share * (1 + 1e-9)
        if row.what in ("decode", "batch"):
            ring = (8 + 64) * (32 + 1)  # window and draft rows of tiny
            assert row.state_bytes >= row.batch * ring
            assert row.state_bytes == row.batch * ring or row.role == "full"
    small, large = ((r.seconds.median, r.work) for r in result.rows if r.what == "prefill" and r.layer == 2)
    assert large[1].flops > 2 * small[1].flops


def test_the_machine_and_the_versions_are_told(told: tuple[Path, str], result: Result) -> None:
    assert set(result.limits) >= {"read", "fma"}
    assert all(limit.samples >= 3 for limit in result.limits.values())
    assert result.machine.features
    assert set(result.memory) == {"ours", "onnxruntime"}
    assert result.memory["ours"] > 100 << 20
    assert result.libraries["onnxruntime"].startswith("onnxruntime ")
    text = json.dumps(json.loads(told[0].read_text()))
    assert str(Path.home()) not in text
    assert "reading memory" in told[1]
    assert "prefill 20" in told[1]


def test_a_baseline_is_compared_by_ratios(
    told: tuple[Path, str], result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and the row's name where the older result was better by far; 0 where it was worse."""
    short = ["bench", *FEW, "--against", "none", "--what", "decode", "--context", "9"]
    for factor, code in ((1e6, 1), (1e-6, 0)):
        rows = [
            msgspec.structs.replace(row, share=row.share * factor) if row.share is not None else row
            for row in result.rows
        ]
        write_result(msgspec.structs.replace(result, rows=rows), tmp_path / "old.json")
        assert cli.run([*short, "--baseline", str(tmp_path / "old.json"), "--factor", "1000"]) == code
        out = capsys.readouterr()
        assert "5 ratios compared" in out.out
        assert ("decode 9, layer 2, bf16: share was" in out.err) == bool(code)


def test_disturbed_rows_are_told(result: Result) -> None:
    from ds41_tvm.cli.bench_tables import limit_lines

    for others, said in ((0.02, False), (0.4, True)):
        rows = [msgspec.structs.replace(row, others=others) for row in result.rows]
        lines = list(limit_lines(msgspec.structs.replace(result, rows=rows)))
        assert any(f"{len(rows)} of {len(rows)} rows were disturbed" in line for line in lines) == said


def test_a_time_limit_leaves_out_cases_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.json"
    assert cli.run(["bench", *SIZES, "--against", "none", "--time", "0.01", "--json", str(file)]) == 0
    assert set(read_result(file).skipped) == {
        "prefill 8", "prefill 20", "decode 9", "decode 30", "batch x1 30", "batch x3 30", "topk 30", "scores 30",
        "attention 30", "attention 20 of 20 queries", "launch",
    }  # fmt: skip
    assert "not measured: prefill 8: the time limit of 0.01 s was reached" in capsys.readouterr().out.replace("\n", " ")


def test_a_profile_names_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--config", "tiny", "--profile", "--context", "30", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "decode 30, bf16" in out
    assert "sparse_attention" in out
    assert "(outside kernels)" in out


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--against", "numpy"], "expected peers among torch, torch-mv"),
        (["--rounds", "0"], "expected at least 1"),
        (["--context", "9,5000000"], "max_seq_len"),
        (["--context", "nine"], "expected such as 128,4K,1M"),
        (["--what", "speed"], "expected some of prefill"),
        (["--linear", "fp4"], "linear"),
        (["--isa", "sse"], "expected one of host, avx512, avx2"),
        (["--time", "soon"], "expected a positive time"),
        (["--factor", "2"], "together with --baseline FILE"),
        (["--profile", "--json", "x.json"], "leave out --json"),
        (["--baseline", "none.json"], "expected a result of bench --json"),
        (["--target", "gpu"], "expected"),
        (["--layers", "5"], "layer"),
    ],
)
def test_nonsense_is_refused(extra: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--config", "tiny", *extra]) == 2
    assert expected in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.run(["bench", "--config", "tiny", "--plot", "x.png"]) == 2
    assert "pip install 'ds41-tvm[plot]'" in capsys.readouterr().err
