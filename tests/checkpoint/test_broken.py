"""Ways a checkpoint can be broken: each is refused at load by its own error, naming file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41_tvm import errors
from ds41_tvm.checkpoint import load_checkpoint
from ds41_tvm.errors import Ds41Error

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_mid_fp8"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ATTN = "layers.2.attn."

Header = dict[str, Any]
Break = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN, target, copy_function=shutil.copyfile)
    return target


def read_shard(path: Path) -> tuple[Header, bytearray]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])


def write_shard(path: Path, header: Header | bytes, data: bytes | bytearray) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(name: str, **fields: Any) -> Break:
    """Changes fields of the header entry ``name`` of the first shard."""

    def apply(folder: Path) -> None:
        header, data = read_shard(folder / FIRST)
        header[name] = {**header[name], **fields}
        write_shard(folder / FIRST, header, data)

    return apply


def rename(old: str, new: str, with_index: bool = True) -> Break:
    def apply(folder: Path) -> None:
        header, data = read_shard(folder / FIRST)
        header[new] = header.pop(old)
        write_shard(folder / FIRST, header, data)
        if with_index:
            index(lambda weight_map: weight_map.update({new: weight_map.pop(old)}))(folder)

    return apply


def stored_bytes(name: str, offset: int, new: bytes) -> Break:
    """Overwrites bytes of the tensor ``name`` of the first shard."""

    def apply(folder: Path) -> None:
        header, data = read_shard(folder / FIRST)
        begin = header[name]["data_offsets"][0] + offset
        data[begin : begin + len(new)] = new
        write_shard(folder / FIRST, header, data)

    return apply


def restored(name: str, dtype: str, shape: list[int]) -> Break:
    """Stores zeros of another type or shape as ``name``: the header is in itself right."""

    def apply(folder: Path) -> None:
        header, data = read_shard(folder / FIRST)
        size = int(np.prod(shape)) * {"F16": 2, "F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "F3_NEW": 1}[dtype]
        old_begin, old_end = header[name]["data_offsets"]
        grown = bytes(size)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [old_begin, old_begin + size]}
        for other, value in header.items():
            if other not in (name, "__metadata__") and value["data_offsets"][0] >= old_end:
                value["data_offsets"] = [offset + size - (old_end - old_begin) for offset in value["data_offsets"]]
        write_shard(folder / FIRST, header, bytes(data[:old_begin]) + grown + bytes(data[old_end:]))

    return apply


def index(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        change(values["weight_map"])
        (folder / INDEX).write_text(json.dumps(values))

    return apply


def raw(file: str, change: Callable[[bytes], bytes]) -> Break:
    def apply(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return apply


def remove(*files: str) -> Break:
    def apply(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return apply


def shard_is_a_directory(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()


def config(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        change(values)
        (folder / "config.json").write_text(json.dumps(values))

    return apply


def move(file: str, offset_of: str, to: str) -> Break:
    """Gives the tensor ``offset_of`` the offsets of the tensor ``to``."""

    def apply(folder: Path) -> None:
        header, data = read_shard(folder / file)
        header[offset_of]["data_offsets"] = header[to]["data_offsets"]
        write_shard(folder / file, header, data)

    return apply


def twin_in_second_shard(folder: Path) -> None:
    header, data = read_shard(folder / SECOND)
    header[ATTN + "attn_sink"] = {"dtype": "F32", "shape": [8], "data_offsets": [len(data), len(data) + 32]}
    write_shard(folder / SECOND, header, bytes(data) + bytes(32))


def twice_in_one_header(folder: Path) -> None:
    header, data = read_shard(folder / FIRST)
    text = json.dumps(header)
    again = f'"{ATTN}attn_sink": {json.dumps(header[ATTN + "attn_sink"])}'
    write_shard(folder / FIRST, f"{text[:-1]}, {again}}}".encode(), data)


def drop_from_shard(name: str) -> Break:
    return rename(name, "unrelated", with_index=False)


def drop(name: str) -> Break:
    return rename(name, "unrelated")


def both(*changes: Break) -> Break:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


BF16_NAN, BF16_INF = b"\xc0\x7f", b"\x80\xff"
WQ_A, SCALE, NORM = ATTN + "wq_a.weight", ATTN + "wq_a.scale", ATTN + "q_norm.weight"
HUGE = 2**62

# what is broken: how, the error, and what its message names
BROKEN: dict[str, tuple[Break, type[Ds41Error], tuple[str, ...]]] = {
    # missing
    "weight missing": (drop(WQ_A), errors.MissingTensor, (WQ_A, "layer 2 (full, ratio 2) needs it")),
    "scale missing": (drop(SCALE), errors.MissingTensor, (SCALE, "wq_a.weight is stored as F8_E4M3")),
    "sink missing": (drop(ATTN + "attn_sink"), errors.MissingTensor, (ATTN + "attn_sink",)),
    "indexer missing": (
        drop(ATTN + "indexer.weights_proj.weight"), errors.MissingTensor, ("indexer.weights_proj", "layer 2"),
    ),
    "wgate missing at ratio 2": (
        drop(ATTN + "compressor.wgate.weight"),
        errors.MissingTensor, ("wgate.weight is missing", "softmax gate"),
    ),
    "listed, but not in its shard": (drop_from_shard(WQ_A), errors.MissingTensor, (FIRST, WQ_A, INDEX)),
    "a prefix that releases do not have": (
        rename(WQ_A, "model." + WQ_A), errors.MissingTensor, (f"'model.{WQ_A}' looks like it",),
    ),
    "a gate at ratio 1": (
        config(lambda c: c["text_config"].update(compress_ratios=[0, 0, 1, 1, 1, 1])),
        errors.UnexpectedTensor, ("compressor.wgate.weight is stored, but layer 2 (full, ratio 1)",),
    ),
    "a compressor on a layer that reuses": (
        config(lambda c: c["text_config"].update(
            kv_source_layer_ids=[4], index_source_layer_ids=[4, 5], compress_ratios=[0, 0, 0, 0, 1, 1])),
        errors.UnexpectedTensor, ("layers.2.attn.compressor.wkv.weight", "layer 2 (window, ratio 0)"),
    ),
    # shape and type
    "wrong shape": (
        restored(WQ_A, "F8_E4M3", [96, 128]), errors.WrongShape, (FIRST, WQ_A, "[96, 128]", "[96, 256]"),
    ),
    "transposed": (restored(WQ_A, "F8_E4M3", [256, 96]), errors.WrongShape, ("[256, 96]", "[96, 256]")),
    "wrong rank": (restored(NORM, "BF16", [96, 1]), errors.WrongShape, (NORM, "[96, 1]", "[96]")),
    "wrong scale shape": (
        entry(SCALE, shape=[8, 3]), errors.WrongShape, (SCALE, "[8, 3]", "[3, 8]", "32x32"),
    ),
    "config of another size": (
        config(lambda c: c["text_config"].update(hidden_size=512)),
        errors.WrongShape, ("[96, 256]", "[96, 512]"),
    ),
    "weight in F16": (
        restored(WQ_A, "F16", [96, 256]), errors.WrongDtype, (WQ_A, "'F16'", "F8_E4M3 or BF16"),
    ),
    "weight in a type nobody knows": (restored(WQ_A, "F3_NEW", [96, 256]), errors.WrongDtype, ("'F3_NEW'",)),
    "weight in BF16 in an fp8 checkpoint": (
        restored(WQ_A, "BF16", [96, 256]), errors.WrongDtype, (WQ_A, "stored as BF16", "linear='bf16'"),
    ),
    "e4m3 weights in a bf16 checkpoint": (
        config(lambda c: c.pop("quantization_config")),
        errors.WrongDtype, ("stored as F8_E4M3", "linear='bf16'"),
    ),
    "BF16 weight beside a scale": (
        both(restored(ATTN + "wo_a.weight", "BF16", [192, 128])),
        errors.WrongDtype, ("wo_a.weight", "has a scale"),
    ),
    "norm in F32": (restored(NORM, "F32", [96]), errors.WrongDtype, (NORM, "'F32'", "expects BF16")),
    "sink in BF16": (
        restored(ATTN + "attn_sink", "BF16", [8]), errors.WrongDtype, ("attn_sink", "expects F32"),
    ),
    "scale in U8": (entry(SCALE, dtype="U8"), errors.WrongDtype, (SCALE, "'U8'", "F8_E8M0")),
    # files
    "shard cut short": (raw(FIRST, lambda b: b[:-1]), errors.TruncatedFile, (FIRST, "copy the file again")),
    "shard cut in its header": (
        raw(FIRST, lambda b: b[:100]), errors.BadHeader, (FIRST, "beyond the file of 100"),
    ),
    "shard of seven bytes": (raw(FIRST, lambda b: b[:7]), errors.TruncatedFile, (FIRST, "7 bytes")),
    "empty shard": (raw(FIRST, lambda b: b""), errors.TruncatedFile, (FIRST, "0 bytes")),
    "shard with a tail": (raw(FIRST, lambda b: b + b"x"), errors.BadHeader, (FIRST, "trailing")),
    "header length beyond the file": (
        raw(FIRST, lambda b: (10**6).to_bytes(8, "little") + b[8:]),
        errors.BadHeader, ("length 1000000 is beyond",),
    ),
    "header length absurd": (
        raw(FIRST, lambda b: b"\xff" * 8 + b[8:]), errors.BadHeader, ("not a safetensors file",),
    ),
    "header not JSON": (raw(FIRST, lambda b: b[:8] + b"[" + b[9:]), errors.BadHeader, (FIRST, "not JSON")),
    "header of another kind": (
        lambda folder: write_shard(folder / FIRST, b'["a"]', b""), errors.BadHeader, ("top level is a list",),
    ),
    "header nested deeply": (
        lambda folder: write_shard(folder / FIRST, b'{"a":' * 99_999, b""), errors.BadHeader, ("too deeply",),
    ),
    "pickle instead of safetensors": (
        raw(FIRST, lambda b: b"PK\x03\x04" + bytes(500)), errors.BadHeader, (FIRST,),
    ),
    "shard is a directory": (
        shard_is_a_directory,
        errors.MissingShard, (FIRST, "absent"),
    ),
    # header entries
    "offsets and shape disagree": (
        entry(WQ_A, shape=[96, 255]), errors.BadHeader, (WQ_A, "24576 bytes", "24480"),
    ),
    "negative offset": (entry(WQ_A, data_offsets=[-1, 24575]), errors.BadHeader, (WQ_A, "not negative")),
    "offsets backwards": (entry(WQ_A, data_offsets=[9, 5]), errors.BadHeader, (WQ_A, "backwards")),
    "three offsets": (entry(WQ_A, data_offsets=[0, 1, 2]), errors.BadHeader, (WQ_A, "two offsets")),
    "offsets as text": (entry(WQ_A, data_offsets=["0", "1"]), errors.BadHeader, (WQ_A, "two offsets")),
    "offsets beyond the file": (
        entry(WQ_A, data_offsets=[HUGE, HUGE + 96 * 256]), errors.TruncatedFile, (WQ_A, "but the file has"),
    ),
    "offset beyond 64 bits": (entry(WQ_A, data_offsets=[0, 10**30]), errors.BadHeader, (WQ_A,)),
    "negative size": (entry(WQ_A, shape=[-96, 256]), errors.BadHeader, (WQ_A, "shape [-96, 256]")),
    "sizes whose product overflows": (entry(WQ_A, shape=[HUGE] * 30), errors.BadHeader, (WQ_A, "takes")),
    "a thousand axes": (entry(WQ_A, shape=[1] * 1000), errors.BadHeader, (WQ_A, "at most 32 sizes")),
    "size true": (entry(WQ_A, shape=[True, 256]), errors.BadHeader, (WQ_A, "shape")),
    "type a number": (entry(WQ_A, dtype=8), errors.BadHeader, (WQ_A, "dtype 8")),
    "entry a number": (
        lambda folder: write_shard(folder / FIRST, {"a": 1}, b""), errors.BadHeader, ("'a'", "entry 1"),
    ),
    "entry with a field too many": (entry(WQ_A, strides=[1]), errors.BadHeader, (WQ_A,)),
    "overlapping tensors": (
        move(FIRST, "layers.0.attn.attn_sink", "layers.1.attn.attn_sink"),
        errors.OverlappingTensors, ("attn_sink", "inside"),
    ),
    "overlapping without a hole": (
        entry("layers.0.attn.attn_sink", data_offsets=[0, 48], shape=[12]),
        errors.OverlappingTensors, ("layers.1.attn.attn_sink", "layers.0.attn.attn_sink"),
    ),
    "hole between tensors": (
        entry("layers.0.attn.attn_sink", data_offsets=[0, 16], shape=[4]),
        errors.BadHeader, ("expected no holes", "layers.1.attn.attn_sink"),
    ),
    "twice in one header": (
        twice_in_one_header, errors.DuplicateTensor, (FIRST, ATTN + "attn_sink", "twice"),
    ),
    "twice in two shards": (
        twin_in_second_shard, errors.DuplicateTensor, (ATTN + "attn_sink", FIRST, SECOND),
    ),
    "twice, no index": (
        both(twin_in_second_shard, remove(INDEX)),
        errors.DuplicateTensor, (ATTN + "attn_sink", FIRST, SECOND),
    ),
    # index
    "shard absent": (remove(FIRST), errors.MissingShard, (FIRST, INDEX)),
    "no shard at all": (
        remove(FIRST, SECOND, INDEX),
        errors.MissingShard, ("no *.safetensors",),
    ),
    "shard above the directory": (
        index(lambda m: m.update({WQ_A: "../" + FIRST})), errors.ShardOutsideDirectory, (INDEX, WQ_A, "../"),
    ),
    "shard above, on the way": (
        index(lambda m: m.update(unused="a/../../" + FIRST)), errors.ShardOutsideDirectory, ("unused",),
    ),
    "shard by absolute path": (
        index(lambda m: m.update({WQ_A: "/etc/passwd"})), errors.ShardOutsideDirectory, ("/etc/passwd",),
    ),
    "shard on a drive": (
        index(lambda m: m.update({WQ_A: "C:\\x.safetensors"})), errors.ShardOutsideDirectory, (WQ_A,),
    ),
    "shard above, other slashes": (
        index(lambda m: m.update({WQ_A: "..\\x.safetensors"})), errors.ShardOutsideDirectory, (WQ_A,),
    ),
    "shard with an endless name": (
        index(lambda m: m.update({WQ_A: "x" * 5000})), errors.MissingShard, ("absent",),
    ),
    "shard name a number": (index(lambda m: m.update({WQ_A: 3})), errors.BadIndex, (INDEX, WQ_A)),
    "shard name with a zero byte": (
        index(lambda m: m.update({WQ_A: "a\0b"})), errors.BadIndex, (INDEX, WQ_A),
    ),
    "index not JSON": (raw(INDEX, lambda b: b[:-5]), errors.BadIndex, (INDEX, "not JSON")),
    "index without a map": (raw(INDEX, lambda b: b"{}"), errors.BadIndex, (INDEX, "weight_map")),
    "index with a name twice": (
        raw(INDEX, lambda b: b.replace(b'"weight_map": {', b'"weight_map": {"layers.0.attn.wkv.scale": "",')),
        errors.BadIndex, (INDEX, "given twice"),
    ),
    # values
    "scale NaN": (stored_bytes(SCALE, 5, b"\xff"), errors.NonFiniteWeight, (FIRST, SCALE, "[0, 5]")),
    "scale out of all bounds": (stored_bytes(SCALE, 8, b"\xf7"), errors.NonFiniteWeight, (SCALE, "[1, 0]")),
    "weight NaN": (stored_bytes(WQ_A, 300, b"\x7f"), errors.NonFiniteWeight, (FIRST, WQ_A, "[1, 44]")),
    "weight minus NaN": (
        stored_bytes(WQ_A, 96 * 256 - 1, b"\xff"), errors.NonFiniteWeight, (WQ_A, "[95, 255]"),
    ),
    "norm NaN": (stored_bytes(NORM, 6, BF16_NAN), errors.NonFiniteWeight, (NORM, "[3]")),
    "norm infinite": (stored_bytes(NORM, 0, BF16_INF), errors.NonFiniteWeight, (NORM, "[0]")),
    "sink NaN": (
        stored_bytes(ATTN + "attn_sink", 8, f32(np.nan)), errors.NonFiniteWeight, ("attn_sink", "[2]"),
    ),
    "sink infinite": (
        stored_bytes(ATTN + "attn_sink", 0, f32(-np.inf)), errors.NonFiniteWeight, ("attn_sink",),
    ),
    "compressor NaN": (
        stored_bytes(ATTN + "compressor.wkv.weight", 514, BF16_NAN),
        errors.NonFiniteWeight, ("wkv", "[1, 1]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken(case: str, folder: Path) -> None:
    change, error, named = BROKEN[case]
    change(folder)
    with pytest.raises(Ds41Error) as caught:
        load_checkpoint(folder)
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert all(part in message for part in named), message
    assert len(message) < 1000
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None


def test_the_table_is_not_vacuous(folder: Path) -> None:
    """The copy that every case breaks loads as it is, and so does a rewritten shard."""
    header, data = read_shard(folder / FIRST)
    write_shard(folder / FIRST, header, data)
    assert len(load_checkpoint(folder).weights) == 102  # two more than tensors for each of six layers: codes of wo_a
    assert len(BROKEN) > 25


def test_values_may_be_left_unread(folder: Path) -> None:
    """Without the scan a NaN passes in fp8, but the conversion to bf16 still names it."""
    stored_bytes(WQ_A, 300, b"\x7f")(folder)
    assert load_checkpoint(folder, verify_values=False).weights[WQ_A][1, 44] == 0x7F
    lazy = load_checkpoint(folder, linear="bf16", verify_values=False)
    with pytest.raises(errors.NonFiniteWeight, match=f"{FIRST}: tensor {WQ_A}: weight times scale"):
        lazy.weights[WQ_A]
