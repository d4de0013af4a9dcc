"""Engines that run an exported model, each as a function from inputs by name to outputs by name."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ds41_tvm.errors import UsageError
from ds41_tvm.onnx_export.play import Array, Engine

Inputs = list[tuple[str, Any, tuple[int | None, ...]]]


def model_inputs(model: onnx.ModelProto) -> Inputs:
    """(name, NumPy dtype, shape with None for an axis of no fixed size) of each input."""
    found: Inputs = []
    for value in model.graph.input:
        tensor = value.type.tensor_type
        sizes = (dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
        found.append((value.name, helper.tensor_dtype_to_np_dtype(tensor.elem_type), tuple(sizes)))
    return found


def onnxruntime_engine(path: Path, threads: int | None = None) -> Engine:
    """ONNX Runtime's CPU provider. Raises UsageError if it is not installed."""
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    # NumPy has no bf16: weights that are inputs are handed over as their bits.
    bf16 = [value.name for value in session.get_inputs() if value.type == "tensor(bfloat16)"]

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        if not bf16:
            return dict(zip(names, session.run(names, feeds), strict=True))
        value = runtime.OrtValue
        given = {
            name: value.ortvalue_from_numpy_with_onnx_type(array, onnx.TensorProto.BFLOAT16)
            if name in bf16
            else value.ortvalue_from_numpy(array)
            for name, array in feeds.items()
        }
        results = session.run_with_ort_values(names, given)
        return {name: result.numpy() for name, result in zip(names, results, strict=True)}

    return run


def reference_engine(path: Path) -> Engine:
    """onnx's own evaluator in NumPy: slow, for small sizes."""
    evaluator = ReferenceEvaluator(str(path))
    names = list(evaluator.output_names)

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        return dict(zip(names, evaluator.run(names, feeds), strict=True))

    return run


def tvm_engine(path: Path) -> Engine:
    """TVM's own ONNX importer, compiled anew for the shapes of each call: tens of seconds.

    The importer knows no local functions and no arithmetic on shapes, so ONNX Runtime first puts the shapes in,
    inlines the functions and folds constants (its basic optimisations, which keep to standard operators).
    """
    model = onnx.load(str(path))

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        import tvm
        from tvm import relax
        from tvm.relax.frontend.onnx import from_onnx

        from ds41_tvm.compiler.targets import tvm_target
        from ds41_tvm.target import parse_target

        flat = specialise(model, feeds)
        shapes = {name: list(value.shape) for name, value in feeds.items()}
        dtypes = {name: str(value.dtype) for name, value in feeds.items()}
        with _quiet():
            module = from_onnx(flat, shape_dict=shapes, dtype_dict=dtypes)
            module = relax.transform.DecomposeOpsForInference()(module)
            machine = relax.VirtualMachine(tvm.compile(module, target=tvm_target(parse_target("cpu"))), tvm.cpu())
        given = [tvm.runtime.tensor(np.array(feeds[value.name], order="C")) for value in flat.graph.input]
        results = machine["main"](*given)
        results = [results] if len(flat.graph.output) == 1 else results
        names = [value.name for value in flat.graph.output]
        return {name: result.numpy() for name, result in zip(names, results, strict=True)}

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what TVM's importer and compiler write to standard error about every gather; errors are raised."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def specialise(model: onnx.ModelProto, feeds: dict[str, Array]) -> onnx.ModelProto:
    """The model for inputs of these shapes alone: functions inlined, arithmetic on shapes folded."""
    runtime = _runtime()
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        shape = value.type.tensor_type.shape
        shape.Clear()
        for size in feeds[value.name].shape:
            shape.dim.add(dim_value=size)
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    with tempfile.TemporaryDirectory() as folder:
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(Path(folder) / "flat.onnx")
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        runtime.InferenceSession(fixed.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UsageError("this needs the package onnxruntime: pip install 'ds41-tvm[onnx]'") from None
    return onnxruntime
