"""TVM's runtime library and its Python bridge, without the compiler and without torch."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ds41_tvm.errors import AbiMismatch, NoCudaRuntime

# A bundle carries the library and its version here; an installation has them in the package apache-tvm.
_CARRIED = Path(__file__).resolve().parents[1] / "lib"
LIBRARY = "libtvm_runtime.so"
CUDA_LIBRARY, CUDA_RUNTIME = "libtvm_runtime_cuda.so", "libcudart.so.13"


class _Hide(importlib.abc.MetaPathFinder):
    """Makes packages look absent to the imports of one thread."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._thread = names, threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is not imported with tvm_ffi", name=name)
        return None


def import_ffi() -> Any:
    """The module ``tvm_ffi``.

    On import it would import torch and ml_dtypes wherever they are installed (seconds, 200 MB), for conversions that
    kernels do not need: arrays come through NumPy and DLPack. What is imported already stays in use. Raises AbiMismatch
    if it is not installed.
    """
    if "tvm_ffi" in sys.modules:
        return sys.modules["tvm_ffi"]
    hide = _Hide(frozenset({"torch", "ml_dtypes"}))
    sys.meta_path.insert(0, hide)
    try:
        return importlib.import_module("tvm_ffi")
    except ImportError as error:
        raise AbiMismatch(f"tvm_ffi cannot be imported ({error}); install it: pip install apache-tvm-ffi") from error
    finally:
        sys.meta_path.remove(hide)


def runtime_library() -> tuple[Path, str]:
    """Where ``libtvm_runtime.so`` lies, and its version. Raises AbiMismatch if there is none."""
    if (_CARRIED / LIBRARY).is_file():
        return _CARRIED / LIBRARY, (_CARRIED / "VERSION").read_text().strip()
    spec = importlib.util.find_spec("tvm")  # finds the package without importing it
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "lib" / LIBRARY
        if path.is_file():
            return path, importlib.metadata.version("apache-tvm")
    raise AbiMismatch(
        f"{LIBRARY} was not found; install it: pip install apache-tvm==0.27.0.post1, or run from a bundle"
    )


@functools.cache
def load_runtime() -> Any:
    """``tvm_ffi`` with TVM's runtime in the process: modules call its thread pool, and crash without it."""
    ffi = import_ffi()
    ctypes.CDLL(str(runtime_library()[0]), ctypes.RTLD_GLOBAL)
    return ffi


def cuda_runtime_library() -> Path | None:
    """NVIDIA's ``libcudart.so.13``: the bundle's, of pip packages, of a toolkit; None: only the system may know it."""
    folders = [_CARRIED]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations if spec else None) or ():
        folders += [Path(place) / "cu13" / "lib", Path(place) / "cuda_runtime" / "lib"]
    for root in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr/local/cuda-13.0")):
        folders += [Path(root) / "lib64", Path(root) / "lib"]
    return next((folder / CUDA_RUNTIME for folder in folders if (folder / CUDA_RUNTIME).is_file()), None)


@functools.cache
def load_cuda_runtime() -> Any:
    """As `load_runtime`, with TVM's part for CUDA. The driver must be there. Raises NoCudaRuntime."""
    ffi = load_runtime()
    try:
        ctypes.CDLL(str(cuda_runtime_library() or CUDA_RUNTIME), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoCudaRuntime(
            f"{CUDA_RUNTIME} cannot be loaded ({error}); expected NVIDIA's runtime of CUDA 13: pip install "
            f"nvidia-cuda-runtime, or run from a bundle made where it is installed"
        ) from None
    library = runtime_library()[0].with_name(CUDA_LIBRARY)
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoCudaRuntime(
            f"{library} cannot be loaded ({error}); expected TVM's runtime for CUDA: pip install "
            f"apache-tvm==0.27.0.post1, or run from a bundle of an artefact for CUDA"
        ) from None
    return ffi


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("patch", ctypes.c_uint32)]


@functools.cache
def abi() -> dict[str, str]:
    """``tvm``: version of the runtime library; ``tvm_ffi``: version of the C ABI that libtvm_ffi states."""
    ffi = import_ffi()
    version = _Version()
    ctypes.CDLL(ffi.libinfo.find_libtvm_ffi()).TVMFFIGetVersion(ctypes.byref(version))
    return {"tvm": runtime_library()[1], "tvm_ffi": f"{version.major}.{version.minor}.{version.patch}"}
