"""Where the time of a step goes: its layers' kernels, and the rest, which is Python's."""

from __future__ import annotations

import msgspec

from ds41_tvm.bench.ours import Ours


class Part(msgspec.Struct, frozen=True):
    """A kernel of a layer (``-``: what no kernel takes): calls and seconds a step, share of the layer."""

    layer: int
    kernel: str
    calls: int
    seconds: float
    share: float


def profile(ours: Ours, context: int, tokens: int, steps: int) -> list[Part]:
    """The parts of each layer in a step of `tokens` tokens that ends at `context`, longest first.

    Of `steps` steps (one more warms up) the one counts, layer by layer, in which the layer took its median time.
    """
    turns = [ours.kernels(context, tokens) for _ in range(steps + 1)][1:]
    out = []
    for layer in ours.layers:
        noted, timing = sorted(turns, key=lambda turn: turn[1].layers[layer])[(len(turns) - 1) // 2]
        total = timing.layers[layer]
        took: dict[str, list[float]] = {}
        for call in noted:
            if call.layer == layer:
                took.setdefault(call.kernel.name, []).extend(call.seconds)
        parts = [Part(layer, name, len(times), sum(times), sum(times) / total) for name, times in took.items()]
        rest = total - sum(part.seconds for part in parts)
        out += sorted([*parts, Part(layer, "-", 0, rest, rest / total)], key=lambda part: -part.seconds)
    return out
