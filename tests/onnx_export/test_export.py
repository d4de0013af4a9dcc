"""The file: what is in it, where the weights are, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import ds41_tvm
from ds41_tvm.checkpoint import random_input, synthetic_weights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError, Ds41Error, MissingTensor, UsageError, WrongDtype, WrongShape
from ds41_tvm.numerics import formats as f
from ds41_tvm.onnx_export import weights as onnx_weights
from ds41_tvm.onnx_export.engines import model_inputs, onnxruntime_engine
from ds41_tvm.onnx_export.export import export_onnx
from ds41_tvm.onnx_export.play import Session
from ds41_tvm.onnx_export.sample import write_sample
from ds41_tvm.onnx_export.verify import check

TINY = AttentionConfig.preset("tiny")
WEIGHTS = synthetic_weights(TINY, "export")


def first_step(path: Path, layers: tuple[int, ...] = tuple(range(6)), **more: Any) -> dict[str, np.ndarray]:
    model = onnx.load(str(path), load_external_data=False)
    x = {layer: f.bf16_decode(random_input("export", layer, 0, 1, 9, TINY.dim)) for layer in layers}
    return Session(model_inputs(model)).step(onnxruntime_engine(path), x, more)


@pytest.mark.parametrize("opset", [19, 21, 23])
def test_every_opset(tmp_path: Path, opset: int) -> None:
    base = first_step(export_onnx(TINY, WEIGHTS, tmp_path / "a.onnx", layers=[4, 5]).path, (4, 5))
    made = export_onnx(TINY, WEIGHTS, tmp_path / "b.onnx", layers=[4, 5], opset=opset)
    assert check(made.path) == ""
    assert {(i.domain, i.version) for i in onnx.load(str(made.path)).opset_import} == {("", opset), ("ds41", 1)}
    for name, value in first_step(made.path, (4, 5)).items():
        np.testing.assert_array_equal(value, base[name], err_msg=name)


@pytest.mark.parametrize("linear", ["bf16", "fp8"])
def test_only_standard_operators_and_no_small_float_types(tmp_path: Path, linear: str) -> None:
    given = synthetic_weights(TINY_FP8, "export", linear=linear)
    model = onnx.load(str(export_onnx(TINY_FP8, given, tmp_path / "m.onnx", linear=linear).path))
    own = {function.name for function in model.functions}
    for node in [*model.graph.node, *(n for function in model.functions for n in function.node)]:
        if node.domain:
            assert node.domain == "ds41"
            assert node.op_type in own
        else:
            onnx.defs.get_schema(node.op_type, 18)
        if node.op_type == "Cast":
            plain = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BFLOAT16, TensorProto.INT32, TensorProto.INT64)
            assert node.attribute[0].i in (*plain, TensorProto.UINT8, TensorProto.BOOL)
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert types <= {TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.UINT8}
    assert (TensorProto.UINT8 in types) == (linear == "fp8")
    assert all(function.doc_string for function in model.functions)
    assert all(value.doc_string for value in [*model.graph.input, *model.graph.output])
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


TINY_FP8 = AttentionConfig.from_kwargs(
    **{**TINY.to_dict(), "q_lora_rank": 32, "o_lora_rank": 32, "dim": 96, "index_head_dim": 64}
)


def test_metadata(tmp_path: Path) -> None:
    model = onnx.load(str(export_onnx(TINY, WEIGHTS, tmp_path / "m.onnx", layers=[2, 3]).path))
    meta = {p.key: p.value for p in model.metadata_props}
    assert meta["ds41.config_digest"] == TINY.digest()
    assert AttentionConfig.from_dict(json.loads(meta["ds41.config"])) == TINY
    assert [role["kind"] for role in json.loads(meta["ds41.roles"])] == ["full", "reuse"]
    assert (meta["ds41.ties"], meta["ds41.keys"], meta["ds41.linear"]) == ("lowest-index", "own", "bf16")
    assert meta["ds41.version"] == ds41_tvm.__version__
    assert meta["ds41.weights_digest"].startswith("sha256:")
    other = synthetic_weights(TINY, "another")
    assert export_onnx(TINY, other, tmp_path / "n.onnx", layers=[2, 3]).digest != meta["ds41.weights_digest"]


def test_external_weights_move_with_the_folder(tmp_path: Path) -> None:
    inside = export_onnx(TINY, WEIGHTS, tmp_path / "inside.onnx")
    (tmp_path / "here").mkdir()
    beside = export_onnx(TINY, WEIGHTS, tmp_path / "here" / "m.onnx", weights_as="external")
    assert beside.digest == inside.digest
    assert beside.data is not None
    assert beside.path.stat().st_size < inside.path.stat().st_size - 100_000
    moved = tmp_path / "there"
    shutil.move(tmp_path / "here", moved)
    assert sorted(p.name for p in moved.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert check(moved / "m.onnx") == ""
    expected = first_step(inside.path)
    for name, value in first_step(moved / "m.onnx").items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_weights_are_stored_once_and_come_back_as_given(tmp_path: Path) -> None:
    for where in ("inline", "external"):
        path = export_onnx(TINY, WEIGHTS, tmp_path / f"{where}.onnx", weights_as=where).path  # type: ignore[arg-type]
        model = onnx.load(str(path), load_external_data=False)
        names = [tensor.name for tensor in model.graph.initializer]
        assert sorted(names) == sorted(WEIGHTS)
        for name, array in onnx_weights.read_weights(model, tmp_path).items():
            np.testing.assert_array_equal(array, WEIGHTS[name], err_msg=name)


def test_without_weights_they_are_inputs(tmp_path: Path) -> None:
    made = export_onnx(TINY, None, tmp_path / "m.onnx", layers=[0], weights_as="none")
    assert check(made.path) == ""
    expected = first_step(export_onnx(TINY, WEIGHTS, tmp_path / "n.onnx", layers=[0]).path, (0,))
    given = {name: WEIGHTS[name] for name in made.inputs if ".attn." in name}
    for name, value in first_step(made.path, (0,), **given).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_sample_is_what_the_runtime_gives(tmp_path: Path) -> None:
    path = export_onnx(TINY, WEIGHTS, tmp_path / "m.onnx").path
    folders = write_sample(path, TINY, WEIGHTS, range(6), "bf16")
    engine = onnxruntime_engine(path)
    assert [folder.name for folder in folders] == ["test_data_set_0", "test_data_set_1"]
    for folder in folders:
        sides = []
        for kind in ("input", "output"):
            files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda p: int(p.stem.split("_")[1]))
            tensors = [onnx.TensorProto.FromString(file.read_bytes()) for file in files]
            sides.append({tensor.name: numpy_helper.to_array(tensor) for tensor in tensors})
        got = engine(sides[0])
        assert list(got) == list(sides[1])
        for name, value in sides[1].items():
            np.testing.assert_allclose(got[name], value, rtol=1e-2, atol=1e-2, err_msg=name)


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(UsageError, match="opset 17: expected 18"):
        export_onnx(TINY, WEIGHTS, path, opset=17)
    with pytest.raises(UsageError, match="weights 'zip'"):
        export_onnx(TINY, WEIGHTS, path, weights_as="zip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layer 2 is missing"):
        export_onnx(TINY, WEIGHTS, path, layers=[3], keys="published")
    with pytest.raises(ConfigError, match="keys 'mine'"):
        export_onnx(TINY, WEIGHTS, path, keys="mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        export_onnx(TINY, WEIGHTS, path, layers=[9])
    for name, value, kind in (
        ("layers.0.attn.wq_a.weight", None, MissingTensor),
        ("layers.0.attn.wq_b.weight", np.zeros((3, 4), np.uint16), WrongShape),
        ("layers.0.attn.wkv.weight", np.zeros((32, 64), np.float64), WrongDtype),
    ):
        broken: dict[str, Any] = dict(WEIGHTS)
        broken[name] = value
        if value is None:
            del broken[name]
        with pytest.raises(kind, match=name):
            export_onnx(TINY, broken, path, layers=[0])
    assert list(tmp_path.iterdir()) == []


def test_more_than_a_file_can_hold_is_refused_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds41_tvm.onnx_export.export.INLINE_LIMIT", 1000)
    monkeypatch.setattr("ds41_tvm.onnx_export.export.AUTO_INLINE", 1000)
    with pytest.raises(UsageError, match="write them external"):
        export_onnx(TINY, WEIGHTS, tmp_path / "m.onnx", weights_as="inline")
    assert export_onnx(TINY, WEIGHTS, tmp_path / "m.onnx").data is not None


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    export_onnx(TINY, WEIGHTS, path, layers=[0])
    before = path.read_bytes()
    broken = {name: value for name, value in WEIGHTS.items() if "layers.5" not in name}
    with pytest.raises(MissingTensor):
        export_onnx(TINY, broken, path, weights_as="external")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["pipe", "folder", "none/m.onnx", "loop/m.onnx", "x" * 300])
def test_places_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Ds41Error, match="cannot be written"):
        export_onnx(TINY, WEIGHTS, tmp_path / name, layers=[0])
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()
