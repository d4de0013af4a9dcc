"""The host side of a GPU program as a Python function: it checks the arguments and says what to launch.

TVM's own host code hands launches to a device runtime; its package has none for OpenCL. So the host function, as it is
before that last lowering, is written out in Python and compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.tirx import PrimFunc

# launch(name, arguments, names of the launch parameters, their values)
Launch = Callable[[str, tuple[Any, ...], tuple[str, ...], tuple[int, ...]], None]

_BINARY = {
    "Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "EQ": "==", "NE": "!=", "LT": "<",
    "LE": "<=", "GT": ">", "GE": ">=", "And": "and", "Or": "or", "RShift": ">>",
    "BitwiseAnd": "&", "BitwiseOr": "|",
}  # fmt: skip
_CALLS = {
    "shift_right": ">>", "shift_left": "<<", "bitwise_and": "&", "bitwise_or": "|",
}  # fmt: skip
# Fields of a DLTensor as `tvm_struct_get` numbers them.
_DATA, _SHAPE, _STRIDES, _NDIM, _CODE, _BITS, _LANES, _OFFSET, _DEVICE, _DEVICE_TYPE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
_TYPE_INDEX, _ARGUMENT, _ELEMENT = 13, 15, 17
_OPENCL, _TENSOR_POINTER = 4, 7  # kDLOpenCL; the type index of a DLTensor*


def field(value: Any, index: int, kind: int) -> Any:
    """What ``tvm_struct_get`` reads, of the tuple of arguments, of an array or of a shape."""
    if kind == _TYPE_INDEX:
        return _TENSOR_POINTER
    if kind in (_ARGUMENT, _ELEMENT):
        return value[index]
    code = {"i": 0, "u": 1, "f": 2}[value.dtype.kind]
    return {
        _DATA: value, _SHAPE: value.shape, _STRIDES: None, _NDIM: value.ndim, _CODE: code,
        _BITS: 8 * value.dtype.itemsize, _LANES: 1, _OFFSET: 0, _DEVICE: 0, _DEVICE_TYPE: _OPENCL,
    }[kind]  # fmt: skip


def python_host(host: PrimFunc, launch: Launch) -> Callable[..., None]:
    """The host function of a GPU program, called with NumPy arrays. It raises ValueError where they do not fit."""
    writer = _Writer()
    _, arguments, count, _ = host.params
    writer.statement(host.body, 1)
    body = "\n".join(writer.lines)
    source = f"def call(*args):\n    {writer.name(arguments)}, {writer.name(count)} = args, len(args)\n{body}"
    names: dict[str, Any] = {"field": field, "launch": launch, "np": np, "refuse": _refuse}
    exec(compile(source, f"<host of {host.attrs['global_symbol']}>", "exec"), names)  # text made here of TVM's own tree
    function: Callable[..., None] = names["call"]
    return function


def _refuse(parts: list[str]) -> None:
    raise ValueError("".join(parts))


def short(call: Any) -> str:
    """Name of the operator of a call, without its dialect."""
    return str(call.op.name).rpartition(".")[2]


class _Writer:
    """Python text of a host function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # what is named: an identity may not be given to another object meanwhile

    def name(self, node: Any) -> str:
        key = int(node.__chandle__())
        if key not in self._names:
            self._kept.append(node)
            self._names[key] = f"v{len(self._names)}"
        return self._names[key]

    def put(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def statement(self, node: Any, depth: int) -> None:
        kind = type(node).__name__
        if kind == "SeqStmt":
            for part in node.seq:
                self.statement(part, depth)
        elif kind == "AttrStmt":
            self.statement(node.body, depth)
        elif kind == "AssertStmt":
            parts = [str(part.value) for part in node.message_parts]
            self.put(depth, f"if not {self.value(node.condition)}: refuse({parts!r})")
        elif kind == "Bind":
            self.put(depth, f"{self.name(node.var)} = {self.value(node.value)}")
        elif kind == "IfThenElse":
            self.put(depth, f"if {self.value(node.condition)}:")
            self.statement(node.then_case, depth + 1)
            self.put(depth + 1, "pass")
            if node.else_case is not None:
                self.put(depth, "else:")
                self.statement(node.else_case, depth + 1)
                self.put(depth + 1, "pass")
        elif kind == "DeclBuffer":
            self.put(depth, f"{self.name(node.buffer)} = {self.value(node.data)}")
        elif kind == "AllocBuffer":
            size = "*".join(f"({self.value(n)})" for n in node.buffer.shape)
            self.put(depth, f"{self.name(node.buffer)} = np.empty({size}, {str(node.buffer.dtype)!r})")
        elif kind == "Evaluate":
            self.call(node.value, depth)
        elif kind == "Return":
            self.put(depth, "return")
        else:
            raise NotImplementedError(f"a host function with {kind} statements")

    def call(self, node: Any, depth: int) -> None:
        if type(node).__name__ != "Call":
            return
        if short(node) == "tvm_call_packed" and node.args[0].value == "__tvm_set_device":
            return
        if short(node) != "call_ffi_kernel":
            raise NotImplementedError(f"a host function that calls {short(node)}")
        tags = tuple(str(tag) for tag in node.attrs.launch_params)
        given, extents = node.args[1 : len(node.args) - len(tags)], node.args[len(node.args) - len(tags) :]
        arguments = ", ".join(self.argument(a) for a in given)
        sizes = ", ".join(self.value(a) for a in extents)
        self.put(depth, f"launch({str(node.args[0].value)!r}, ({arguments},), {tags!r}, ({sizes},))")

    def argument(self, node: Any) -> str:
        if type(node).__name__ == "Call" and short(node) == "buffer_data":
            return self.value(node)
        return f"np.{node.ty.dtype}({self.value(node)})"

    def value(self, node: Any) -> str:
        kind = type(node).__name__
        if kind == "Var":
            return self.name(node)
        if kind == "IntImm":
            return str(int(node.value))
        if kind in _BINARY:
            return f"({self.value(node.a)} {_BINARY[kind]} {self.value(node.b)})"
        if kind == "LShift":  # bits that leave the type are lost
            shifted = f"({self.value(node.a)} << {self.value(node.b)})"
            return f"int(np.array({shifted}).astype({str(node.ty.dtype)!r}))"
        if kind in ("Min", "Max"):
            return f"{kind.lower()}({self.value(node.a)}, {self.value(node.b)})"
        if kind == "Not":
            return f"(not {self.value(node.a)})"
        if kind == "Cast":
            return f"int({self.value(node.value)})"
        if kind == "Select":
            return self.choice(node.condition, node.true_value, node.false_value)
        if kind == "Call":
            return self.operation(short(node), node.args)
        raise NotImplementedError(f"a host function with {kind} expressions")

    def choice(self, condition: Any, yes: Any, no: Any) -> str:
        return f"({self.value(yes)} if {self.value(condition)} else {self.value(no)})"

    def operation(self, name: str, args: Any) -> str:
        if name in _CALLS:
            return f"({self.value(args[0])} {_CALLS[name]} {self.value(args[1])})"
        if name == "tvm_struct_get":
            return f"field({self.value(args[0])}, {self.value(args[1])}, {self.value(args[2])})"
        if name == "if_then_else":
            return self.choice(*args)
        if name in ("reinterpret", "handle_add_byte_offset"):
            return self.value(args[0])
        if name == "isnullptr":
            return f"({self.value(args[0])} is None)"
        if name == "buffer_data":
            return self.name(args[0])
        raise NotImplementedError(f"a host function that uses {name}")
