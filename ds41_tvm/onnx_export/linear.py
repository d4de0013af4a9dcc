"""Linear layers: y = x @ w.T."""

from __future__ import annotations

from onnx import TensorProto

from ds41_tvm.numerics.formats import WEIGHT_BLOCK
from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import DECODE_E4M3, DECODE_E8M0, define, round_bf16
from ds41_tvm.onnx_export.quantize import round_trip


@define("LinearF32", "x w", "y", "x @ w.T with an f32 result; w [out, in] in bf16 or f32.")
def linear_f32(b: Body, x: str, w: str) -> str:
    return b.op("MatMul", x, b.op("Transpose", b.cast(w, TensorProto.FLOAT), perm=[1, 0]))


@define("Linear", "x w", "y", "bf16(x @ w.T), accumulated in f32; w [out, in] in bf16 or f32.")
def linear(b: Body, x: str, w: str) -> str:
    return b.call(round_bf16, b.call(linear_f32, x, w))  # type: ignore[no-any-return]


def dequantize_weight(rows: int, columns: int) -> Function:
    """e4m3 codes [out, in] and e8m0 scales, one per 32x32 block -> f32 [out, in], exact."""
    down, across = -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)

    @define(
        f"DequantizeWeight{rows}x{columns}",
        "codes scales",
        "w",
        "e4m3 codes with one e8m0 scale per 32x32 block -> f32.",
    )
    def made(b: Body, codes: str, scales: str) -> str:
        scale = b.op("Reshape", b.call(DECODE_E8M0, scales), b.i64([down, 1, across, 1]))
        blocks = b.op("Expand", scale, b.i64([down, WEIGHT_BLOCK, across, WEIGHT_BLOCK]))
        full = b.op("Reshape", blocks, b.i64([down * WEIGHT_BLOCK, across * WEIGHT_BLOCK]))
        cut = b.op("Slice", full, b.i64([0, 0]), b.i64([rows, columns]))
        return b.op("Mul", b.call(DECODE_E4M3, codes), cut)

    return made


def linear_fp8(rows: int, columns: int) -> Function:
    """bf16(q(x) @ w.T): q the window-row quantiser (e4m3, block 32), w e4m3 codes with e8m0 scales."""

    @define(
        f"LinearFp8_{rows}x{columns}",
        "x codes scales",
        "y",
        "bf16(q(x) @ w.T): q to e4m3 and back, w e4m3 in 32x32 blocks.",
    )
    def made(b: Body, x: str, codes: str, scales: str) -> str:
        rounded = b.call(round_trip("window", columns), x)
        weight = b.call(dequantize_weight(rows, columns), codes, scales)
        return b.call(linear, rounded, weight)  # type: ignore[no-any-return]

    return made
