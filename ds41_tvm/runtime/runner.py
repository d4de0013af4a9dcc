"""The runner: sequences, steps, layers."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ds41_tvm.config import AttentionConfig
from ds41_tvm.cpu_features import request_tiles
from ds41_tvm.errors import ConfigError, InputError, StepError, TargetError, UsedConcurrently
from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.program import PAD_ROWS, Program
from ds41_tvm.reference.rope import rope_frequencies
from ds41_tvm.runtime.arrays import as_array, borrowed
from ds41_tvm.runtime.device import Array, Device, Host
from ds41_tvm.runtime.graph import StepGraph
from ds41_tvm.runtime.layer import Context, Layer
from ds41_tvm.runtime.memory import Workspace
from ds41_tvm.runtime.persist import restore_sequence
from ds41_tvm.runtime.state import Caches, Sequence
from ds41_tvm.runtime.step import LayerRows, Step, plan_step
from ds41_tvm.runtime.threads import check_threads, use_threads
from ds41_tvm.runtime.trace import add_positions
from ds41_tvm.runtime.weights import LayerWeights, pack_layer, to_device

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_thread(method: Callable[Concatenate[Runner, _P], _R]) -> Callable[Concatenate[Runner, _P], _R]:
    """A method that refuses to run while another thread is inside one: they share scratch buffers and caches."""

    @functools.wraps(method)
    def guarded(self: Runner, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not self._lock.acquire(blocking=False):
            raise UsedConcurrently(
                f"runner.{method.__name__} was called while another thread runs this runner; give each thread its own "
                f"(artifact.runner() shares code and weights), or hold a lock around each call"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._lock.release()

    return guarded


class Runner:
    """Runs the layers of a program over ragged steps.

    `functions` are the program's kernels by name, `weights` the checkpoint's tensors by official name (or packed layers
    by number). `threads`: None for all processors. `keys`: ``own``, the index keys of a layer's own source, so that a
    result does not depend on how a prompt is cut into steps; or ``published``, as the official code does: the keys of
    the layer that last completed a group, which in a decode step in the middle of a group is a later layer in the step
    before. A runner and its sequences belong to one Python thread at a time. `weights_digest`: names the weights, if
    known, in saved sequences. `device`: where caches, weights and scratch memory lie and kernels run; None: the host.

    Raises TargetError if this machine lacks a feature that the kernels were compiled for.
    """

    def __init__(
        self,
        program: Program,
        functions: Mapping[str, Callable[..., Any]],
        weights: Mapping[Any, Any],
        threads: int | None = None,
        keys: str = "own",
        weights_digest: str = "",
        device: Device | None = None,
    ) -> None:
        if keys not in ("own", "published"):
            raise ConfigError(f"keys is {keys!r}; expected 'own' or 'published'")
        missing = program.target.missing_here() if program.target.kind == "cpu" else ()
        if missing or (program.target.has("amx-tile") and not request_tiles()):
            raise TargetError(
                f"the kernels were compiled for {program.target.name}; this machine lacks "
                f"{', '.join(missing) or 'leave to use tile registers'}; compile for 'cpu' here, or for a lower level"
            )
        self.program = program
        self.config = program.config
        self.layers = program.layers
        self.device: Device = device or Host(check_threads(threads))
        self.caches = Caches(program, self.device)
        self.caches.identity.update(keys=keys, weights=weights_digest)
        self._lock = threading.Lock()
        self.workspace = Workspace(self.device)
        bound = self.device.bind(functions)
        self._context = Context(program, bound, self.caches, self.workspace, self.device, keys)
        self._layers = {layer: self._bind(layer, weights) for layer in self.layers}
        self._frequencies = {key: rope_frequencies(self.config, int(key)) for key in (False, True)}

    def _bind(self, layer: int, weights: Mapping[Any, Any]) -> Layer:
        packed = weights.get(layer)
        if not isinstance(packed, LayerWeights):
            packed = pack_layer(self.program, self.config.role(layer), weights)
        return Layer(self._context, self.config.role(layer), to_device(packed, self.device))

    @property
    def threads(self) -> int:
        """Threads that kernels run on; on a device, the tasks that fill it."""
        return self.device.parallel

    def weight_bytes(self, layer: int) -> int:
        """Bytes of a layer's packed weights: what a decode step reads at least."""
        return self._layers[layer].weights.nbytes

    def new_sequence(self) -> Sequence:
        """An empty sequence."""
        return Sequence(self.caches)

    @_one_thread
    def restore(self, path: str | os.PathLike[str]) -> Sequence:
        """A new sequence with what `Sequence.save` wrote: it continues bit-identically. See `runtime.persist`."""
        return restore_sequence(self.caches, Path(path))

    @_one_thread
    def step(self, parts: Iterable[tuple[Sequence, int]], like: Step | None = None, stream: Any = None) -> Step:
        """Plan a step that feeds `count` new tokens to each (sequence, count), rows in that order; 0 tokens are fine.

        Nothing changes until `commit`; a step that is never committed leaves its sequences as they were. Planning new
        tokens of a sequence makes older uncommitted steps with it stale: both would write the same cache rows. Raises
        StepError (not a sequence of this runner, given twice, negative count) and StateError (closed, too long).

        `like`: an earlier step of the same shape, committed or given up, whose memory is used again: a graph that was
        captured over that step then runs this one. `stream`: of a device, see `forward`.
        """
        if like is not None and (not isinstance(like, Step) or like.caches is not self.caches):
            raise StepError("the step given as `like` was not planned by this runner; use one of runner.step(...)")
        with self.device.using(stream):
            return plan_step(self.caches, self._frequencies, parts, like)

    @_one_thread
    def forward(self, layer: int, x: Any, step: Step, trace: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Attention output of `layer` for the tokens of `step`: bf16 ``[tokens, dim]``, of the dtype that x has.

        x: ``[tokens, dim]`` of bf16, as uint16 bits, ml_dtypes.bfloat16 or anything with DLPack on the CPU (torch
        tensors; the answer is then uint16 bits); any strides and alignment. `out`: an array of the same kinds to write
        the result into; it is returned then. Kernels work on whole row tiles: memory of the caller is used in place
        where it is contiguous, 64-byte aligned and has whole tiles (one token, or a multiple of `rows_in_place`), and
        otherwise through a buffer of the runner. The layers of a step run in ascending order, since later ones read
        what earlier ones select. With `trace`, also a dictionary of intermediates, see `runtime.trace`. Raises
        InputError, StepError and StateError before anything runs, UsedConcurrently, AfterFork.

        On a device, x and `out` may lie there (DLPack: torch, CuPy; contiguous): nothing is copied or waited for, and
        without `out` the answer is a `DeviceArray`. A host array is uploaded, and the answer comes back as one. Work
        goes to `stream` (a handle, or a stream of torch or CuPy), None for ``runner.device.stream``.
        """
        if layer not in self._layers:
            raise StepError(f"layer {layer!r} is not part of this runner; expected one of {list(self.layers)}")
        if not isinstance(step, Step) or step.caches is not self.caches:
            raise StepError("the step was not planned by this runner; use runner.step(...)")
        step.check_current()
        self._check_sources(layer, step)
        if not self.device.on_host:
            with self.device.using(stream):
                return self._forward_on_device(layer, x, step, trace, out)
        shape = (step.tokens, self.config.dim)
        bits, dtype = _bits(x, "x", shape)
        target: Any = None if out is None else _bits(out, "out", shape)[0]
        if target is not None and not target.flags.writeable:
            raise InputError("out is read-only; expected an array that can be written")
        traced: dict[str, Any] | None = {} if trace else None
        if step.tokens == 0:
            result = np.zeros(shape, np.uint16)
            step.done.setdefault(layer, _no_rows(self.config))
        else:
            use_threads(self.threads)
            whole = step.tokens == 1 or step.tokens % self.rows_in_place(layer) == 0
            if not (whole and self.device.fits(bits)):
                padded = self.workspace.get("x", (step.tokens + PAD_ROWS, self.config.dim), np.uint16)
                padded[: step.tokens] = bits
                bits = padded
            direct = target if target is not None and whole and self.device.fits(target) else None
            result = self._layers[layer].forward(bits, step, traced, direct)
            if target is not None and direct is None:
                target[...] = result
        if out is not None:
            result = out
        elif dtype is not None:
            result = result.view(dtype)
        if traced is None:
            return result
        add_positions(self, layer, step, traced)
        return result, traced

    def _forward_on_device(self, layer: int, x: Any, step: Step, trace: bool, out: Any) -> Any:
        shape, device = (step.tokens, self.config.dim), self.device
        mine, dtype = self._here(x, "x", shape)
        target = None if out is None else self._here(out, "out", shape)[0]
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise InputError("out is read-only; expected an array that can be written")
        traced: dict[str, Any] | None = {} if trace else None
        if step.tokens == 0:
            step.done.setdefault(layer, step.rows[layer])
            result: Any = np.zeros(shape, np.uint16) if isinstance(mine, np.ndarray) else mine
        else:
            whole = step.tokens == 1 or step.tokens % self.rows_in_place(layer) == 0
            if isinstance(mine, np.ndarray) or not (whole and device.fits(mine)):
                padded = self.workspace.get("x", (step.tokens + PAD_ROWS, self.config.dim), np.uint16)
                source = device.upload(mine) if isinstance(mine, np.ndarray) else mine
                device.copy(padded[: step.tokens], source)
                bits = padded
            else:
                bits = mine
            on_device = target is not None and not isinstance(target, np.ndarray)
            direct = target if on_device and whole and device.fits(target) else None
            result = self._layers[layer].forward(bits, step, traced, direct)
            if on_device and direct is None:
                device.copy(target, result)
            elif isinstance(target, np.ndarray):
                target[...] = device.download(result)
            elif target is None and isinstance(mine, np.ndarray):
                result = device.download(result)
        if out is not None:
            result = out
        elif dtype is not None:
            result = result.view(dtype)
        if traced is None:
            return result
        add_positions(self, layer, step, traced)
        return result, traced

    def _here(self, value: Any, what: str, shape: tuple[int, int]) -> tuple[Array, Any]:
        """`value` as an array of the device if it lies there, else as one of the host; the dtype to answer in."""
        array = borrowed(value, what, self.device)
        if array is None:
            return _bits(value, what, shape)
        if array.dtype != np.uint16 or tuple(array.shape) != shape:
            raise InputError(
                f"{what} is {array.dtype} {list(array.shape)} on the device; this step needs bf16 {list(shape)} "
                f"(tokens, dim)"
            )
        return array, None

    def array_in_place(self, layer: int, value: Any, what: str, shape: tuple[int, int]) -> Array | None:
        """`value` as an array of the device that this layer's kernels take where it lies; None if they cannot."""
        array, _ = self._here(value, what, shape)
        whole = shape[0] == 1 or shape[0] % self.rows_in_place(layer) == 0
        return array if not isinstance(array, np.ndarray) and whole and self.device.fits(array) else None

    def run_layer(self, layer: int, x: Array, step: Step, out: Array) -> None:
        """`forward` between arrays that kernels take where they lie, without a check."""
        self._layers[layer].forward(x, step, None, out)

    def signature(self, step: Step) -> tuple[Any, ...]:
        """Equal for two steps if a graph captured over one runs the other: shapes, and every address that it holds."""
        pools = (self.caches.rings, *self.caches.members.values(), *self.caches.blocks.values())
        shapes = tuple(
            (group.count, self.device.leap(max(1, int(group.most.max(initial=0))))) for group in step.groups.values()
        )
        keys = tuple(step.published) if self._context.keys == "published" else ()
        first = next(iter(step.memory.values()))
        place = first.ctypes.data if self.device.on_host else first.address
        return (step.counts, shapes, keys, place, tuple(pool.changes for pool in pools), self.workspace.changes)

    @_one_thread
    def capture(self, step: Step, x: Mapping[int, Any], out: Mapping[int, Any]) -> StepGraph:
        """A graph of all layers for `step` and its likes, with inputs and outputs by layer; see `StepGraph`."""
        return StepGraph(self, step, x, out)

    @_one_thread
    def replayed(self, step: Step) -> None:
        """Tell that a graph of another library, captured over a step of the same `signature`, ran all layers of it."""
        step.check_current()
        for layer in self.layers:
            self._layers[layer].mark_done(step)

    def rows_in_place(self, layer: int) -> int:
        """Numbers of tokens of which `forward` of this layer uses the caller's memory: 1 and the multiples of this."""
        return self._layers[layer].whole_rows

    def _check_sources(self, layer: int, step: Step) -> None:
        role = self.config.role(layer)
        for source in (role.kv_source, role.index_source, role.candidate_source):
            if source not in (None, layer) and source not in step.done:
                raise StepError(
                    f"layer {layer} reads what layer {source} leaves in the step, and that has not run; call "
                    f"runner.forward for the layers in ascending order"
                )

    @_one_thread
    def commit(self, step: Step, stream: Any = None) -> None:
        """Make the step's tokens part of their sequences. All layers of the runner must have run on it.

        Raises StepError if a layer has not run, or the step was committed before or no longer fits its sequences.
        """
        if not isinstance(step, Step) or step.caches is not self.caches:
            raise StepError("the step was not planned by this runner; use runner.step(...)")
        step.check_current()
        waiting = [layer for layer in self.layers if layer not in step.done]
        if waiting:
            raise StepError(f"layers {waiting} have not run on this step; run all of {list(self.layers)} before commit")
        if step.tokens:
            with self.device.using(stream):
                if step.graph is not None:
                    step.graph.keep_rows()
                else:
                    self.keep_rows(step)
        for i, sequence in enumerate(step.sequences):
            if step.counts[i]:
                sequence.published = step.published[i]
                sequence.advance(sequence.length + step.counts[i])
        step.committed = True

    def keep_rows(self, step: Step) -> None:
        """Copy the last rows of each sequence into its rings."""
        if self.device.on_host:
            use_threads(self.threads)
        c, context = self.config, self._context
        copy, size = context[self.program.copy_rows(row_bytes("window", c.head_dim))], 4 * c.head_dim
        for layer in self.layers:
            copy(step.done[layer].window, *step.plan.keep, self.caches.rings.arrays[layer])
        for ratio, pool in self.caches.members.items():
            copy, keep = context[self.program.copy_rows(size)], step.groups[ratio].keep
            assert keep is not None  # planned for every ratio above 1
            for layer in self.caches.sources[ratio]:
                members = step.done[layer].members
                assert members is not None  # every source of ratio above 1 leaves them
                for values, place in zip(members, keep[1:], strict=True):
                    copy(values.view(np.uint8), keep[0], place, pool.arrays[layer].view(np.uint8).reshape(-1, size))


def _no_rows(config: AttentionConfig) -> LayerRows:
    nothing = np.zeros((0, config.head_dim), np.float32)
    return LayerRows(np.zeros((0, 0), np.uint8), (nothing, nothing), np.zeros((0, config.index_topk), np.int32), None)


def _bits(x: Any, what: str, shape: tuple[int, int]) -> tuple[Array, Any]:
    """x as uint16 bits and the dtype to answer in, None for bits. Raises InputError unless it is bf16 of that shape."""
    array, name = as_array(x, what)
    if array.dtype != np.uint16:
        raise InputError(
            f"{what} has dtype {name}; expected bf16, as uint16 bits, ml_dtypes.bfloat16 or through DLPack: round "
            f"float32 with ds41_tvm.numerics.formats.bf16_encode"
        )
    if array.shape != shape:
        raise InputError(f"{what} has shape {tuple(array.shape)}; this step needs {shape} (tokens, dim)")
    return array, x.dtype if isinstance(x, np.ndarray) and name == "bfloat16" else None
