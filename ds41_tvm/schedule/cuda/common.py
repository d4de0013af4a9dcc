"""What GPU programs share: the same text for CUDA and for OpenCL, where a processor runs it to show that it is right.

Rounding points are those of the program, not of a compiler: nvcc gets ``-fmad=false`` and no fast math, OpenCL
``FP_CONTRACT OFF``, so a product that is added to something is rounded first. Where it may be fused, the program says
so: `fma`. Division, square root and subnormal numbers are IEEE's on both.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

Expr = Any
WARP = 32
STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel may declare; more has scope ``shared.dyn`` on CUDA


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c in f32 with one rounding: CUDA's ``fmaf``, OpenCL's ``fma``."""
    return T.call_pure_extern("float32", "fmaf", a, b, c)


def vector(size: int, most: int) -> int:
    """The widest power of two up to `most` that divides `size`: elements of one load of up to 16 bytes."""
    return next(v for v in (16, 8, 4, 2, 1) if v <= most and size % v == 0)


@T.macro
def count_one(counts, i):
    """counts[i] += 1 in shared memory, of int32, by any number of threads: the sum does not depend on their order."""
    T.evaluate(T.call_extern("int32", "atomicAdd", T.address_of(counts[i]), T.int32(1)))
