"""A contestant in a process of its own.

Its threads then neither compete with ours (idle workers of OpenMP and of TVM's pool go on spinning for a while) nor
share our memory, and its library can be held to an instruction set by environment variables, which are read once.
Requests and answers are lines of JSON; arrays are made where they are used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from ds41_tvm.bench.cases import Timing
from ds41_tvm.bench.machine import resident
from ds41_tvm.errors import PeerError, UsageError

PEERS = ("torch", "torch-mv", "torch-f32", "onnxruntime")
# Settings that keep a peer to an instruction set. oneDNN: bf16 products; MKL: f32 products; ATen: everything else.
ISA: dict[str, dict[str, str]] = {
    "host": {},
    "avx512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


class Build(msgspec.Struct, frozen=True):
    """What a peer is made of: its name, the configuration (official names), layers, threads, longest context."""

    peer: str
    config: dict[str, Any]
    layers: tuple[int, ...]
    threads: int
    longest: int


class Request(msgspec.Struct, frozen=True):
    """A call of a contestant's method."""

    method: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True):
    """Its result; or the message of an error, `refused` if that is one of ours to be told as wrong usage."""

    value: Any = None
    error: str | None = None
    refused: bool = False


class Peer:
    """`name` of `PEERS` in a process of its own. Raises UsageError if what it needs is not installed."""

    def __init__(self, build: Build, isa: str = "host") -> None:
        self.name = build.peer
        environment = os.environ | ISA[isa] | {"OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds41_tvm.bench.peer_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        try:
            self.version: str = self._ask(build)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefill(self, tokens: int, chunk: int) -> Timing:
        """See `bench.ours.Ours`."""
        return msgspec.convert(self._call("prefill", tokens=tokens, chunk=chunk), Timing, strict=False)

    def prepare(self, context: int, batch: int) -> int:
        return int(self._call("prepare", context=context, batch=batch))

    def decode(self) -> Timing:
        return msgspec.convert(self._call("decode"), Timing, strict=False)

    def single(self, what: str, sizes: dict[str, int], times: int) -> list[float]:
        """Seconds of a single operator; empty if the peer has no such thing."""
        return [float(t) for t in self._call("single", what=what, sizes=sizes, times=times)]

    def memory(self) -> dict[str, int]:
        """Resident bytes now and at most."""
        return resident(self._process.pid)

    @property
    def process(self) -> int:
        """Its process number."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._ask(Request(method, arguments))

    def _ask(self, message: Build | Request) -> Any:
        process = self._process
        assert process.stdin is not None  # both were asked for
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            code = process.wait()
            why = "killed, perhaps for memory" if code == -9 else f"exit code {code}"
            raise PeerError(f"{self.name} ended ({why}); measure without it, or fewer layers and shorter contexts")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.error is not None:
            raise (UsageError if reply.refused else PeerError)(f"{self.name}: {reply.error}")
        return reply.value


def peer_names(text: str) -> tuple[str, ...]:
    """``torch,torch-f32`` or ``none``. Raises UsageError naming what is expected."""
    names = [] if text.strip() in ("", "none") else [word.strip() for word in text.split(",")]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UsageError(
            f"--against {text!r}: {unknown[0]!r} is unknown; expected peers among {', '.join(PEERS)}, or none"
        )
    return tuple(dict.fromkeys(names))


def cpu_seconds(processes: Iterable[int]) -> float:
    """Processor time that the processes have used, as the system counts it; 0 where it does not say."""
    ticks = 0
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Processor time that this machine's processors were busy, or not given to it by the host; 0 where unknown."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, soft, steal = (int(x) for x in file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
