"""Operations and bytes of a layer at released sizes, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from ds41_tvm.bench import work
from ds41_tvm.config import AttentionConfig

FLASH = AttentionConfig.preset("flash")
# Products of one token: wq_a, wq_b, wkv, wo_a, wo_b.
EVERY = 5120 * 1280 + 1280 * 32768 + 5120 * 512 + 8 * 4096 * 1024 + 8192 * 5120
INDEXER = 1280 * 4096 + 5120 * 32


def layer(number, start, count, linear="bf16", batch=1):
    return work.layer(FLASH, FLASH.role(number), linear, [(start, count)] * batch)


def test_every_layer_has_the_same_weights_and_sources_some_more():
    assert EVERY == 126_615_552  # 254 MB in bf16
    assert work.weights(FLASH, FLASH.role(0), "bf16", 1).flops == 2 * EVERY
    assert work.weights(FLASH, FLASH.role(24), "bf16", 1).flops == 2 * (EVERY + INDEXER)
    assert work.weights(FLASH, FLASH.role(20), "bf16", 1).flops == 2 * (EVERY + INDEXER + 5120 * 512 + 512 * 128)
    # A key is made for two tokens together at ratio 2.
    assert work.weights(FLASH, FLASH.role(2), "bf16", 2).flops == 2 * (
        2 * (EVERY + INDEXER + 2 * 5120 * 512) + 512 * 128
    )


def test_weight_bytes_of_a_token():
    assert work.weights(FLASH, FLASH.role(0), "bf16", 1).bytes == 2 * EVERY == pytest.approx(254e6, rel=0.005)
    scales = sum(n // 32 * (k // 32) for n, k in work.linear_sizes(FLASH, FLASH.role(0)).values())
    assert work.weights(FLASH, FLASH.role(0), "fp8", 1).bytes == EVERY + scales == pytest.approx(127e6, rel=0.005)
    assert work.weights(FLASH, FLASH.role(0), "fp8", 16).bytes == EVERY + scales  # once, however many rows


def test_prefill_of_1024_tokens_of_a_source_of_ratio_2():
    made = layer(2, 0, 1024)
    assert made.flops + made.dots == pytest.approx(350e9, rel=0.06)
    products = 1024 * 2 * (EVERY + INDEXER + 2 * 5120 * 512) + 512 * 2 * 512 * 128
    window = sum(min(t + 1, 128) for t in range(1024))
    latents = sum((t + 1) // 2 for t in range(1024))  # never more than index_topk
    assert made.flops == products + 4 * 64 * 512 * (window + latents)
    assert made.dots == 2 * 32 * 128 * latents
    assert made.bytes == work.weights(FLASH, FLASH.role(2), "bf16", 1).bytes  # nothing was cached before


def test_a_decode_step_reads_weights_window_chosen_latents_and_keys():
    weights = {n: work.weights(FLASH, FLASH.role(n), "bf16", 1).bytes for n in (0, 2, 20, 24, 25)}
    read = {n: layer(n, 131071, 1).bytes - weights[n] for n in weights}
    window, chosen = 128 * 528, 512 * 288
    assert read[0] == window
    assert read[25] == window + chosen
    assert read[2] == window + chosen + 65535 * 68
    assert read[20] == window + chosen + 131071 * 68
    assert read[24] == window + chosen + 2048 * 8 * 68  # its candidates only, whatever the context
    assert layer(24, (1 << 20) - 1, 1).dots == layer(24, 131071, 1).dots == 2 * 32 * 128 * 2048 * 8
    assert layer(20, 131071, 1).dots == 2 * 32 * 128 * 131072


def test_chunks_of_a_prompt_add_up():
    whole = layer(20, 0, 1024)
    parts = [layer(20, first, 256) for first in range(0, 1024, 256)]
    assert sum(p.flops for p in parts) == whole.flops
    assert sum(p.dots for p in parts) == whole.dots
    assert layer(20, 1023, 1, batch=16).flops == 16 * layer(20, 1023, 1).flops


def test_the_floor_is_the_limit_that_binds():
    limits = {"read": 10.0, "fma": 100.0}
    assert work.floor(work.Work(200.0, 0.0, 50.0), limits) == work.Floor(5.0, "read")
    assert work.floor(work.Work(700.0, 300.0, 50.0), limits) == work.Floor(10.0, "compute")
    with_tiles = limits | {"amx": 700.0, "vnni": 100.0}
    assert work.floor(work.Work(700.0, 300.0, 1.0), with_tiles) == work.Floor(4.0, "compute")
