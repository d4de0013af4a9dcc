"""Verifying a build on a recorded case: replay it, judge it, and say how close it came."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.api import build
from ds41_tvm.config import closure
from ds41_tvm.errors import UsageError
from ds41_tvm.golden.case import Array, GoldenCase
from ds41_tvm.golden.judge import Verdict, examine
from ds41_tvm.golden.play import Forward, play, reference_caches, reference_forward
from ds41_tvm.golden.runner import runner_caches, runner_forward
from ds41_tvm.reference.topk import Ties

# (what is being done, how much of it is done, how much there is)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Verified:
    """What came out of one case. `ties`: the rule it was replayed with; times in seconds."""

    case: GoldenCase
    ties: Ties
    layers: tuple[int, ...]
    steps: int
    verdict: Verdict
    build_seconds: float
    run_seconds: float


def verify_case(
    case: GoldenCase,
    *,
    target: str = "cpu",
    ties: Ties | None = None,
    layers: Iterable[int] | None = None,
    steps: int | None = None,
    reference: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Replay `case` through kernels compiled for `target`, or through the NumPy reference, and judge the outcome.

    The index keys that a decode step scores are those the official code scores (``keys="published"``). `ties`: None for
    the rule that the case was recorded with. `layers` and `steps` (the first so many) judge a part; the caches at the
    end are judged where all steps are. Raises ConfigError (layers without their sources, sizes that cannot be built),
    UsageError, TargetError, CheckpointError, CompileError.
    """
    chosen = closure(case.config, layers)
    last = len(case.steps) if steps is None else steps
    if not 1 <= last <= len(case.steps):
        raise UsageError(f"steps {steps}: case {case.name} has {len(case.steps)}; expected 1..{len(case.steps)}")
    played = copy.copy(case)
    played.ties = case.ties if ties is None else ties
    report = progress or (lambda *_: None)

    begin = time.perf_counter()
    if reference:
        forward, references = reference_forward(played, chosen)
    else:
        runner = build(
            played.config, played.weights, chosen, target, played.linear, played.ties, threads, "published",
            progress=lambda done, total: report("compile", done, total),
        )  # fmt: skip
        forward, sequences = runner_forward(played, runner)
    built = time.perf_counter()
    produced = play(played, _counted(forward, len(chosen) * last, report), chosen, last)
    if last == len(case.steps):
        if reference:
            produced |= reference_caches(played, references)
        else:
            produced |= runner_caches(played, runner, sequences)
    ran = time.perf_counter()
    verdict = examine(case, produced, chosen, last, played.ties)
    return Verified(case, played.ties, chosen, last, verdict, built - begin, ran - built)


def _counted(forward: Forward, total: int, report: Progress) -> Forward:
    """`forward` that tells how many calls of it have returned."""
    done = 0

    def counting(layer: int, step: int, x: NDArray[np.uint16], start: int) -> dict[str, Array]:
        nonlocal done
        result = forward(layer, step, x, start)
        done += 1
        report("replay", done, total)
        return dict(result)

    return counting
