"""What runs in the worker processes of a search: building a candidate, and timing it here or on another machine.

A candidate reaches the builder as MetaSchedule's module: the plain kernel, annotated with the chosen values. These are
all that the search decides; the program is made here by the same rules as when compiling.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ds41_tvm.program import Kernel
from ds41_tvm.target import Target
from ds41_tvm.tune.inputs import FEW, Case, arguments, output_rows
from ds41_tvm.tune.task import Values, task_of

IDENTITY, KNOB = "ds41.task", "ds41.knob."
ENTRY = "main"
# Seconds that the calls of one situation take at least, and how many there are at least and at most.
TIMED, LEAST, MOST = 0.05, 3, 50
_FLUSH = "cache_flush_cpu_non_first_arg"
_GPU_CACHE = 256 << 20  # bytes written between measurements that must not find weights in a GPU's cache


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a measurement depends on beside the values: with another kernel or machine it is another search."""

    kernel: Kernel
    target: Target
    program: str  # digest of the default program
    tvm: str
    threads: int
    place: str
    cases: str


def initialize() -> None:
    """Called first in every worker process. An interruption is the main process's to handle, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()


def initialize_gpu() -> None:
    """As `initialize`, for a worker that runs kernels on this machine's GPU."""
    from ds41_tvm.runtime.ffi import load_cuda_runtime

    initialize()
    load_cuda_runtime()


def begin() -> None:
    """Import what a build needs."""
    import ds41_tvm.compiler.targets
    import ds41_tvm.schedule.cpu  # noqa: F401


def prepare() -> None:
    """Keep TVM from importing its tensor intrinsics, which our programs do not use and which take a quarter of a
    minute; ask for tile registers.
    """
    import tvm

    from ds41_tvm.cpu_features import request_tiles

    name = "tvm.s_tir.tensor_intrin"
    if name not in sys.modules:
        empty = types.ModuleType(name)
        empty.__path__ = [os.path.join(os.path.dirname(tvm.__file__), "s_tir", "tensor_intrin")]
        sys.modules[name] = empty
    request_tiles()


def values_of(module: Any) -> Values:
    """The values that annotate a candidate's module."""
    annotations = getattr(getattr(module[ENTRY].body, "block", None), "annotations", {})
    return {str(k)[len(KNOB) :]: int(v) for k, v in annotations.items() if str(k).startswith(KNOB)}


def identity_of(module: Any) -> Identity:
    """What a candidate's module is a candidate for."""
    return msgspec.json.decode(str(module[ENTRY].attrs[IDENTITY]), type=Identity)


def build(module: Any, _target: Any, _params: Any) -> Any:
    """MetaSchedule's `f_build`: the program of a candidate, compiled."""
    identity = identity_of(module)
    kernel, values = identity.kernel, values_of(module)
    if values:
        kernel = task_of(kernel, identity.target.kind).with_values(values)
    return compile_kernel(kernel, identity.target)


def compile_kernel(kernel: Kernel, target: Target) -> Any:
    """TVM's module with the kernel as its function `ENTRY`; of a GPU what `export_into` makes a library of."""
    if target.is_gpu:
        return _compile_cuda(kernel, target)
    import tvm

    from ds41_tvm.compiler.targets import tvm_target
    from ds41_tvm.schedule import schedule

    _, func = schedule(kernel, target.kind)
    return tvm.compile(tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)}), target=tvm_target(target)).mod


def _compile_cuda(kernel: Kernel, target: Target) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    from ds41_tvm.compiler.objects import start_cuda

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        return start_cuda(kernel, target, Path(folder), pool, ENTRY)()


def export_into(folder: str) -> Callable[[Any], str]:
    """MetaSchedule's `f_export`: object files in an archive of its own below `folder`, linked where they run; of a GPU
    a library as in an artefact, with machine code.
    """

    def export(module: Any) -> str:
        from tvm.support.tar import tar

        from ds41_tvm.compiler.objects import CompiledKernel, link

        here = tempfile.mkdtemp(dir=folder)
        if isinstance(module, CompiledKernel):
            path = os.path.join(here, "kernel.so")
            link([module.code], Path(path), [module.device] if module.device else [])
        else:
            path = os.path.join(here, "kernel.tar")
            module.export_library(path, fcompile=tar)
        return path

    return export


def evaluate(module: Any, device: Any, kernel: Kernel, cases: Sequence[Case]) -> list[float]:
    """[geometric mean over `cases` of the median seconds of a call]."""
    logs = []
    for case in cases:
        arrays = _arrays(Kernel(kernel.op, kernel.params), case, device)
        # Few tokens read every weight from memory: programs must not find them in a cache.
        cold = kernel.op == "linear" and case.tokens <= FEW
        once = module.time_evaluator(ENTRY, device, number=1, repeat=1)
        first = float(once(*arrays).mean)
        count = int(min(MOST, max(LEAST, TIMED / max(first, 1e-7))))
        # Short calls are repeated within a measurement, or the clock would say little about them.
        number = 1 if cold else max(1, int(2e-4 / max(first, 1e-7)))
        gpu = "cpu" not in str(device)
        timer = module.time_evaluator(
            ENTRY, device, number=number, repeat=count, f_preproc=_FLUSH if cold and not gpu else "",
            cache_flush_bytes=_GPU_CACHE if cold and gpu else 0,
        )  # fmt: skip
        logs.append(np.log(np.median([float(x) for x in timer(*arrays).results])))
    return [float(np.exp(np.mean(logs)))]


def fingerprint(module: Any, device: Any, kernel: Kernel, cases: Sequence[Case]) -> list[float]:
    """SHA-256 of the outputs of `cases` as 16 numbers: MetaSchedule's runners hand numbers back."""
    found = hashlib.sha256()
    for case in cases:
        arrays = [_upload(array, device) for array in arguments(kernel, case)]
        module[ENTRY](*arrays)
        found.update(np.ascontiguousarray(output_rows(kernel, case, arrays[-1].numpy())).tobytes())
    return [float(x) for x in np.frombuffer(found.digest(), np.uint16)]


# Inputs in this machine's memory: candidates of one kernel that follow each other share them.
_kept: dict[tuple[Kernel, Case], list[Any]] = {}


def _arrays(kernel: Kernel, case: Case, device: Any) -> list[Any]:
    """Inputs of a call; those of the last two kernels and situations are kept."""
    here = str(device) == "cpu:0"  # a remote one is written otherwise
    if here and (kernel, case) in _kept:
        return _kept[kernel, case]
    arrays = [_upload(array, device) for array in arguments(kernel, case, packed=True)]
    if here:
        while len(_kept) > 1:
            _kept.pop(next(iter(_kept)))
        _kept[kernel, case] = arrays
    return arrays


# What a runner does with a loaded kernel: (module, device, kernel, cases) -> numbers.
Use = Callable[[Any, Any, Kernel, Sequence[Case]], list[float]]


def _upload(array: Any, device: Any) -> Any:
    import tvm

    return tvm.runtime.tensor(array, device)


def allocate_here(use: Use, kernel: Kernel, cases: Sequence[Case], threads: int) -> Callable[..., list[Any]]:
    """`f_alloc_argument` of MetaSchedule's LocalRunner: what `run_here` needs to know; arrays are made there."""
    return lambda _device, _info, _repeat: [(use, kernel, tuple(cases), threads)]


def run_here(module: Any, device: Any, _config: Any, repeated: Sequence[Any]) -> list[float]:
    """`f_run_evaluator` of the LocalRunner."""
    from ds41_tvm.runtime.threads import use_threads

    use, kernel, cases, threads = repeated[0]
    use_threads(threads)
    return list(use(module, device, kernel, cases))


def allocate_there(use: Use, kernel: Kernel, cases: Sequence[Case], threads: int) -> Callable[..., list[Any]]:
    """`f_alloc_argument` of the RPCRunner."""
    return lambda _session, _device, _info, _repeat: [(use, kernel, tuple(cases), threads)]


def run_there(session: Any, module: Any, device: Any, _config: Any, repeated: Sequence[Any]) -> list[float]:
    """`f_run_evaluator` of the RPCRunner: the other machine's pool gets as many threads as were asked for."""
    use, kernel, cases, threads = repeated[0]
    all_cores = 1
    session.get_function("runtime.config_threadpool")(all_cores, threads)
    return list(use(module, device, kernel, cases))
