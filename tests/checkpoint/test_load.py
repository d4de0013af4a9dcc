"""Reading checkpoints: the released layout, conversions, layers, memory maps."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ds41_tvm.checkpoint import (
    dequantize_block,
    expected_tensors,
    load_checkpoint,
    quantize_block,
    synthetic_weights,
    write_synthetic,
)
from ds41_tvm.checkpoint.tensors import code_names
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import (
    CheckpointClosed,
    CheckpointError,
    ConfigError,
    Ds41Error,
    ShardChanged,
    WrongDtype,
)
from ds41_tvm.numerics.formats import bf16_decode

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_mid_fp8"
TINY = AttentionConfig.preset("tiny")
WINDOW_FP8 = AttentionConfig.from_dict({**TINY.to_dict(), "q_lora_rank": 32})


def copy_of_golden(folder: Path) -> Path:
    target = folder / "checkpoint"
    shutil.copytree(GOLDEN, target, copy_function=shutil.copyfile)
    return target


def test_the_released_layout_is_read_and_is_what_the_rule_gives() -> None:
    """Every stored byte of the checkpoint written by safetensors' torch writer, bit for bit."""
    checkpoint = load_checkpoint(GOLDEN)
    assert checkpoint.linear == "fp8"
    assert checkpoint.layers == (0, 1, 2, 3, 4, 5)
    synthetic = synthetic_weights(checkpoint.config, "ckpt-fp8", linear="fp8")
    assert set(synthetic) == set(checkpoint.weights)
    for name, array in checkpoint.weights.items():
        assert array.dtype == synthetic[name].dtype, name
        assert np.array_equal(array, synthetic[name]), name


def test_encodings() -> None:
    weights = load_checkpoint(GOLDEN).weights
    expected = {
        "layers.2.attn.wq_a.weight": (np.uint8, (96, 256)),
        "layers.2.attn.wq_a.scale": (np.uint8, (3, 8)),
        "layers.2.attn.indexer.wq_b.scale": (np.uint8, (8, 3)),
        "layers.2.attn.wo_a.weight": (np.uint16, (192, 128)),
        "layers.2.attn.compressor.wgate.weight": (np.uint16, (64, 256)),
        "layers.2.attn.attn_sink": (np.float32, (8,)),
    }
    for name, (dtype, shape) in expected.items():
        assert (weights[name].dtype, weights[name].shape) == (np.dtype(dtype), shape)
        assert type(weights[name]) is np.ndarray
        assert not weights[name].flags.writeable
    assert "layers.2.attn.wo_a.scale" not in weights
    with pytest.raises(KeyError):
        weights["layers.2.attn.wo_a.scale"]


def test_the_codes_of_wo_a_come_beside_it() -> None:
    """In fp8 mode and where they are stored: the values again, in half the bytes."""
    name = "layers.0.attn.wo_a.weight"
    weights = load_checkpoint(GOLDEN, [0]).weights
    assert np.array_equal(dequantize_block(*(weights[codes] for codes in code_names(name))), weights[name])
    assert code_names(name)[0] not in load_checkpoint(GOLDEN, [0], linear="bf16").weights


def test_wo_a_is_the_dequantised_one() -> None:
    raw = (GOLDEN / "model-00001-of-00002.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def stored(name: str) -> np.ndarray:
        begin, end = header[name]["data_offsets"]
        data = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.uint8)
        return data.reshape(header[name]["shape"])

    expected = dequantize_block(stored("layers.0.attn.wo_a.weight"), stored("layers.0.attn.wo_a.scale"))
    assert np.array_equal(load_checkpoint(GOLDEN, [0]).weights["layers.0.attn.wo_a.weight"], expected)


def test_fp8_checkpoint_read_as_bf16() -> None:
    fp8, bf16 = load_checkpoint(GOLDEN), load_checkpoint(GOLDEN, linear="bf16")
    assert bf16.linear == "bf16"
    assert not [name for name in bf16.weights if name.endswith(".scale")]
    for name, array in bf16.weights.items():
        stored = fp8.weights[name]
        if stored.dtype == np.uint8:
            stored = dequantize_block(stored, fp8.weights[name.removesuffix("weight") + "scale"])
        assert np.array_equal(array, stored), name


def test_bf16_checkpoint_read_as_fp8(tmp_path: Path) -> None:
    write_synthetic(WINDOW_FP8, tmp_path / "bf16", linear="bf16", seed="s")
    bf16, fp8 = load_checkpoint(tmp_path / "bf16"), load_checkpoint(tmp_path / "bf16", linear="fp8")
    assert (bf16.linear, fp8.linear) == ("bf16", "fp8")
    codes_of_wo_a = {name for layer in range(6) for name in code_names(f"layers.{layer}.attn.wo_a.weight")}
    assert set(fp8.weights) == set(synthetic_weights(WINDOW_FP8, "s", linear="fp8")) - codes_of_wo_a
    for spec in expected_tensors(WINDOW_FP8, 2):
        stored = bf16.weights[spec.name]
        if spec.is_linear and not spec.name.endswith("wo_a.weight"):
            codes, scales = quantize_block(bf16_decode(stored))
            assert np.array_equal(fp8.weights[spec.name], codes)
            assert np.array_equal(fp8.weights[spec.name.removesuffix("weight") + "scale"], scales)
        else:
            assert np.array_equal(fp8.weights[spec.name], stored)


def test_linear_override_is_checked() -> None:
    with pytest.raises(ConfigError, match="'int4'; expected 'bf16' or 'fp8'"):
        load_checkpoint(GOLDEN, linear="int4")


@pytest.mark.parametrize("linear", ["bf16", "fp8"])
def test_config_and_storage_must_agree_unless_overridden(linear: str, tmp_path: Path) -> None:
    write_synthetic(WINDOW_FP8, tmp_path / "c", linear=linear)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    if linear == "fp8":
        del config["quantization_config"]
    else:
        config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WrongDtype, match=r"wq_a.weight: stored as .* pass linear='bf16' or linear='fp8'"):
        load_checkpoint(tmp_path / "c")
    assert load_checkpoint(tmp_path / "c", linear="bf16").linear == "bf16"
    assert load_checkpoint(tmp_path / "c", linear="fp8").linear == "fp8"


# ---- layers and shards


def test_only_the_layers_asked_for() -> None:
    checkpoint = load_checkpoint(GOLDEN, [5, 3])
    assert checkpoint.layers == (3, 5)
    assert {name.split(".")[1] for name in checkpoint.weights} == {"3", "5"}
    with pytest.raises(ConfigError, match=r"6; expected layers in 0..5"):
        load_checkpoint(GOLDEN, [6])


def test_only_the_shards_needed_are_opened(tmp_path: Path) -> None:
    """The second shard may be absent, and the first one's layers still load; summary names those opened."""
    folder = copy_of_golden(tmp_path)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"not a shard")
    checkpoint = load_checkpoint(folder, [0, 1, 2])
    assert checkpoint.summary()["shards"] == ["model-00001-of-00002.safetensors"]
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert len(load_checkpoint(folder, [2]).weights) > 0
    with pytest.raises(CheckpointError):
        load_checkpoint(folder, [3])


def test_summary() -> None:
    summary = load_checkpoint(GOLDEN, [0, 3]).summary()
    assert summary["linear"] == "fp8"
    assert summary["layers"] == [0, 3]
    assert summary["conversions"] == {"none": 14, "dequantize": 2}
    assert summary["stored"]["F8_E4M3"]["tensors"] == summary["stored"]["F8_E8M0"]["tensors"] == 10
    assert summary["stored"]["F32"] == {"tensors": 2, "bytes": 64}
    assert summary["bytes"] == sum(of_type["bytes"] for of_type in summary["stored"].values())
    assert summary["config"] == AttentionConfig.from_file(GOLDEN).digest()
    json.dumps(summary)


def test_directory_without_an_index(tmp_path: Path) -> None:
    folder = copy_of_golden(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    (folder / ".hidden.safetensors").write_bytes(b"left over by a file manager")
    whole, indexed = load_checkpoint(folder), load_checkpoint(GOLDEN)
    assert all(np.array_equal(array, indexed.weights[name]) for name, array in whole.weights.items())


def test_single_file(tmp_path: Path) -> None:
    folder = write_synthetic(TINY, tmp_path / "c", linear="bf16", seed="s")
    os.rename(folder / "model-00001-of-00001.safetensors", folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "other.safetensors").write_bytes(b"not looked at")
    assert load_checkpoint(folder).summary()["shards"] == ["model.safetensors"]


def test_shards_that_are_links(tmp_path: Path) -> None:
    """As download caches lay them out: the name is inside the directory, the bytes elsewhere."""
    (tmp_path / "blobs").mkdir()
    folder = copy_of_golden(tmp_path)
    for shard in folder.glob("*.safetensors"):
        shard.rename(tmp_path / "blobs" / shard.name)
        shard.symlink_to(Path("..") / "blobs" / shard.name)
    assert len(load_checkpoint(folder).weights) == 102  # two more than tensors for each of six layers: codes of wo_a


def test_other_tensors_of_a_shard_are_not_judged(tmp_path: Path) -> None:
    """Experts, embeddings and types that we do not know lie in the same shards."""
    folder = copy_of_golden(tmp_path)
    shard = folder / "model-00001-of-00002.safetensors"
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    end = len(raw) - 8 - length
    header["layers.0.ffn.experts.0.w1.weight"] = {
        "dtype": "I8",
        "shape": [2, 3],
        "data_offsets": [end, end + 6],
    }
    header["odd"] = {"dtype": "F3_NEW", "shape": [9], "data_offsets": [end + 6, end + 10]}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :] + bytes(10))
    checkpoint, golden = load_checkpoint(folder), load_checkpoint(GOLDEN)
    assert all(np.array_equal(array, golden.weights[name]) for name, array in checkpoint.weights.items())


# ---- memory maps


def root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_stored_tensors_are_views_of_one_map() -> None:
    weights = load_checkpoint(GOLDEN).weights
    a, b = weights["layers.0.attn.wq_a.weight"], weights["layers.0.attn.q_norm.weight"]
    assert isinstance(root(a), np.memmap)
    assert root(a) is root(b)
    assert weights["layers.0.attn.wq_a.weight"] is a
    with pytest.raises(ValueError, match="read-only"):
        a[0, 0] = 1


def test_release_drops_the_maps_and_close_ends_it() -> None:
    checkpoint = load_checkpoint(GOLDEN)
    kept = checkpoint.weights["layers.0.attn.wq_a.weight"]
    expected = kept.copy()
    mapped = weakref.ref(root(kept))
    checkpoint.release()
    assert np.array_equal(kept, expected)  # a view handed out stays valid
    del kept
    gc.collect()
    assert mapped() is None
    assert np.array_equal(checkpoint.weights["layers.0.attn.wq_a.weight"], expected)
    assert checkpoint.weights["layers.0.attn.wo_a.weight"].dtype == np.uint16
    checkpoint.close()
    with pytest.raises(CheckpointClosed, match=r"layers.0.attn.wq_a.weight: the checkpoint is closed"):
        checkpoint.weights["layers.0.attn.wq_a.weight"]


def test_context_manager_closes() -> None:
    with load_checkpoint(GOLDEN) as checkpoint:
        assert checkpoint.weights["layers.0.attn.attn_sink"].shape == (8,)
    with pytest.raises(CheckpointClosed):
        checkpoint.weights["layers.0.attn.attn_sink"]


@pytest.mark.parametrize("how", ["cut", "rewritten", "replaced", "gone"])
def test_a_shard_that_changes_is_noticed(how: str, tmp_path: Path) -> None:
    folder = copy_of_golden(tmp_path)
    checkpoint = load_checkpoint(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    if how == "cut":
        os.truncate(shard, 5000)
    elif how == "rewritten":
        stat = shard.stat()
        shard.write_bytes(shard.read_bytes())
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        shard.rename(folder / "aside")
        if how == "replaced":
            shutil.copy2(folder / "aside", shard)
    with pytest.raises(ShardChanged, match=r"model-00001-of-00002.safetensors: (changed|gone) since it was opened"):
        checkpoint.weights["layers.0.attn.wq_a.weight"]
    assert checkpoint.weights["layers.3.attn.wq_a.weight"].size  # the other shard is as it was


# ---- refused before any tensor is looked at (broken shards: test_broken.py)


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a directory; expected one with config.json"):
        load_checkpoint(tmp_path / "absent")
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CheckpointError, match="not a directory"):
        load_checkpoint(tmp_path / "file")


def test_config_json_absent_or_damaged(tmp_path: Path) -> None:
    folder = copy_of_golden(tmp_path)
    (folder / "config.json").write_bytes((GOLDEN / "config.json").read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"config.json: not JSON"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json: cannot be read"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight_block_size", [128, 128], r"weight_block_size: \[128, 128\]; expected \[32, 32\]"),
        ("scale_fmt", "float", "scale_fmt: 'float'; expected ue8m0"),
        (None, "fp8", "quantization_config 'fp8'; expected an object"),
    ],
)
def test_quantization_config_refused(key: str | None, value: object, message: str, tmp_path: Path) -> None:
    folder = copy_of_golden(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if key is None:
        config["quantization_config"] = value
    else:
        config["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


def test_sizes_that_fp8_cannot_hold(tmp_path: Path) -> None:
    folder = copy_of_golden(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="q_lora_rank 100 is not a multiple of 32"):
        load_checkpoint(folder)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_ends_in_a_named_error_or_in_nothing(seed: int, tmp_path: Path) -> None:
    """Flipped bytes, in the header more often than elsewhere: never another exception."""
    folder = copy_of_golden(tmp_path)
    rng = np.random.default_rng(seed)
    path = folder / str(rng.choice(sorted(p.name for p in folder.iterdir())))
    data = bytearray(path.read_bytes())
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, min(len(data), 5000)))
        data[place] = int(rng.integers(0, 256))
    path.write_bytes(data)
    with suppress(Ds41Error):
        checkpoint = load_checkpoint(folder)
        assert all(np.asarray(checkpoint.weights[name]).size for name in checkpoint.weights)
