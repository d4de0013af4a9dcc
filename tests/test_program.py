"""Which kernels layers need."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError
from ds41_tvm.program import Kernel, Program, kernel
from ds41_tvm.target import parse_target

CONFIG = AttentionConfig.preset("tiny")


def program(target: str = "cpu:x86-64-v3", **changes: Any) -> Program:
    return Program(**{"config": CONFIG, "layers": tuple(range(6)), "target": parse_target(target)} | changes)


def ops(p: Program) -> set[str]:
    return {k.op for k in p.kernels()}


def test_names_are_symbols_and_unique() -> None:
    for p in (program(), program(linear="fp8"), program(ties="torch-cpu"), program("cpu:x86-64-v4+amx")):
        names = [k.name for k in p.kernels()]
        assert len(set(names)) == len(names)
        assert all(name.isidentifier() for name in names)
    assert kernel("rms_norm", dim=7, eps=1e-20).name == "rms_norm__dim_7__eps_1em20"


def test_layers_ask_for_what_their_role_needs() -> None:
    window = ops(program(layers=(0,)))
    assert window == {"linear", "rms_norm", "rope", "pack_rows", "copy_rows", "sparse_attention"}
    assert ops(program(layers=(2,))) - window == {
        "pool_groups", "scale_weights", "index_scores", "topk_lowest_index",
    }  # fmt: skip
    assert "pool_groups" not in ops(program(layers=(4,)))
    assert "block_scores" in ops(program(layers=(4,)))
    assert "block_scores" not in ops(program(layers=(2, 3)))
    assert "quantize_activation" in ops(program(linear="fp8"))
    assert "topk_torch_cpu" in ops(program(ties="torch-cpu"))
    assert "topk_lowest_index" not in ops(program(ties="torch-cpu"))


def test_linear_layers_by_role_and_mode() -> None:
    p = program(linear="fp8", pooling="f32")
    full, one, reuse = (p.linears(CONFIG.role(layer)) for layer in (2, 4, 3))
    assert set(reuse) == {"wq_a", "wq_b", "wkv", "wo_a", "wo_b"}
    assert set(full) - set(reuse) == {
        "compressor.wkv", "compressor.wgate", "indexer.wk", "indexer.wq_b", "indexer.weights_proj",
    }  # fmt: skip
    assert set(one) == set(full) - {"compressor.wgate"}
    assert {name for name, linear in full.items() if linear.weight == "fp8"} == {
        "wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b",
    }  # fmt: skip
    assert full["compressor.wkv"].weight == "f32"
    assert full["compressor.wkv"].out == "f32"
    assert one["compressor.wkv"].weight == "bf16"
    assert one["compressor.wkv"].out == "bf16"
    assert full["wo_a"].groups == CONFIG.o_groups
    for linear in full.values():
        assert linear.n // linear.groups % linear.tile == 0


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4+amx"])
def test_a_token_is_summed_in_one_way(target: str) -> None:
    """The one-row kernel and the many-row kernel of a layer differ in nothing but the rows."""
    for role in CONFIG.roles:
        for linear in program(target).linears(role).values():
            kernels = linear.kernels()
            assert 1 in kernels
            assert len({(k.op, tuple(p for p in k.params if p[0] != "rows")) for k in kernels.values()}) == 1


def test_heads_are_shared_out_where_a_block_has_little_memory() -> None:
    flash = AttentionConfig.preset("flash")
    for target, splits in (("cuda:sm_90", (1, 2, 8)), ("cuda:sm_86", (2, 8)), ("cuda:sm_120", (2, 8))):
        p = program(target, config=flash, layers=(0,))
        assert p.splits() == splits
        assert tuple(sorted(dict(k.params)["split"] for k in p.kernels() if k.op == "sparse_attention")) == splits
    one_head = msgspec.structs.replace(CONFIG, n_heads=1, o_groups=1)
    assert program("cuda:sm_86", config=one_head).splits() == (1,)


@pytest.mark.parametrize(
    "change",
    [{"block_rows": 0}, {"block_rows": 2.0}, {"draft": -1}, {"draft": "4"}, {"ties": "first"}, {"ties": None}],
)
def test_impossible_choices(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        program(**change)


def test_kernels_travel_as_data() -> None:
    for k in program().kernels():
        assert msgspec.json.decode(msgspec.json.encode(k), type=Kernel) == k
