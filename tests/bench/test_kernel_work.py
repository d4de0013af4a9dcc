"""What kernels of released sizes move and compute, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ds41_tvm.bench import work
from ds41_tvm.bench.kernel_work import Call, calls
from ds41_tvm.bench.work import Work
from ds41_tvm.config import AttentionConfig
from ds41_tvm.program import Program
from ds41_tvm.target import parse_target

FLASH = AttentionConfig.preset("flash")
TARGET = parse_target("cuda:sm_90")


def made(layer: int, start: int, count: int, **options: Any) -> list[Call]:
    program = Program(config=FLASH, layers=(layer,), target=TARGET, **options)
    return list(calls(program, layer, start, count, 132))


def find(found: list[Call], begin: str) -> Work:
    (work,) = {call.work for call in found if call.kernel.startswith(begin)}
    return work


def test_linear_layers() -> None:
    one, many = made(0, 1023, 1), made(0, 0, 1024)
    wq_b = 32768 * 1280
    assert find(one, "linear__n_32768__k_1280") == Work(2 * wq_b, 0, 2 * wq_b + 2 * 1280 + 2 * 32768)
    assert find(many, "linear__n_32768__k_1280") == Work(2048 * wq_b, 0, 2 * wq_b + 2048 * (1280 + 32768))
    wo_a = 8 * 1024 * 4096  # eight groups of 4,096 inputs
    assert find(one, "linear__n_8192__k_4096__groups_8") == Work(2 * wo_a, 0, 2 * wo_a + 2 * 8 * 4096 + 2 * 8192)
    fp8 = made(2, 1023, 1, linear="fp8", pooling="f32")
    assert find(fp8, "linear__n_32768__k_1280").bytes == wq_b + 1024 * 40 + 2 * 1280 + 2 * 32768
    assert find(fp8, "linear__n_512__k_5120__groups_1__weight_f32") == Work(
        2 * 512 * 5120, 0, 4 * 512 * 5120 + 2 * 5120 + 4 * 512
    )
    assert find(fp8, "quantize_activation__dim_8192").bytes == 4 * 8192


def test_attention() -> None:
    rows = 4 * 64 * 512 + 528 + 8 + 4 * 64  # q, o, its own row, position and sequence, sinks
    at = made(20, 131071, 1)
    assert find(at, "sparse_attention") == Work(4 * 64 * 512 * 640, 0, 128 * 528 + 512 * 288 + rows + 4 * 512)
    assert find(made(0, 131071, 1), "sparse_attention") == Work(4 * 64 * 512 * 128, 0, 128 * 528 + rows)
    assert [c.kernel[-7:] for c in at if c.kernel.startswith("sparse")] == ["split_8"]
    assert [c.kernel[-7:] for c in made(0, 0, 1024) if c.kernel.startswith("sparse")] == ["split_1"]


def test_selection() -> None:
    at = made(20, 131071, 1)
    assert find(at, "index_scores") == Work(0, 2 * 32 * 128 * 131072, 131071 * 68 + 32 * (68 + 2) + 2 * 131072)
    assert find(at, "topk_lowest_index__k_512").bytes == 2 * 131072 + 4 * 513
    assert find(at, "block_scores").bytes == 2 * 131072 + 2 * 16384 + 4
    assert find(at, "topk_lowest_index__k_2048").bytes == 2 * 16384 + 4 * 2049
    restricted = made(24, 131071, 1)
    pairs = 2048 * 8
    assert find(restricted, "index_scores") == Work(
        0, 2 * 32 * 128 * pairs, pairs * 68 + 32 * (68 + 2) + 4 * 2048 + 2 * pairs
    )
    assert find(restricted, "candidate_limit").bytes == 4 * 2048 + 8
    assert find(restricted, "topk_lowest_index").bytes == 2 * pairs + 4 * 513 + 4 * 2048


def test_row_kernels() -> None:
    at = made(2, 0, 1024)  # 512 groups of two
    assert find(at, "rope__heads_64__dim_512__rope_dim_64__inverse_1").bytes == 1024 * (4 * 64 * 512 + 32 * 8)
    assert find(at, "pool_groups").bytes == 512 * (2 * 2 * 512 * 4 + 2 * 8 + 2 * 512)
    assert find(at, "pack_rows__kind_latent").bytes == 512 * (2 * 512 + 288 + 8)
    assert find(at, "rms_norm__dim_1280").bytes == 1024 * 4 * 1280 + 2 * 1280
    assert find(at, "copy_rows__size_528").bytes == 192 * (2 * 528 + 16)  # what the ring holds
    assert find(at, "copy_rows__size_2048").bytes == 66 * (2 * 2048 + 16)
    assert len(made(2, 1024, 1)) == len(made(2, 1023, 1)) - 8  # no group completes


@pytest.mark.parametrize("layer", [0, 2, 3, 20, 24, 25])
@pytest.mark.parametrize("start", [0, 4096])
def test_kernels_together_compute_what_the_layer_does(layer: int, start: int) -> None:
    whole = work.layer(FLASH, FLASH.role(layer), "bf16", [(start, 256)])
    total = sum((call.work for call in made(layer, start, 256)), Work())
    assert (total.flops, total.dots) == (whole.flops, whole.dots)
    assert total.bytes > whole.bytes
