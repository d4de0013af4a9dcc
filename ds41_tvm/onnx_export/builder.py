"""A thin layer over ``onnx.helper``: bodies of nodes, and functions that are defined once and called by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

DOMAIN = "ds41"
# A slice to the end of an axis, whatever its length.
END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Function:
    """A local function of the model: `build` writes its body and returns the names of its results.

    Functions of one name are one function: whatever varies is in the name.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    doc: str
    build: Callable[..., str | Sequence[str]]


class Library:
    """The functions of one model, those that others call first."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._protos: dict[str, onnx.FunctionProto] = {}

    def require(self, function: Function) -> None:
        """Make sure the function is defined."""
        if function.name in self._protos:
            return
        body = Body(self)
        results = function.build(body, *function.inputs)
        results = [results] if isinstance(results, str) else list(results)
        for result, wanted in zip(results, function.outputs, strict=True):
            body.rename(result, wanted)
        proto = helper.make_function(
            DOMAIN, function.name, list(function.inputs), list(function.outputs), body.nodes, self.imports()
        )
        proto.doc_string = function.doc
        self._protos[function.name] = proto

    def imports(self) -> list[onnx.OperatorSetIdProto]:
        """Operator sets: the default domain, and that of the functions."""
        return [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1)]

    @property
    def protos(self) -> list[onnx.FunctionProto]:
        """All functions, called ones before their callers."""
        return list(self._protos.values())


class Body:
    """Nodes of a graph or of a function, in order. Values are known by their names."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._used: dict[str, int] = {}

    def op(self, kind: str, *inputs: str, name: str | None = None, doc: str | None = None, **attributes: Any) -> str:
        """Append one node of the default domain with one result; `name` becomes its name and its result's."""
        return self._append(kind, inputs, [self._fresh(name or kind)], "", doc, attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, name: str | None = None, **attributes: Any) -> list[str]:
        """As `op`, for a node with several results."""
        base = name or kind
        names = [self._fresh(f"{base}.{number}") for number in range(outputs)]
        return self._append(kind, inputs, names, "", None, attributes)

    def call(
        self,
        function: Function,
        *inputs: str,
        name: str | None = None,
        doc: str | None = None,
        results: Sequence[str] | None = None,
    ) -> Any:
        """Call a local function: one name, or a list of names where it has several results.

        `results` names the results where they must be those of graph outputs.
        """
        self.library.require(function)
        if len(inputs) != len(function.inputs):
            raise TypeError(f"{function.name} takes {function.inputs}, got {inputs}")
        base = name or function.name
        if results is None:
            many = len(function.outputs) > 1
            results = [self._fresh(f"{base}.{out}" if many else base) for out in function.outputs]
        names = self._append(function.name, inputs, list(results), DOMAIN, doc, {}, name or results[0])
        return names[0] if len(names) == 1 else names

    def constant(self, value: Any, dtype: Any) -> str:
        """A constant, shared within this body."""
        array: NDArray[Any] = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._fresh("c")
            tensor = numpy_helper.from_array(array, name)
            self._append("Constant", (), [name], "", None, {"value": tensor})
            self._constants[key] = name
        return self._constants[key]

    def f32(self, value: Any) -> str:
        """A float32 constant."""
        return self.constant(value, np.float32)

    def i64(self, value: Any) -> str:
        """An int64 constant."""
        return self.constant(value, np.int64)

    def rename(self, old: str, new: str) -> None:
        """Give a value another name: the name that a result must have."""
        for node in self.nodes:
            for names in (node.input, node.output):
                for i, given in enumerate(names):
                    if given == old:
                        names[i] = new

    # ---- forms that many operators use

    def cast(self, x: str, to: int, name: str | None = None) -> str:
        """Cast to an ONNX element type."""
        return self.op("Cast", x, to=to, name=name)

    def slice(self, x: str, start: str, end: str, axis: int, step: int = 1, name: str | None = None) -> str:
        """x[start:end:step] on one axis; `start` and `end` are int64 [1]."""
        return self.op("Slice", x, start, end, self.i64([axis]), self.i64([step]), name=name)

    def size(self, x: str, axis: int) -> str:
        """Length of an axis (from the front), int64 [1]."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def arange(self, count: str) -> str:
        """0, 1, ... : int64 [n] for an int64 [1] count."""
        return self.op("Range", self.i64(0), self.op("Squeeze", count, self.i64([0])), self.i64(1))

    def reduce(self, kind: str, x: str, axis: int, keepdims: bool = True) -> str:
        """A reduction over one axis."""
        return self.op(kind, x, self.i64([axis]), keepdims=int(keepdims))

    def _fresh(self, base: str) -> str:
        count = self._used.get(base, 0)
        self._used[base] = count + 1
        return f"{base}_{count}" if count else base

    def _append(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: list[str],
        domain: str,
        doc: str | None,
        attributes: dict[str, Any],
        name: str | None = None,
    ) -> list[str]:
        node = helper.make_node(
            kind, list(inputs), outputs, name=name or outputs[0], doc_string=doc, domain=domain, **attributes
        )
        self.nodes.append(node)
        return outputs
