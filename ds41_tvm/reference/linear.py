"""Linear layers: y = x @ w.T."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import F32, U8, U16, bf16_decode, bf16_encode, dequantize_weight
from ds41_tvm.reference.quantize import quantize_activation

# f64: products summed in float64 and rounded once, the value nearest to exact. f32: BLAS in float32, several
# times faster, whose rounding depends on the machine.
Accumulate = Literal["f64", "f32"]


def linear(x: U16, w: NDArray[Any], accumulate: Accumulate = "f64") -> U16:
    """y[t, n] = bf16(sum_k x[t, k] * w[n, k]).

    x bf16 bits [..., K]; w [N, K], bf16 bits or float32; y bf16 bits [..., N].
    """
    return bf16_encode(linear_f32(x, w, accumulate))


def linear_f32(x: U16, w: NDArray[Any], accumulate: Accumulate = "f64") -> F32:
    """As `linear`, with a float32 result: the compressor of ratio > 1, whose bf16 weights are promoted."""
    return _product(bf16_decode(x), weight_values(w), accumulate)


def linear_fp8(x: U16, codes: U8, scales: U8, accumulate: Accumulate = "f64") -> U16:
    """y[t, n] = bf16(sum_k q(x)[t, k] * w[n, k]) with q the window-row quantiser (e4m3, block 32).

    x bf16 bits [..., K]; codes e4m3 [N, K] and scales e8m0 [ceil(N/32), ceil(K/32)] of w; y bf16 bits [...,
    N]. Official ``linear`` on fp8 weights: ``act_quant`` then ``fp8_gemm``.
    """
    return bf16_encode(_product(bf16_decode(quantize_activation(x)), dequantize_weight(codes, scales), accumulate))


def weight_values(w: NDArray[Any]) -> F32:
    """float32 values of a weight held as bf16 bits (uint16) or as float32."""
    return bf16_decode(w) if w.dtype == np.uint16 else w.astype(np.float32, copy=False)


def _product(x: F32, w: F32, accumulate: Accumulate) -> F32:
    wide = np.float64 if accumulate == "f64" else np.float32
    with np.errstate(invalid="ignore", over="ignore"):  # a bad row of x gives a bad row of y, not a warning
        out: F32 = (x.astype(wide) @ w.T.astype(wide)).astype(np.float32)
    return out
