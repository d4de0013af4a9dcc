"""What `describe` and `ds41-tvm inspect` say of an artefact."""

import json
import shutil

import pytest

import ds41_tvm
from ds41_tvm import cli, errors
from ds41_tvm.artifact.describe import cache_bytes, describe, ir_text
from ds41_tvm.artifact.disassemble import assembly
from ds41_tvm.config import AttentionConfig
from ds41_tvm.program import Program
from ds41_tvm.target import parse_target


def test_cache_of_the_released_model():
    config = AttentionConfig.preset("flash")
    program = Program(config=config, layers=tuple(range(config.n_layers)), target=parse_target("cpu:x86-64-v3"))
    found = cache_bytes(program)
    assert found["per_token"] == 890
    assert found["at"]["1048576"] == found["fixed"] + 890 * 1048576
    rings = (128 + 64) * 528 * config.n_layers
    sources = [config.role(layer) for layer in config.kv_source_layers]
    assert found["fixed"] == rings + sum((r.ratio + 64) * 2 * 512 * 4 for r in sources if r.ratio > 1)


def test_cache_is_what_sequences_hold(tiny):
    runner = ds41_tvm.load(tiny.path)
    found = cache_bytes(runner.program)
    assert runner.new_sequence().state_bytes() == found["fixed"]


def test_describe(tiny):
    found = describe(tiny.path, expect=tiny.digest, verify=True)
    assert found["digest"] == tiny.digest
    assert found["verified"] == "all files"
    assert [layer["kind"] for layer in found["layers"]] == [r.kind for r in tiny.config.roles]
    assert all(kernel["code_bytes"] > 0 for kernel in found["kernels"])
    json.dumps(found)
    with pytest.raises(errors.PinMismatch):
        describe(tiny.path, expect="sha256:" + "0" * 64)


def test_table_and_json(tiny, capsys):
    assert cli.run(["inspect", str(tiny.path)]) == 0
    text = capsys.readouterr().out
    for word in (tiny.digest, "sparse_attention", "rowwise (fallback)", "kernels.cpu.so", "128K tokens", "reindex"):
        assert word in text
    assert cli.run(["inspect", str(tiny.path), "--json", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(describe(tiny.path, verify=True)))


def test_code_of_a_kernel(tiny, capsys):
    assert cli.run(["inspect", str(tiny.path), "--ir", "block_scores"]) == 0
    text = capsys.readouterr().out
    assert "def block_scores__size_2(" in text
    assert "T.parallel" in text
    with pytest.raises(errors.UsageError, match="2 kernels have that in their name.*\n.*rms_norm__dim_16"):
        ir_text(tiny.path, "rms_norm")
    with pytest.raises(errors.UsageError, match="0 kernels"):
        ir_text(tiny.path, "nonsense")
    assert cli.run(["inspect", str(tiny.path), "--ir", "a", "--json"]) == 2


def test_machine_code_of_a_kernel(tiny, capsys, monkeypatch, tmp_path):
    if shutil.which("objdump") or shutil.which("llvm-objdump"):
        text = assembly(tiny.path, "block_scores")
        assert "__tvm_ffi_block_scores__size_2>:" in text
        assert text.count("__tvm_ffi_index_scores") == 0
        assert len(text.splitlines()) > 100
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.run(["inspect", str(tiny.path), "--asm", "block_scores"]) == 2
    assert "install binutils" in capsys.readouterr().err


def test_damage_is_told_with_its_name(copy, capsys):
    with open(copy / "kernels.cpu.so", "r+b") as file:
        file.write(b"\0")
    assert cli.run(["inspect", str(copy)]) == 2
    assert "digest" in capsys.readouterr().err
    assert cli.run(["inspect", str(copy / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_another_machine_or_tvm_can_be_inspected(tiny, monkeypatch):
    monkeypatch.setattr("ds41_tvm.artifact.load.host_features", lambda: ())
    assert describe(tiny.path)["digest"] == tiny.digest


def test_compile_command(tiny, tmp_path, capsys):
    folder = ds41_tvm.write_synthetic(tiny.config, tmp_path / "checkpoint", linear="bf16")
    out = str(tmp_path / "out")
    assert cli.run(["compile", "--checkpoint", str(folder), "--layers", "0,2-3", "--out", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [0, 2, 3]
    assert found["weights"]
    assert ds41_tvm.open_artifact(out, expect=found["digest"]).digest == found["digest"]
    assert cli.run(["compile", "--config", "tiny", "--checkpoint", str(folder), "--out", out]) == 2
    assert "either" in capsys.readouterr().err
    assert cli.run(["compile", "--config", "tiny", "--target", "cuda:sm_9", "--out", out]) == 2
    assert "did you mean 'sm_90'?" in capsys.readouterr().err
    assert cli.run(["compile", "--config", "tiny", "--layers", "3", "--out", out]) == 2
    assert "layer 2 is missing" in capsys.readouterr().err
