"""The work of `ds41-tvm run`: a runner from a checkpoint, tokens through it, times and results by layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.api import build
from ds41_tvm.checkpoint import Checkpoint, load_checkpoint
from ds41_tvm.cli.limits import check_memory
from ds41_tvm.cli.run_input import Inputs, Work
from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.errors import UsageError
from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.program import Program
from ds41_tvm.target import Target

if TYPE_CHECKING:
    from ds41_tvm.runtime.runner import Runner
    from ds41_tvm.runtime.state import Sequence

Report = Callable[[str, int, int], None]
WEIGHT_BYTES = {"bf16": 2, "fp8": 1, "f32": 4}
FIXED_BYTES = 400 << 20  # the compiler, its modules, score buffers


@dataclass(frozen=True)
class Options:
    """How to build a runner."""

    target: Target
    linear: Literal["bf16", "fp8"] | None
    ties: Literal["lowest-index", "torch-cpu"]
    keys: Literal["own", "published"]
    threads: int | None


@dataclass
class Opened:
    """A runner, whatever it was made from; `weights`: what the reference reads, None where only packed ones exist."""

    runner: Runner
    weights: Mapping[str, Any] | None
    linear: Literal["bf16", "fp8"]
    keys: Literal["own", "published"]
    build_seconds: float


def open_checkpoint(
    directory: Path, layers: tuple[int, ...] | None, work: Work, kept: int, options: Options, report: Report
) -> Opened:
    """Load, compile and pack. `kept`: bytes that results will take.

    Raises CheckpointError, ConfigError (layers without their sources), UsageError (it does not fit into memory).
    """
    config = AttentionConfig.from_file(directory)
    chosen = closure(config, layers)
    report("read checkpoint", 0, 1)
    checkpoint = load_checkpoint(directory, chosen, options.linear)
    report("read checkpoint", 1, 1)
    check_work(config, work)
    program = Program(config=config, layers=chosen, target=options.target, linear=checkpoint.linear, ties=options.ties)
    check_memory(memory_needed(program, work, _converted(checkpoint)) + kept, "this run")
    begin = time.perf_counter()
    runner = build(
        config, _Watched(checkpoint.weights, report), chosen, options.target, checkpoint.linear, options.ties,
        options.threads, options.keys, progress=lambda done, total: report("compile", done, total),
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    checkpoint.release()  # what was converted for packing
    return Opened(runner, checkpoint.weights, checkpoint.linear, options.keys, seconds)


def open_artifact_runner(path: Path, checkpoint: Path | None, options: Options) -> Opened:
    """Load an artefact, with its own weights or those of a checkpoint directory.

    Raises ArtifactError and its classes, CheckpointError.
    """
    from ds41_tvm.artifact.load import open_artifact

    begin = time.perf_counter()
    artifact = open_artifact(path)
    runner = artifact.runner(checkpoint, options.threads, options.keys)
    seconds = time.perf_counter() - begin
    weights = None
    if checkpoint is not None:
        weights = load_checkpoint(checkpoint, runner.layers, runner.program.linear).weights
    return Opened(runner, weights, runner.program.linear, options.keys, seconds)


def check_work(config: AttentionConfig, work: Work) -> None:
    """Raises UsageError if a sequence would grow past the configuration's context."""
    if max(work.totals) > config.max_seq_len:
        raise UsageError(
            f"--prompt and --decode ask for sequences of {max(work.totals)} tokens; this configuration has room for "
            f"{config.max_seq_len} (max_seq_len)"
        )


def memory_needed(program: Program, work: Work, converted: bool) -> int:
    """Bytes that packed weights, caches and the buffers of the largest step take, about."""
    c = program.config
    roles = [c.role(layer) for layer in program.layers]
    weights = sum(
        linear.n * linear.k * WEIGHT_BYTES[linear.weight] for r in roles for linear in program.linears(r).values()
    )
    window, latent = row_bytes("window", c.head_dim), row_bytes("latent", c.head_dim)
    key = row_bytes("index", c.index_head_dim)
    caches = len(work.prompts) * (c.window_size + program.draft) * window * len(roles)
    for role in roles:
        if role.kind == "full":
            caches += sum(total // role.ratio + program.block_rows for total in work.totals) * (latent + key)
            if role.ratio > 1:
                caches += len(work.prompts) * (role.ratio + program.draft) * 2 * c.head_dim * 4
    heads = c.n_heads * c.head_dim * 2
    row = 5 * heads + 4 * c.dim * 2 + c.o_groups * c.o_lora_rank * 4
    row += sum(window + (c.index_topk * 4 if r.kind in ("full", "reindex") else 0) + c.head_dim * 8 for r in roles)
    # Pools double when they are full, and copy.
    return weights * (2 if converted else 1) + 3 * caches + work.widest * row + FIXED_BYTES


def _converted(checkpoint: Checkpoint) -> bool:
    conversions: dict[str, int] = checkpoint.summary()["conversions"]
    return any(count for name, count in conversions.items() if name != "none")


class _Watched(Mapping[str, Any]):
    """Weights that report how many of them have been read."""

    def __init__(self, weights: Mapping[str, Any], report: Report) -> None:
        self._weights, self._report = weights, report
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._weights[name]
        self._seen.add(name)
        self._report("pack weights", len(self._seen), len(self._weights))
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@dataclass
class LayerResult:
    """Of one layer: seconds of each step, and of each sequence the first rows of its output and selection.

    `state_bytes`: cache that the longest sequence holds for it.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    out: list[NDArray[np.uint16]] = field(default_factory=list)
    selection: list[NDArray[np.int32]] = field(default_factory=list)
    state_bytes: int = 0

    @property
    def decode_seconds(self) -> float | None:
        """Median of the decode steps."""
        return statistics.median(self.decode) if self.decode else None


def feed(runner: Runner, work: Work, inputs: Inputs, keep: int, report: Report) -> dict[int, LayerResult]:
    """Run all steps; of each sequence the first `keep` rows are kept."""
    _warm_up(runner, inputs, len(work.prompts))
    c = runner.config
    results = {layer: LayerResult() for layer in runner.layers}
    rows = [min(total, keep) for total in work.totals]
    for layer, result in results.items():
        result.out = [np.zeros((n, c.dim), np.uint16) for n in rows]
        if c.role(layer).kind in ("full", "reindex"):
            result.selection = [np.zeros((n, c.index_topk), np.int32) for n in rows]
    sequences = [runner.new_sequence() for _ in work.prompts]
    starts = [0] * len(sequences)
    done, calls = 0, {"prefill": work.prefill_steps, "decode": work.decode}
    for number, counts in enumerate(work.steps()):
        kind = "prefill" if number < work.prefill_steps else "decode"
        done = done if number != work.prefill_steps else 0
        step = runner.step(zip(sequences, counts, strict=True))
        for layer in runner.layers:
            x = inputs.rows(layer, starts, counts)
            begin = time.perf_counter()
            out = runner.forward(layer, x, step)
            seconds = time.perf_counter() - begin
            result = results[layer]
            (result.prefill if kind == "prefill" else result.decode).append(seconds)
            _keep(result.out, np.asarray(out), starts, counts)
            if result.selection:
                selection = step.done[layer].selection
                assert selection is not None  # every layer with an indexer leaves one
                _keep(result.selection, selection, starts, counts)
            done += 1
            report(kind, done, calls[kind] * len(runner.layers))
        runner.commit(step)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    longest = max(sequences, key=lambda sequence: sequence.length)
    for layer, result in results.items():
        result.state_bytes = state_bytes(runner, longest, layer)
    return results


def state_bytes(runner: Runner, sequence: Sequence, layer: int) -> int:
    """Bytes of cache that a sequence holds for one layer: its part of `Sequence.state_bytes`."""
    c, caches, role = runner.config, runner.caches, runner.config.role(layer)
    size = caches.window_ring * row_bytes("window", c.head_dim)
    if role.kind == "full":
        if role.ratio > 1:
            size += caches.members[role.ratio].unit * 2 * c.head_dim * 4  # f32, two members of pooling
        rows = len(sequence.table(role.ratio)) * runner.program.block_rows
        size += rows * (row_bytes("latent", c.head_dim) + row_bytes("index", c.index_head_dim))
    return size


def _warm_up(runner: Runner, inputs: Inputs, sequences: int) -> None:
    """One token that is thrown away, so that no time counts the start of threads and the first touch of weights."""
    with runner.new_sequence() as sequence:
        step = runner.step([(sequence, 1)])
        for layer in runner.layers:
            runner.forward(layer, inputs.rows(layer, [0] * sequences, [1] + [0] * (sequences - 1)), step)


def _keep(kept: list[NDArray[Any]], rows: NDArray[Any], starts: list[int], counts: tuple[int, ...]) -> None:
    base = 0
    for array, start, count in zip(kept, starts, counts, strict=True):
        n = max(0, min(count, len(array) - start))
        array[start : start + n] = rows[base : base + n]
        base += count
