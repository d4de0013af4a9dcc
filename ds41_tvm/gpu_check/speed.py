"""How fast: every kind of layer in a decode step and in a prompt, and each of its kernels, beside the machine's
rates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds41_tvm.bench import kernel_work
from ds41_tvm.bench.work import attended
from ds41_tvm.bench.work import layer as layer_work
from ds41_tvm.gpu_check.correct import device_runner
from ds41_tvm.gpu_check.fill import bits
from ds41_tvm.gpu_check.timing import seconds
from ds41_tvm.runtime.device import Device
from ds41_tvm.runtime.runner import Runner

Row = dict[str, Any]
Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


class Kernel(NamedTuple):
    """One call of a kernel, run alone; bytes and operations (of index scores, too) as `kernel_work` counts them."""

    kernel: str
    seconds: float
    bytes: float | None = None
    flops: float | None = None


class Recording:
    """Kernels that remember their calls while `calls` is a list."""

    def __init__(self) -> None:
        self.calls: list[Call] | None = None

    def wrap(self, functions: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The functions, each noting its name and arguments."""
        return {name: self._noting(name, function) for name, function in functions.items()}

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> None:
            if self.calls is not None:
                self.calls.append((name, function, arguments))
            function(*arguments)

        return call


def copy_rate(device: Device, size: int) -> float:
    """Bytes a second, read and written, of copying `size` bytes."""
    source, target = device.zeros((size,), np.uint8), device.empty((size,), np.uint8)
    return 2 * size / seconds(device, lambda: device.copy(target, source))


def layers(
    folder: Path, artifact: str, prompt: int, rates: Mapping[str, float], least: float, emulate: bool = False
) -> Iterator[Row]:
    """Rows of both phases: a prompt of `prompt` tokens at once, then a token after it."""
    recording = Recording()
    runner = device_runner(folder, artifact, emulate, recording.wrap)
    sequence, device = runner.new_sequence(), runner.device
    whole = math.lcm(*(runner.rows_in_place(layer) for layer in runner.layers))
    prompt = -(-prompt // whole) * whole
    shape = (prompt, runner.config.dim)
    x, out = bits(device, shape, 1), device.empty(shape, np.uint16)
    for phase, tokens in (("prefill", prompt), ("decode", 1)):
        step = runner.step([(sequence, tokens)])
        for layer in runner.layers:
            recording.calls = []
            runner.forward(layer, x[:tokens], step, out=out[:tokens])
            calls, recording.calls = recording.calls, None

            def work(layer: int = layer, tokens: int = tokens, step: Any = step) -> None:
                runner.run_layer(layer, x[:tokens], step, out[:tokens])

            time = seconds(device, work, least)
            times = [seconds(device, functools.partial(f, *given), least) for _, f, given in calls]
            counted = _counted(runner, layer, sequence.length, tokens, [name for name, *_ in calls])
            kernels = [Kernel(name, t, *amounts) for (name, *_), t, amounts in zip(calls, times, counted, strict=True)]
            yield _row(runner, artifact, phase, layer, (sequence.length, tokens), time, rates, kernels)
        runner.commit(step)


def _counted(
    runner: Runner, layer: int, start: int, tokens: int, names: list[str]
) -> list[tuple[float | None, float | None]]:
    """Bytes and operations of the kernels of a layer; unknown where they were not called one for one."""
    counted = kernel_work.calls(runner.program, layer, start, tokens, runner.device.parallel)
    found = [call for call in counted if not call.kernel.startswith("copy_rows")]  # those are the commit's
    if [call.kernel for call in found] != names:
        return [(None, None)] * len(names)
    return [(call.work.bytes, call.work.flops + call.work.dots) for call in found]


def _row(
    runner: Runner, artifact: str, phase: str, layer: int, part: tuple[int, int], time: float,
    rates: Mapping[str, float], kernels: list[Kernel],
) -> Row:  # fmt: skip
    role, linear, (start, tokens) = runner.config.role(layer), runner.program.linear, part
    work = layer_work(runner.config, role, linear, [part])
    floor = max(work.bytes / rates["copy"], work.flops / rates["matrix"] if rates.get("matrix") else 0)
    of_attention = sum(k.seconds for k in kernels if k.kernel.startswith("sparse_attention"))
    flops = attended(runner.config, role, start, tokens).flops
    return {
        "artifact": artifact, "linear": linear, "phase": phase, "layer": layer, "kind": role.kind, "ratio": role.ratio,
        "tokens": tokens, "context": start + tokens, "seconds": time, "bytes": work.bytes, "flops": work.flops,
        "GB/s": work.bytes / time / 1e9, "TFLOP/s": work.flops / time / 1e12,
        "floor": floor, "times_floor": time / floor if floor else None,
        "attention TFLOP/s": flops / of_attention / 1e12 if of_attention else None,
        "kernels": [k._asdict() for k in kernels],
    }  # fmt: skip


def matrix_rate(folder: Path, artifact: str, rows: int, emulate: bool = False) -> float:
    """FLOP a second of the artefact's own product of largest size with `rows` rows, where torch is not there to ask."""
    recording = Recording()
    runner = device_runner(folder, artifact, emulate, recording.wrap)
    tokens = max(1, rows // runner.rows_in_place(runner.layers[0])) * runner.rows_in_place(runner.layers[0])
    x = bits(runner.device, (tokens, runner.config.dim), 2)
    step = runner.step([(runner.new_sequence(), tokens)])
    recording.calls = []
    runner.forward(runner.layers[0], x, step)
    best = 0.0
    for name, function, arguments in recording.calls:
        if name.startswith("linear"):
            linear = next(k for k in runner.program.kernels() if k.name == name)
            sizes = dict(linear.params)
            flops = 2 * tokens * int(sizes["n"]) * int(sizes["k"])
            best = max(best, flops / seconds(runner.device, functools.partial(function, *arguments)))
    return best
