"""Output projection: the grouped ``wo_a``; ``wo_b`` is a plain linear layer."""

from __future__ import annotations

from onnx import TensorProto

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import define, round_bf16


def output_groups(groups: int, rank: int, width: int) -> Function:
    """o [batch, tokens, heads, D], wo_a [groups * rank, width] -> f32 [batch, tokens, groups * rank]."""

    @define("OutputGroups", "o wo_a", "y", f"Each of {groups} runs of heads through its own {rank} rows of wo_a; bf16.")
    def made(b: Body, o: str, wo_a: str) -> str:
        weight = b.op("Reshape", b.cast(wo_a, TensorProto.FLOAT), b.i64([groups, rank, width]))
        grouped = b.op("Reshape", o, b.i64([0, 0, groups, width]))
        by_group = b.op("Transpose", grouped, perm=[0, 2, 1, 3])
        product = b.op("MatMul", by_group, b.op("Transpose", weight, perm=[0, 2, 1]))
        rows = b.op("Transpose", b.call(round_bf16, product), perm=[0, 2, 1, 3])
        return b.op("Reshape", rows, b.i64([0, 0, groups * rank]))

    return made
