"""A whole step as one graph of a device: captured once, replayed for every step of the same shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds41_tvm.errors import CaptureError, InputError, UsageError
from ds41_tvm.runtime.device_base import Accelerator

if TYPE_CHECKING:
    from ds41_tvm.runtime.runner import Runner
    from ds41_tvm.runtime.state import Sequence
    from ds41_tvm.runtime.step import Step


class StepGraph:
    """All layers of a step in ascending order, from inputs to outputs that lie on the device, and its commit.

        graph = runner.capture(step, x, out)  # x, out: layer -> array of the device; a step of that shape ran before
        graph.replay(step)  # with what x holds now
        runner.commit(step)
        step = graph.step([(sequence, 1)])  # StepError: of another shape
        graph.fits(step)  # False: the context outgrew the graph

    `capture` runs nothing; the step may be replayed then. Shapes follow the context in leaps, so that a graph serves
    until the context has doubled; at a compression ratio of r, one graph is needed for steps that complete a group and
    one for those that do not. Raises UsageError on the host, InputError, CaptureError.
    """

    def __init__(self, runner: Runner, step: Step, x: Mapping[int, Any], out: Mapping[int, Any]) -> None:
        device = runner.device
        if not isinstance(device, Accelerator):
            raise UsageError("graphs are captured on a device; this runner runs on the host: call forward")
        step.check_current()
        if not step.tokens:
            raise CaptureError("the step has 0 tokens: there is nothing to run; expected 1 or more")
        shape, self._runner, self._device = (step.tokens, runner.config.dim), runner, device
        self._arrays = {layer: (self._place(x, layer, "x", shape), self._place(out, layer, "out", shape))
                        for layer in runner.layers}  # fmt: skip
        published = list(step.published)
        try:
            with device.capture() as layers:
                for layer, (source, target) in self._arrays.items():
                    runner.run_layer(layer, source, step, target)
            with device.capture() as rows:
                runner.keep_rows(step)
        finally:
            step.done.clear()
            step.published[:] = published
        self._layers, self._rows = layers[0], rows[0]
        self._signature = runner.signature(step)
        self._last = step  # its memory is the graph's

    def _place(self, arrays: Mapping[int, Any], layer: int, what: str, shape: tuple[int, int]) -> Any:
        if layer not in arrays:
            raise InputError(f"{what} has no array for layer {layer}; expected one for each of {self._runner.layers}")
        array = self._runner.array_in_place(layer, arrays[layer], f"{what}[{layer}]", shape)
        if array is None:
            rows = self._runner.rows_in_place(layer)
            raise InputError(
                f"{what}[{layer}] cannot be used where it lies; expected an array of the device, contiguous, 64-byte "
                f"aligned, of 1 row or a multiple of {rows}"
            )
        return array

    def step(self, parts: Iterable[tuple[Sequence, int]], stream: Any = None) -> Step:
        """As `Runner.step`, in the memory that the graph uses: the last step planned so must be committed, or given up.

        Raises StepError if the step has another shape.
        """
        self._last = self._runner.step(parts, like=self._last, stream=stream)
        return self._last

    def fits(self, step: Step) -> bool:
        """Whether `replay` can run this step: its signature is that of the captured one."""
        return self._runner.signature(step) == self._signature

    def replay(self, step: Step, stream: Any = None) -> None:
        """Run all layers of `step` with what the inputs hold. Raises CaptureError if the graph does not fit it."""
        step.check_current()
        if not self.fits(step):
            raise CaptureError(
                f"the graph was captured for the signature {self._signature}; this step has "
                f"{self._runner.signature(step)}; plan it with like=, or capture another graph"
            )
        with self._device.using(stream):
            self._device.launch(self._layers)
        self._runner.replayed(step)
        step.graph = self

    def keep_rows(self) -> None:
        """What `commit` asks the device for."""
        self._device.launch(self._rows)
