"""GPU programs run on a processor: the kernels of target ``opencl`` through PyOpenCL, to show that they are right.

The scheduled program is the one that CUDA compiles; only the code generator differs. Needs ``pyopencl[pocl]``.
"""

from __future__ import annotations

from ds41_tvm.proof.opencl import opencl_functions

__all__ = ["opencl_functions"]
