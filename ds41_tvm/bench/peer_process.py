"""The other side of `bench.peer`: ``python -m ds41_tvm.bench.peer_process`` reads what to build, then requests."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from ds41_tvm.bench.peer import Build, Reply, Request
from ds41_tvm.errors import UsageError


def build(message: Build) -> tuple[Any, str]:
    """The contestant, and the name and version of its library."""
    from ds41_tvm.bench.weights import RandomWeights
    from ds41_tvm.config import AttentionConfig

    config = AttentionConfig.from_dict(message.config)
    weights = RandomWeights(config, message.layers, "bf16")
    if message.peer == "onnxruntime":
        from ds41_tvm.bench.onnx_peer import Onnx

        contestant: Any = Onnx(config, weights, message.layers, message.threads)
        import onnxruntime as library
    else:
        from ds41_tvm.bench.torch_peer import Torch

        contestant = Torch(config, weights, message.layers, message.peer, message.threads, message.longest)  # type: ignore[arg-type]
        import torch as library
    return contestant, f"{library.__name__} {library.__version__}"


def main() -> None:
    """Answer every line of standard input on what was standard output, until it ends."""
    # Libraries may print; that must not look like an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    contestant: Any = None
    for line in sys.stdin.buffer:
        try:
            if contestant is None:
                contestant, value = build(msgspec.json.decode(line, type=Build))
            else:
                request = msgspec.json.decode(line, type=Request)
                value = getattr(contestant, request.method)(**request.arguments)
            reply = Reply(value)
        except Exception as error:  # noqa: BLE001 - told to the other side, which raises
            reply = Reply(error=f"{type(error).__name__}: {error}", refused=isinstance(error, UsageError))
        answers.write(msgspec.json.encode(reply) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
