"""Dot products of bf16 pairs (x86 ``avx512bf16``): sums[j] += a[j].low * b[j].low + a[j].high * b[j].high, 16 lanes.

Products are exact and join the f32 sum one after the other, each sum rounded to nearest; subnormal values count as
zero, as in AMX tiles. TVM turns its bfloat16 into f32 before LLVM sees it, so the instruction comes in as a function
of LLVM IR on uint32 pairs, which LLVM puts in line.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

LANES = 16
IMPORT = "pragma_import_llvm"
_NAME = "ds41_dot_pairs"
SOURCE = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define linkonce_odr <16 x float> @{_NAME}(<16 x float> %sums, <16 x i32> %a, <16 x i32> %b) alwaysinline nounwind {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
"""


def dot(sums: Any, a: Any, b: Any) -> Any:
    """float32x16 + uint32x16 . uint32x16; inside ``with T.attr(T.int32(0), dot.IMPORT, dot.SOURCE)``."""
    return T.call_pure_extern("float32x16", _NAME, sums, a, b)
