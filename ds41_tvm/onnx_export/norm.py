"""RMSNorm."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import define, round_bf16


def rms_norm(eps: float) -> Function:
    """y = bf16(w * (x * (1 / sqrt(mean(x^2) + eps)))) over the last axis, f32; w bf16 or f32.

    The mean is taken in f64 and rounded to f32. So are the root and its inverse, which gives the correct f32
    results: engines' own f32 roots differ, and ONNX Runtime turns x * (1 / root) in f32 into x / root.
    """

    @define("RmsNorm", "x w", "y", f"bf16(w * (x / sqrt(mean(x^2) + eps))), eps = {eps:g}; the mean in f64.")
    def made(b: Body, x: str, w: str) -> str:
        wide = b.cast(x, TensorProto.DOUBLE)
        mean = b.cast(b.reduce("ReduceMean", b.op("Mul", wide, wide), -1), TensorProto.FLOAT)
        under = b.cast(b.op("Add", mean, b.f32(np.float32(eps))), TensorProto.DOUBLE)
        root = b.cast(b.op("Sqrt", under), TensorProto.FLOAT)
        inverse = b.op("Div", b.constant(1, np.float64), b.cast(root, TensorProto.DOUBLE))
        normalised = b.op("Mul", x, b.cast(inverse, TensorProto.FLOAT))
        return b.call(round_bf16, b.op("Mul", b.cast(w, TensorProto.FLOAT), normalised))  # type: ignore[no-any-return]

    return made
