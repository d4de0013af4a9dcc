"""Compressor: `ratio` consecutive tokens become one latent row."""

from __future__ import annotations

from ds41_tvm.onnx_export.builder import END, Body, Function
from ds41_tvm.onnx_export.formats import define, round_bf16


def split_groups(ratio: int) -> Function:
    """members f32 [batch, n, 2, D] -> complete groups' kv and gate [batch, n // ratio, ratio, D], and what is left."""

    @define(
        f"SplitGroups{ratio}",
        "members",
        "kv gate rest",
        f"The members (kv, gate) of complete groups of {ratio}, and those of the unfinished one.",
    )
    def made(b: Body, members: str) -> list[str]:
        groups = b.op("Div", b.size(members, 1), b.i64([ratio]))
        end = b.op("Mul", groups, b.i64([ratio]))
        complete = b.slice(members, b.i64([0]), end, 1)
        rest = b.slice(members, end, b.i64([END]), 1)
        parts = b.ops("Split", complete, b.i64([1, 1]), outputs=2, axis=2)
        dim = b.size(members, 3)
        shape = b.op("Concat", b.size(members, 0), groups, b.i64([ratio]), dim, axis=0)
        # A group count of 0 means "as in the input", whose length is then 0 too.
        return [*(b.op("Reshape", part, shape) for part in parts), rest]

    return made


def pool_groups(ratio: int) -> Function:
    """y = bf16(sum_m softmax_m(gate) * kv) over the members m of a group: [batch, groups, ratio, D] -> [.., D].

    Sums run over the members by position.
    """

    @define(f"PoolGroups{ratio}", "kv gate", "y", "bf16(sum over the members of softmax(gate) * kv), per channel.")
    def made(b: Body, kv: str, gate: str) -> str:
        weight = b.op("Exp", b.op("Sub", gate, b.reduce("ReduceMax", gate, 2)))
        weight = b.op("Div", weight, _sum_members(b, weight))
        total = _sum_members(b, b.op("Mul", kv, weight))
        return b.call(round_bf16, b.op("Squeeze", total, b.i64([2])))  # type: ignore[no-any-return]

    def _sum_members(b: Body, x: str) -> str:
        return b.op("Sum", *b.ops("Split", x, b.i64([1] * ratio), outputs=ratio, axis=2))

    return made
