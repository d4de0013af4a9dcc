"""Linear layers: y = x @ w.T."""

from __future__ import annotations

from onnx import TensorProto

from ds41_tvm.numerics.formats import WEIGHT_BLOCK
from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import DECODE_E4M3, DECODE_E8M0, define, round_bf16
from ds41_tvm.onnx_export.quantize import round_trip


@define("LinearF32", "x w", "y", "x @ w.T summed in f64 and rounded to f32; w [out, in] in bf16 or f32.")
def linear_f32(b: Body, x: str, w: str) -> str:
    weight = b.op("Transpose", b.cast(w, TensorProto.DOUBLE), perm=[1, 0])
    return b.cast(b.op("MatMul", b.cast(x, TensorProto.DOUBLE), weight), TensorProto.FLOAT)


@define("Linear", "x w", "y", "bf16(x @ w.T), summed in f32; w [out, in] in bf16 or f32.")
def linear(b: Body, x: str, w: str) -> str:
    product = b.op("MatMul", x, b.op("Transpose", b.cast(w, TensorProto.FLOAT), perm=[1, 0]))
    return b.call(round_bf16, product)  # type: ignore[no-any-return]


@define(
    "LinearWide",
    "x w",
    "y",
    "bf16(x @ w.T), summed in f64: where one bf16 step can tip a quantiser, that a score, and that a selection.",
)
def linear_wide(b: Body, x: str, w: str) -> str:
    return b.call(round_bf16, b.call(linear_f32, x, w))  # type: ignore[no-any-return]


def dequantize_weight(rows: int, columns: int) -> Function:
    """e4m3 codes [out, in] and e8m0 scales, one per 32x32 block -> f32 [out, in], exact."""
    down, across = -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)
    doc = "e4m3 codes with one e8m0 scale per 32x32 block -> f32."

    @define(f"DequantizeWeight{rows}x{columns}", "codes scales", "w", doc)
    def made(b: Body, codes: str, scales: str) -> str:
        scale = b.op("Reshape", b.call(DECODE_E8M0, scales), b.i64([down, 1, across, 1]))
        blocks = b.op("Expand", scale, b.i64([down, WEIGHT_BLOCK, across, WEIGHT_BLOCK]))
        full = b.op("Reshape", blocks, b.i64([down * WEIGHT_BLOCK, across * WEIGHT_BLOCK]))
        cut = b.op("Slice", full, b.i64([0, 0]), b.i64([rows, columns]))
        return b.op("Mul", b.call(DECODE_E4M3, codes), cut)

    return made


def linear_fp8(rows: int, columns: int, wide: bool = False) -> Function:
    """bf16(q(x) @ w.T): q the window-row quantiser (e4m3, block 32), w e4m3 codes with e8m0 scales.

    `wide` sums in f64, see `linear_wide`.
    """
    name = f"LinearFp8{'Wide' if wide else ''}_{rows}x{columns}"
    doc = f"bf16(q(x) @ w.T), summed in {'f64' if wide else 'f32'}: q to e4m3 and back, w e4m3 in 32x32 blocks."

    @define(name, "x codes scales", "y", doc)
    def made(b: Body, x: str, codes: str, scales: str) -> str:
        rounded = b.call(round_trip("window", columns), x)
        weight = b.call(dequantize_weight(rows, columns), codes, scales)
        return b.call(linear_wide if wide else linear, rounded, weight)  # type: ignore[no-any-return]

    return made
