"""Running one local function, or an exported model step by step, in an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ds41_tvm.onnx_export.builder import Body, Function, Library
from ds41_tvm.onnx_export.engines import model_inputs, onnxruntime_engine
from ds41_tvm.onnx_export.export import export_onnx
from ds41_tvm.onnx_export.play import Session

ENGINES = ("onnxruntime", "onnxruntime-plain", "onnx")


def function_model(function: Function, inputs: Sequence[np.ndarray], opset: int = 18) -> onnx.ModelProto:
    """A model that is one call of a function; every axis is free."""
    library = Library(opset)
    body = Body(library)
    body.call(function, *function.inputs, name="call", results=list(function.outputs))
    given = []
    for name, array in zip(function.inputs, inputs, strict=True):
        dims = [f"{name}{axis}" for axis in range(array.ndim)]
        given.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), dims))
    made = [onnx.ValueInfoProto(name=name) for name in function.outputs]
    graph = helper.make_graph(body.nodes, "test", given, made)
    model = helper.make_model(graph, opset_imports=library.imports(), functions=library.protos)
    model.ir_version = 8
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


_made: dict[tuple[Any, ...], Callable[[dict[str, Any]], list[Any]]] = {}


def run_function(function: Function, *inputs: Any, engine: str = "onnxruntime") -> Any:
    """Results of a function on these inputs: an array, or a list of them. bf16 is given as ml_dtypes.bfloat16."""
    arrays = [np.asarray(value) for value in inputs]
    key = (engine, function.name, function.build, *((a.dtype, a.ndim) for a in arrays))
    if key not in _made:
        _made[key] = _evaluator(function_model(function, arrays), engine)
    results = _made[key](dict(zip(function.inputs, arrays, strict=True)))
    return results[0] if len(results) == 1 else results


def _evaluator(model: onnx.ModelProto, engine: str) -> Callable[[dict[str, Any]], list[Any]]:
    if engine == "onnx":
        evaluator = ReferenceEvaluator(model)
        return lambda feeds: evaluator.run(None, feeds)  # type: ignore[no-any-return]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if engine == "onnxruntime-plain":
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
    names = [value.name for value in session.get_outputs()]

    def evaluate(feeds: dict[str, Any]) -> list[Any]:
        values = {name: _ort_value(array) for name, array in feeds.items()}
        return [result.numpy() for result in session.run_with_ort_values(names, values)]

    return evaluate


def _ort_value(array: np.ndarray) -> Any:
    make = onnxruntime.OrtValue
    if array.dtype.name == "bfloat16":
        return make.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return make.ortvalue_from_numpy(array)


@pytest.fixture(scope="session", params=ENGINES)
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`run(function, *inputs)` in ONNX Runtime, with and without its optimisations, and in onnx's evaluator."""

    def with_engine(function: Function, *inputs: Any) -> Any:
        return run_function(function, *inputs, engine=request.param)

    return with_engine


@pytest.fixture(scope="session", name="ort")
def _ort() -> Callable[..., Any]:
    """`ort(function, *inputs)`: ONNX Runtime alone."""
    return run_function


class Played:
    """An exported model in ONNX Runtime, with its caches."""

    def __init__(self, path: Path, batch: int = 1) -> None:
        self.path = path
        self.model = onnx.load(str(path), load_external_data=False)
        self.engine = onnxruntime_engine(path, threads=2)
        self.restart(batch)

    def restart(self, batch: int = 1) -> None:
        self.session = Session(model_inputs(self.model), batch)

    def step(self, x: Mapping[int, np.ndarray], others: Mapping[str, np.ndarray] | None = None) -> dict[str, Any]:
        return self.session.step(self.engine, x, others)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Played]:
    """`exported(config, weights, **options)`: written, loaded into ONNX Runtime, ready for the first step."""

    def make(config: Any, weights: Any, batch: int = 1, **options: Any) -> Played:
        path = tmp_path_factory.mktemp("onnx") / "model.onnx"
        export_onnx(config, weights, path, **options)
        return Played(path, batch)

    return make
