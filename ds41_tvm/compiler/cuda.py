"""Kernels for CUDA: host code that checks arguments and launches, and the device's machine code beside it.

TVM's own way compiles when a library is loaded, or needs a driver here. So nvcc is called on TVM's CUDA source, and its
machine code goes into the library in the form that TVM's runtime reads: a table of modules under the symbol
``__tvm_ffi__library_bin``, those of kind ``cuda`` as (format, functions, code).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tvm
from tvm.target import Target as TvmTarget
from tvm.tirx import PrimFunc
from tvm.tirx.build import codegen_build, split_host_device_mods

from ds41_tvm.artifact.manifest import GpuCode
from ds41_tvm.compiler.nvcc import compile_cuda

_DYNAMIC = "tirx.use_dyn_shared_memory"
LARGE = 512  # threads of blocks that ptxas is never asked to fit side by side
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\)")


@dataclass(frozen=True)
class Lowered:
    """A scheduled program as CUDA source; `host`: object file; `functions`: TVM's table of them, as it stores it;
    `launches`: by function, its launch parameters where they are constants.
    """

    source: str
    host: bytes
    functions: bytes
    launches: dict[str, dict[str, int]]


def lower_cuda(name: str, func: PrimFunc, target: TvmTarget, folder: Path) -> Lowered:
    """Host and device code of one program; `target` is a CUDA target with its host."""
    module = tvm.tirx.transform.BindTarget(target)(tvm.IRModule({name: func.with_attr("global_symbol", name)}))
    pipeline, finalize_host, finalize_device = tvm.tirx.get_default_tir_pipeline(target)
    host, device = split_host_device_mods(pipeline(module))
    (kind, part), *others = device.items()
    if others:
        raise ValueError(f"{name} has device code for {1 + len(others)} targets; expected one")
    launches = {n: sizes for f in host.functions.values() for n, sizes in _launches(f.body)}
    code = codegen_build(finalize_device()(part), kind)
    source = code.inspect_source()
    built = codegen_build(finalize_host()(host), target.host)
    path = folder / "host.o"
    built.write_to_file(str(path), "o")
    built.import_module(code)
    return Lowered(source, path.read_bytes(), _functions(built, source), launches)


def device_code(name: str, lowered: Lowered, level: str) -> tuple[bytes, tuple[GpuCode, ...]]:
    """Machine code of a program, and the report of each of its functions, in the order of their launches."""
    code, reports = compile_cuda(_one_block(lowered.source, LARGE), level, name)
    if any(report.spill_stores or report.spill_loads for report in reports.values()):
        code, reports = compile_cuda(_one_block(lowered.source, 1), level, name)
    found = []
    for function, sizes in lowered.launches.items():
        threads = 1
        for axis in "xyz":
            threads *= sizes.get(f"threadIdx.{axis}", 1)
        dynamic = sizes.get(_DYNAMIC, 0)
        found.append(msgspec.structs.replace(reports[function], threads=threads, dynamic_shared_bytes=dynamic))
    return code, tuple(found)


def _one_block(source: str, least: int) -> str:
    """Let blocks of at least so many threads have the registers they need: unasked, ptxas spills to fit three side by
    side.
    """
    return _BOUNDS.sub(lambda m: f"__launch_bounds__({m[1]}, 1)" if int(m[1]) >= least else m[0], source)


def module_table(parts: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The content of ``__tvm_ffi__library_bin`` for a library that imports a module of each (functions, machine code).

    ``u64 size | tree | "_lib" | (kind, module)...``; the tree, in compressed rows, makes every module a child of the
    library; strings and arrays follow their u64 length.
    """
    count = len(parts)
    tree = _numbers([0, *[count] * (count + 1)]) + _numbers(range(1, count + 1))
    modules = b"".join(
        _bytes(b"cuda") + _bytes(_bytes(b"cubin") + functions + _bytes(code)) for functions, code in parts
    )
    content = tree + _bytes(b"_lib") + modules
    return struct.pack("<Q", len(content)) + content


def read_module_table(data: bytes) -> list[bytes]:
    """The machine codes in a table that `module_table` made."""
    at = 8
    for _ in range(2):
        at += 8 + 8 * struct.unpack_from("<Q", data, at)[0]
    codes = []
    _, at = _string(data, at)
    while at < len(data):
        kind, at = _string(data, at)
        module, at = _string(data, at)
        form, _ = _string(module, 0)
        if (kind, form) != (b"cuda", b"cubin"):
            raise ValueError(f"a module of kind {kind!r} and format {form!r}; expected machine code for CUDA")
        codes.append(module[module.rindex(b"\x7fELF") :])
    return codes


def _functions(host: Any, source: str) -> bytes:
    """TVM's table of functions out of what it would store: (format, functions, source)."""
    data = tvm.runtime._ffi_api.ModulePackImportsToTensor(host).numpy().tobytes()
    at = 8
    for _ in range(2):
        at += 8 + 8 * struct.unpack_from("<Q", data, at)[0]
    for expected in (b"_lib", b"cuda"):
        text, at = _string(data, at)
        if text != expected:
            raise ValueError(f"TVM {tvm.__version__} stores {text!r} where {expected!r} was expected")
    module, _ = _string(data, at)
    form, begin = _string(module, 0)
    end = len(module) - 8 - len(source.encode())
    if form != b"cuda" or _string(module, end)[0] != source.encode():
        raise ValueError(f"TVM {tvm.__version__} stores its CUDA source in another form than was expected")
    return module[begin:end]


def _numbers(values: Any) -> bytes:
    listed = list(values)
    return struct.pack(f"<Q{len(listed)}Q", len(listed), *listed)


def _bytes(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + size], at + 8 + size


def _launches(node: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """(function, constant launch parameters) of every launch in a host function, in their order."""
    kind = type(node).__name__
    if kind == "SeqStmt":
        for part in node.seq:
            yield from _launches(part)
    elif kind == "AttrStmt":
        yield from _launches(node.body)
    elif kind == "IfThenElse":
        yield from _launches(node.then_case)
        if node.else_case is not None:
            yield from _launches(node.else_case)
    elif kind == "Evaluate" and type(node.value).__name__ == "Call":
        call = node.value
        if call.op.name == "tirx.call_ffi_kernel":
            tags = [str(tag) for tag in call.attrs.launch_params]
            values = call.args[len(call.args) - len(tags) :]
            constants = {t: int(v.value) for t, v in zip(tags, values, strict=True) if hasattr(v, "value")}
            yield str(call.args[0].value), constants
