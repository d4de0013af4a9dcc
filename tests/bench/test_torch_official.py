"""The torch form against the golden values: a yardstick must itself be right."""

import json
from pathlib import Path

import numpy as np
import pytest

from ds41_tvm.checkpoint import load_checkpoint, random_input, synthetic_weights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError, InputError, StepError
from ds41_tvm.numerics.formats import bf16_decode

pytestmark = pytest.mark.torch

GOLDEN = Path(__file__).parents[1] / "golden"
CACHES = {"window_cache": "window_cache", "latent_cache": "compress_kv_cache", "key_cache": "index_k_cache"}
VARIANTS = ["torch", "torch-mv", "torch-f32"]


def case(name):
    arrays = dict(np.load(GOLDEN / f"{name}.npz"))
    meta = json.loads(bytes(arrays.pop("meta")))
    return meta, AttentionConfig.from_dict(meta["config"]), arrays


def distance(got, want):
    """Relative Frobenius distance of two bf16 arrays; masked scores must agree in place."""
    a, b = bf16_decode(got).astype(np.float64), bf16_decode(want).astype(np.float64)
    masked = np.isneginf(b)
    assert np.array_equal(np.isneginf(a), masked)
    a, b = np.where(masked, 0, a), np.where(masked, 0, b)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def same_sets(got, want):
    return all(set(a) - {-1} == set(b) - {-1} for a, b in zip(got, want, strict=True))


def selected(trace, role, consumer):
    """Indices into window rows then latents, as the golden files number them."""
    window = trace["window_idx"].numpy()
    if role.ratio == 0:
        return window
    chosen = consumer.index_source.selection.numpy()
    return np.concatenate((window, np.where(chosen < 0, -1, chosen + trace["window_rows"].shape[1])), axis=-1)


def compare(meta, config, arrays, layer, step, trace, attention):
    from ds41_tvm.bench.torch_official import to_bits

    compared = 0
    for what, value in trace.items():
        want = arrays.get(f"{what}.{layer}.{step}")
        if want is None:
            continue
        compared += 1
        if what == "candidates":
            assert np.array_equal(np.packbits(value.numpy(), axis=-1), want), (what, layer, step)
            continue
        got = to_bits(value)[:, -want.shape[1] :]
        bound = max(4 * meta["spread"].get(what, 0), 2e-3)
        assert distance(got, want) <= bound, (what, layer, step)
    idx = arrays[f"idx.{layer}.{step}"]
    got = selected(trace, config.role(layer), attention)[:, -idx.shape[1] :]
    assert same_sets(got.reshape(-1, got.shape[-1]), idx.reshape(-1, idx.shape[-1])), ("idx", layer, step)
    return compared


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name", ["tiny_prefill12_decode2", "tiny_batch2", "tiny_token_by_token", "mid_prefill150_decode10"]
)
def test_golden(name, variant):
    from ds41_tvm.bench.torch_official import TorchOfficial, to_bits, to_torch

    meta, config, arrays = case(name)
    model = TorchOfficial(config, synthetic_weights(config, meta["seed"]), variant=variant)
    position = compared = 0
    for step, tokens in enumerate(meta["steps"]):
        for layer in model.layers:
            x = random_input(meta["seed"], layer, step, meta["batch"], tokens, config.dim)
            trace = {}
            model.forward(layer, to_torch(x), position, trace)
            compared += compare(meta, config, arrays, layer, step, trace, model.attentions[layer])
        position += tokens
    assert compared >= len(meta["steps"]) * config.n_layers
    for layer, attention in model.attentions.items():
        for mine, theirs in CACHES.items():
            if f"{theirs}.{layer}" in arrays:
                assert distance(to_bits(getattr(attention, mine)), arrays[f"{theirs}.{layer}"]) <= 8e-3


def test_fp8_checkpoint():
    from ds41_tvm.bench.torch_official import TorchOfficial, to_torch

    meta, config, arrays = case("checkpoint_mid_fp8")
    checkpoint = load_checkpoint(GOLDEN / "checkpoint_mid_fp8")
    model = TorchOfficial(config, checkpoint.weights, linear="fp8")
    position = 0
    for step, tokens in enumerate(meta["steps"]):
        for layer in model.layers:
            x = random_input(meta["seed"], layer, step, meta["batch"], tokens, config.dim)
            trace = {}
            model.forward(layer, to_torch(x), position, trace)
            compare(meta, config, arrays, layer, step, trace, model.attentions[layer])
        position += tokens


@pytest.fixture(scope="module")
def tiny():
    from ds41_tvm.bench.torch_official import TorchOfficial

    config = AttentionConfig.preset("tiny")
    return config, lambda **more: TorchOfficial(config, synthetic_weights(config, "t"), **more)


def test_query_chunks_do_not_change_the_result(tiny, monkeypatch):
    import torch

    from ds41_tvm.bench import torch_attention, torch_official

    config, make = tiny
    results = []
    for chunk in (5, 1000):
        monkeypatch.setattr(torch_attention, "QUERY_CHUNK", chunk)
        model = make()
        outs = [
            model.forward(layer, torch_official.to_torch(random_input("t", layer, 0, 1, 33, config.dim)), 0)
            for layer in model.layers
        ]
        results.append(torch.stack(outs).float())
    assert torch.allclose(*results, rtol=2e-2, atol=1e-3)


def test_refuses_what_the_official_form_does_not_have(tiny):
    import torch

    config, make = tiny
    model = make()
    x = torch.zeros(1, 2, config.dim, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="one token a call"):
        model.forward(0, x, 3)
    with pytest.raises(InputError, match="max_seq_len"):
        model.forward(0, x[:, :1], config.max_seq_len)
    reuse = next(role.layer for role in config.roles if role.kind == "reuse")
    with pytest.raises(StepError, match=f"layer {reuse} was called before"):
        model.forward(reuse, x, 0)
    with pytest.raises(ConfigError, match="missing"):
        make(layers=[reuse])


def test_bits_round_trip_and_other_dtypes_are_refused():
    from ds41_tvm.bench.torch_official import to_bits, to_torch

    bits = np.arange(0, 65536, 7, dtype=np.uint16)
    assert np.array_equal(to_bits(to_torch(bits)), bits)
    with pytest.raises(InputError, match="float64"):
        to_torch(np.zeros(3))
