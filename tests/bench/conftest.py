"""One small contestant for several test files: its kernels are compiled once."""

from __future__ import annotations

import msgspec
import pytest

from ds41_tvm.bench.weights import RandomWeights
from ds41_tvm.config import AttentionConfig
from ds41_tvm.target import parse_target


@pytest.fixture(scope="session")
def tiny():
    return msgspec.structs.replace(AttentionConfig.preset("tiny"), max_seq_len=4096)


@pytest.fixture(scope="session")
def ours(tiny):
    from ds41_tvm.bench.ours import Ours

    return Ours(tiny, RandomWeights(tiny, range(6), "bf16"), None, parse_target("cpu"), "bf16", None, 32)
