"""The layers as ONNX models of standard operators: export, feeding, and comparison of engines.

One file per operator, with the stems of `reference`. Needs the extra ``onnx``; raises UsageError without it.
"""

from ds41_tvm.errors import UsageError

try:
    import onnx as _onnx
except ImportError:
    raise UsageError("ONNX export needs the package onnx: pip install 'ds41-tvm[onnx]'") from None

del _onnx
