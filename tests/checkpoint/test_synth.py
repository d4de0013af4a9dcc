"""Synthetic checkpoints: the same bytes every time, the golden values, care with what is there already."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from ds41_tvm.checkpoint import (
    TensorSpec,
    expected_tensors,
    golden_value,
    load_checkpoint,
    synthetic_weights,
    write_synthetic,
)
from ds41_tvm.checkpoint import synth as synth_module
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import CheckpointError, ConfigError, OutputExists
from ds41_tvm.numerics.formats import bf16_encode

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_mid_fp8"
TINY = AttentionConfig.preset("tiny")
FP8 = AttentionConfig.from_dict({**TINY.to_dict(), "q_lora_rank": 32})


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("linear", ["bf16", "fp8"])
@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
def test_what_is_written_is_read(linear: str, shard_bytes: int, tmp_path: Path) -> None:
    folder = write_synthetic(FP8, tmp_path / "deep" / "c", linear=linear, seed="s", shard_bytes=shard_bytes)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == FP8
    assert checkpoint.linear == linear
    synthetic = synthetic_weights(FP8, "s", linear=linear)
    assert set(checkpoint.weights) == set(synthetic)
    for name, array in checkpoint.weights.items():
        assert array.dtype == synthetic[name].dtype
        assert np.array_equal(array, synthetic[name]), name
    shards = len(checkpoint.summary()["shards"])
    assert shards == {1: 63, 20_000: {"bf16": 12, "fp8": 6}[linear], 1 << 30: 1}.get(shard_bytes, shards)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["c"]  # nothing temporary is left


def test_same_bytes_every_time(tmp_path: Path) -> None:
    for name, seed in (("a", "s"), ("b", "s"), ("c", "t")):
        write_synthetic(FP8, tmp_path / name, seed=seed, shard_bytes=30_000)
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    assert set(a) == set(c)
    assert a["config.json"] == c["config.json"]
    assert all(a[name] != c[name] for name in a if name.endswith(".safetensors"))
    assert len(a) > 4


def test_bytes_are_pinned(tmp_path: Path) -> None:
    """A change of this hash makes every recorded result that names a synthetic checkpoint meaningless."""
    write_synthetic(FP8, tmp_path / "c", seed="pinned", layers=[2])
    shard = digests(tmp_path / "c")["model-00001-of-00001.safetensors"]
    assert shard == "99656d4c958ea0c0570978dd0fb1f8678b9926fd78f873402154bf1cc1687ee0"


def test_golden_bf16_case_has_float32_compressors() -> None:
    weights = synthetic_weights(TINY, "tiny-a")
    for layer, name, dtype in (
        (2, "compressor.wkv.weight", np.float32),
        (2, "compressor.wgate.weight", np.float32),
        (4, "compressor.wkv.weight", np.uint16),
        (2, "attn_sink", np.float32),
        (2, "wq_a.weight", np.uint16),
    ):
        array = weights[f"layers.{layer}.attn.{name}"]
        value = golden_value("tiny-a", f"layers.{layer}.attn.{name}", array.shape)
        assert array.dtype == dtype
        assert np.array_equal(array, value if dtype == np.float32 else bf16_encode(value))
    assert "layers.4.attn.compressor.wgate.weight" not in weights


def test_released_layout_reproduces_the_golden_checkpoint(tmp_path: Path) -> None:
    config = AttentionConfig.from_file(GOLDEN)
    folder = write_synthetic(config, tmp_path / "c", seed="ckpt-fp8", linear="fp8")

    def stored(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
        tensors = {}
        for shard in directory.glob("*.safetensors"):
            for name, info in safetensors.deserialize(shard.read_bytes()):  # type: ignore[no-untyped-call]
                tensors[name] = (info["dtype"], info["shape"], bytes(info["data"]))
        return tensors

    assert stored(folder) == stored(GOLDEN)  # the safetensors library reads it, and finds the same bytes
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    golden_index = json.loads((GOLDEN / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == golden_index["weight_map"].keys()
    assert index["metadata"] == golden_index["metadata"]


def test_some_layers_only(tmp_path: Path) -> None:
    folder = write_synthetic(FP8, tmp_path / "c", layers=[1, 4])
    assert load_checkpoint(folder, [4, 1]).config == FP8
    with pytest.raises(CheckpointError, match="layer 0"):
        load_checkpoint(folder)
    assert {n.split(".")[1] for n in synthetic_weights(FP8, "s", layers=[4])} == {"4"}


def test_values_do_not_depend_on_the_layers_chosen() -> None:
    name = "layers.4.attn.wo_b.weight"
    assert np.array_equal(synthetic_weights(FP8, "s")[name], synthetic_weights(FP8, "s", layers=[4])[name])


def test_weights_are_made_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    original = synth_module._make_given

    def counting(spec: TensorSpec, *rest: Any) -> Any:
        made.append(spec.name)
        return original(spec, *rest)

    monkeypatch.setattr(synth_module, "_make_given", counting)
    weights = synthetic_weights(FP8, "s", linear="fp8")
    assert len(weights) == sum(1 for _ in weights)
    assert "layers.0.attn.wkv.scale" in weights
    assert made == []
    assert weights["layers.0.attn.wkv.scale"] is weights["layers.0.attn.wkv.scale"]
    assert weights["layers.0.attn.wkv.weight"].dtype == np.uint8
    assert made == ["layers.0.attn.wkv.weight"]


def test_fp8_needs_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="q_lora_rank 16"):
        write_synthetic(TINY, tmp_path / "c", linear="fp8")
    with pytest.raises(ConfigError, match="q_lora_rank 16"):
        synthetic_weights(TINY, "s", linear="fp8")
    assert list(tmp_path.iterdir()) == []


# ---- where it is written


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert load_checkpoint(write_synthetic(FP8, tmp_path / "c", layers=[0]), [0]).layers == (0,)


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    write_synthetic(FP8, tmp_path / "c", layers=[0], seed="old")
    before = digests(tmp_path / "c")
    with pytest.raises(OutputExists, match=r"holds a checkpoint already; .* pass overwrite"):
        write_synthetic(FP8, tmp_path / "c", layers=[0], seed="new")
    assert digests(tmp_path / "c") == before
    write_synthetic(FP8, tmp_path / "c", layers=[0], seed="new", overwrite=True)
    assert digests(tmp_path / "c") != before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_never_removed(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years")
    with pytest.raises(OutputExists, match=r"holds 'thesis.tex'"):
        write_synthetic(FP8, tmp_path / "c", layers=[0], overwrite=overwrite)
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OutputExists, match="not a plain directory"):
        write_synthetic(FP8, tmp_path / "file", layers=[0], overwrite=overwrite)
    assert (tmp_path / "c" / "thesis.tex").read_text() == "years"
    assert (tmp_path / "file").read_text() == "a file"


def test_a_failure_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = synth_module._make_stored

    def fail_late(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(synth_module, "_make_stored", fail_late)
    with pytest.raises(CheckpointError, match=r"cannot be written .No space left on device"):
        write_synthetic(FP8, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_table_of_expected_tensors() -> None:
    """Counts as in the released index: 40 layers, 4 compressors (3 with a gate), 8 indexers (4 with keys)."""
    flash = AttentionConfig.preset("flash")
    suffixes = [s.name.split(".attn.")[1] for layer in range(40) for s in expected_tensors(flash, layer)]
    counts = {name: suffixes.count(name) for name in set(suffixes)}
    assert counts["wq_a.weight"] == counts["attn_sink"] == counts["wo_b.weight"] == 40
    assert counts["compressor.wkv.weight"] == counts["compressor.norm.weight"] == 4
    assert counts["compressor.wgate.weight"] == 3
    assert counts["indexer.wq_b.weight"] == counts["indexer.weights_proj.weight"] == 8
    assert counts["indexer.wk.weight"] == counts["indexer.k_norm.weight"] == 4
    shapes = {s.name: s.shape for s in expected_tensors(flash, 2)}
    assert shapes["layers.2.attn.wq_b.weight"] == (32768, 1280)
    assert shapes["layers.2.attn.wo_a.weight"] == (8192, 4096)
    assert shapes["layers.2.attn.indexer.wq_b.weight"] == (4096, 1280)
    name, shape, dtypes = expected_tensors(flash, 0)[0]
    assert (name, shape, dtypes) == ("layers.0.attn.wq_a.weight", (1280, 5120), ("F8_E4M3", "BF16"))
