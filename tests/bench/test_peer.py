"""Contestants in processes of their own."""

from __future__ import annotations

import msgspec
import pytest

from ds41_tvm.bench.peer import Build, Peer, peer_names
from ds41_tvm.bench.work import attended
from ds41_tvm.errors import PeerError, UsageError

LAYERS = (0, 2, 3, 4, 5)


def start(config, name, isa="host"):
    return Peer(Build(name, msgspec.to_builtins(config), LAYERS, 1, 64), isa)


def test_names():
    assert peer_names("torch, torch-f32,torch") == ("torch", "torch-f32")
    assert peer_names("none") == ()
    with pytest.raises(UsageError, match="'jax' is unknown; expected peers among torch"):
        peer_names("torch,jax")


def test_onnxruntime(tiny):
    with start(tiny, "onnxruntime") as peer:
        assert peer.version.startswith("onnxruntime ")
        for timing in (peer.prefill(9, 4), (peer.prepare(40, 2), peer.decode())[1], peer.decode()):
            assert set(timing.layers) == set(LAYERS)
            assert min(timing.layers.values()) > 0
        assert peer.single("topk", {"n": 1, "width": 100, "k": 5}, 2) == []
        assert peer.memory()["peak"] > 1 << 24


def test_a_peer_that_fails_says_why_and_one_that_ends_is_told(tiny):
    with start(tiny, "onnxruntime") as peer:
        with pytest.raises(PeerError, match="onnxruntime: "):
            peer.prepare(-5, 1)
        assert set(peer.prefill(3, 3).layers) == set(LAYERS)  # it still answers
        peer._process.kill()
        with pytest.raises(PeerError, match="onnxruntime ended .*killed"):
            peer.decode()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["torch", "torch-mv", "torch-f32"])
def test_torch(tiny, name):
    with start(tiny, name, "avx2") as peer:
        assert peer.version.startswith("torch ")
        for timing in (peer.prefill(9, 4), (peer.prepare(41, 3), peer.decode())[1], peer.decode()):
            assert set(timing.layers) == set(LAYERS)
        for what, sizes in (
            ("topk", {"n": 1, "width": 100, "k": 5}),
            ("scores", {"n": 1, "positions": 50}),
            ("attention", {"n": 1, "rows": 8, "latents": 50}),
            ("attention", {"n": 9, "rows": 8, "latents": 9}),
            ("attention", {"n": 1, "rows": 8, "latents": 0}),
            ("gemm", {"m": 3, "n": 4, "k": 5}),
            ("launch", {}),
        ):
            assert len(peer.single(what, sizes, 3)) == 3


@pytest.mark.torch
def test_torch_decodes_over_filled_caches_as_the_official_form_does_after_a_prompt(tiny):
    """The step after `prepare` reads all of the context: masks nothing, and selects among all groups."""
    from ds41_tvm.bench.torch_peer import Torch
    from ds41_tvm.bench.weights import RandomWeights

    peer = Torch(tiny, RandomWeights(tiny, LAYERS, "bf16"), LAYERS, "torch", 1, 200)
    peer.prepare(200, 2)
    peer.decode()
    for layer, attention in peer.model.attentions.items():
        role = tiny.role(layer)
        if role.ratio:
            chosen = attention.index_source.selection
            assert chosen.shape == (2, 1, tiny.index_topk)
            assert (chosen >= 0).all()
            assert chosen.max() >= 100 // role.ratio  # far beyond the window and the first rows
        if role.kind == "full":
            rows = 200 // role.ratio
            assert (attention.latent_cache[:, :rows].float().abs().amax(-1) > 0).all()
            assert attention.latent_cache.shape[1] >= rows
    assert attended(tiny, tiny.role(2), 199, 1).flops == 4 * tiny.n_heads * tiny.head_dim * (
        tiny.window_size + tiny.index_topk
    )


@pytest.mark.torch
def test_joining_all_rows_does_not_change_attention():
    import torch

    from ds41_tvm.bench.torch_attention import sparse_attention

    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 3, 16, generator=g).bfloat16()
    sources = [
        (torch.randn(2, n, 16, generator=g).bfloat16(), torch.randint(-1, n, (2, 1, 5), generator=g)) for n in (8, 40)
    ]
    sink = torch.randn(3, generator=g)
    assert torch.equal(sparse_attention(q, sources, sink, 0.25, True), sparse_attention(q, sources, sink, 0.25, False))
