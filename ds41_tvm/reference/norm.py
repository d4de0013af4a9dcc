"""RMSNorm."""

from __future__ import annotations

import numpy as np

from ds41_tvm.numerics.formats import U16, bf16_decode, bf16_encode


def rms_norm(x: U16, w: U16, eps: float) -> U16:
    """y = bf16(w * (x / sqrt(mean(x^2) + eps))), in float32, over the last dimension (official ``RMSNorm``).

    x bf16 bits [..., D], w bf16 bits [D], y bf16 bits [..., D]; `eps` (``norm_eps``, 1e-20 as released) lies
    inside the root. The mean is summed in float64 and rounded to float32.
    """
    values = bf16_decode(x)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.square(values.astype(np.float64)).mean(-1, keepdims=True).astype(np.float32)
        normalised = values * (np.float32(1) / np.sqrt(mean + np.float32(eps)))
        return bf16_encode(bf16_decode(w) * normalised)
