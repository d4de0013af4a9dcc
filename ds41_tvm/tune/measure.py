"""Builder and runner of a search: MetaSchedule's, on this machine or on a fleet behind TVM's RPC tracker."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds41_tvm.cpu_features import available_threads
from ds41_tvm.errors import TuneError, UsageError
from ds41_tvm.program import Kernel
from ds41_tvm.tune import worker
from ds41_tvm.tune.inputs import Case

BUILD_SECONDS, RUN_SECONDS = 60.0, 60.0
NEEDS = ("psutil", "cloudpickle")  # of MetaSchedule's worker processes


class Job(NamedTuple):
    """A built artefact, the kernel in it, and the situations to run it in."""

    path: str
    kernel: Kernel
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Fleet:
    """Machines that registered with a tracker under `key`."""

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, address: str, key: str | None) -> Fleet:
        """From ``HOST:PORT``. Raises UsageError."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"--rpc {address!r}: expected HOST:PORT of an RPC tracker, such as 127.0.0.1:9190")
        if not key:
            raise UsageError("--rpc without --key: expected the key that the servers registered with")
        return cls(host, int(port), key)

    @property
    def name(self) -> str:
        """Part of what a measurement depends on: machines of one key are alike."""
        return f"rpc:{self.key}"

    def servers(self) -> int:
        """Free servers of this key now. Raises TuneError if the tracker does not answer or has none."""
        require("tornado", "--rpc")
        from tvm import rpc

        try:
            with socket.create_connection((self.host, self.port), timeout=5):
                pass
            tracker = rpc.connect_tracker(self.host, self.port)
            summary = tracker.summary()["queue_info"]
        except Exception as error:
            raise TuneError(
                f"the RPC tracker at {self.host}:{self.port} does not answer ({error}); start one with "
                f"python -m tvm.exec.rpc_tracker --host HOST --port PORT"
            ) from error
        found = summary.get(self.key)
        if not found or not found["free"]:
            raise TuneError(
                f"no free server with the key {self.key!r} at {self.host}:{self.port}, which knows "
                f"{', '.join(sorted(summary)) or 'none'}; start one on each machine: "
                f"python -m ds41_tvm.tune.server --tracker HOST:PORT --key {self.key}"
            )
        return int(found["free"])


def require(package: str, what: str, extra: str = "tune") -> None:
    """Raises TuneError if a package of an extra is missing, or lacks what it needs itself."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise TuneError(f"{what} needs the package {package} ({error}); install ds41-tvm[{extra}]") from error


class Bench:
    """Builds and times candidates in worker processes that stay. `built`: a folder for artefacts on their way;
    `device`: what they run on, cpu or cuda.
    """

    def __init__(self, threads: int, built: Path, fleet: Fleet | None = None, device: str = "cpu") -> None:
        for package in NEEDS:
            require(package, "tuning")
        self.threads, self.fleet, self.device = threads, fleet, device
        # Workers inherit these: threads as in `runtime.threads`, and tvm_ffi does not load torch, which takes seconds.
        os.environ.setdefault("TVM_NUM_THREADS", str(available_threads()))
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
        import ds41_tvm.compiler.build  # noqa: F401 - lets interruptions through TVM's calls into Python

        servers = fleet.servers() if fleet else 0  # first of all: it fails where there are none
        worker.prepare()
        self._builder = _builder(min(2, available_threads()), built)
        self._runner = _runner(fleet, servers, device)

    @property
    def place(self) -> str:
        """Where candidates run."""
        return self.fleet.name if self.fleet else "here"

    def build(self, inputs: Sequence[Any]) -> list[Any]:
        """MetaSchedule's BuilderResult of each of its BuilderInputs."""
        return list(self._builder._inst.build(list(inputs)))  # not through TVM, which would lose an interruption

    def run(self, jobs: Sequence[Job], use: worker.Use = worker.evaluate) -> list[Any]:
        """RunnerResult of each job, in order; a fleet works on several at a time. Its numbers are what `use` gives."""
        from tvm.s_tir.meta_schedule.runner import RunnerInput

        inner = self._runner._inst
        allocate = worker.allocate_there if self.fleet else worker.allocate_here
        futures = []
        for path, kernel, situations in jobs:
            inner.f_alloc_argument = allocate(use, kernel, situations, self.threads)
            futures += inner.run([RunnerInput(path, self.device, [])])
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the worker processes."""
        for part in (self._builder, self._runner):
            part._inst.pool.shutdown(wait=False)


def _builder(workers: int, built: Path) -> Any:
    """A LocalBuilder whose workers live on: MetaSchedule's own starts new ones for every batch, seconds each."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.builder.local_builder import _worker_func
    from tvm.support.popen_pool import PopenPoolExecutor, StatusKind

    @derived_object
    class KeptBuilder(PyBuilder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.pool = PopenPoolExecutor(workers, timeout=BUILD_SECONDS, initializer=worker.initialize)
            for _ in range(workers):  # they start now, while the runner's worker does
                self.pool.submit(worker.begin)

        def build(self, build_inputs: list[Any]) -> list[Any]:
            jobs = [(worker.build, worker.export_into(str(built)), job.mod, job.target, None) for job in build_inputs]
            results = []
            for done in self.pool.map_with_error_catching(_call, [(_worker_func, job) for job in jobs]):
                if done.status == StatusKind.COMPLETE:
                    results.append(BuilderResult(done.value, None))
                else:
                    results.append(BuilderResult(None, f"{done.status.name}: {done.value}"))
            return results

    return KeptBuilder()


def _call(job: tuple[Any, tuple[Any, ...]]) -> Any:
    function, arguments = job
    return function(*arguments)


def _runner(fleet: Fleet | None, servers: int, device: str) -> Any:
    from tvm.s_tir.meta_schedule.runner import LocalRunner, RPCConfig, RPCRunner

    if fleet is None:
        return LocalRunner(
            timeout_sec=RUN_SECONDS,
            f_alloc_argument=worker.allocate_here,
            f_run_evaluator=worker.run_here,
            initializer=worker.initialize if device == "cpu" else worker.initialize_gpu,
        )
    return RPCRunner(
        rpc_config=RPCConfig(fleet.host, fleet.port, fleet.key, session_priority=1, session_timeout_sec=RUN_SECONDS),
        f_alloc_argument=worker.allocate_there,
        f_run_evaluator=worker.run_there,
        max_workers=servers,
        initializer=worker.initialize,
    )
