"""RMSNorm."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import define, round_bf16


def rms_norm(eps: float) -> Function:
    """y = bf16(w * (x * (1 / sqrt(mean(x^2) + eps)))) over the last axis, f32; w bf16 or f32.

    The mean is taken in f64 and rounded to f32. So is the root, whose rounding from f64 is that of a correct
    f32 root: engines' own f32 roots differ.
    """

    @define("RmsNorm", "x w", "y", f"bf16(w * (x / sqrt(mean(x^2) + eps))), eps = {eps:g}; the mean in f64.")
    def made(b: Body, x: str, w: str) -> str:
        wide = b.cast(x, TensorProto.DOUBLE)
        mean = b.cast(b.reduce("ReduceMean", b.op("Mul", wide, wide), -1), TensorProto.FLOAT)
        under = b.cast(b.op("Add", mean, b.f32(np.float32(eps))), TensorProto.DOUBLE)
        root = b.cast(b.op("Sqrt", under), TensorProto.FLOAT)
        normalised = b.op("Mul", x, b.op("Div", b.f32(1), root))
        return b.call(round_bf16, b.op("Mul", b.cast(w, TensorProto.FLOAT), normalised))  # type: ignore[no-any-return]

    return made
