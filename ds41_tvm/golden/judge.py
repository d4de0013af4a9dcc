"""Judging the arrays that an implementation gives against a recorded case.

* Selection: per query the same set of positions. Another set passes only in a case that has rounding ties
  (`selection_differs` names some), if every position swapped in or out has recorded scores at most one bf16
  step apart, and if such rows are few.
* Values: over the rows whose selection agrees, relative Frobenius error at most max(4 * spread, 2e-3), where
  spread is how far the recorded run and one with torch's own float32 accumulation lie apart.
* Candidates and what is masked: equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.golden.case import CACHES, Array, GoldenCase
from ds41_tvm.numerics.formats import bf16_decode

FLOOR = 2e-3
SPREADS = 4.0
# Rounding ties: at most this part of a selection's rows, and always one.
FEW = 0.02
REQUIRED = ("out", "selection")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as recorded; `row` is (sequence, token of the step), None for a whole array."""

    layer: int
    step: int | None
    row: tuple[int, int] | None
    kind: str
    got: Any
    expected: Any

    def __str__(self) -> str:
        step = "at the end" if self.step is None else f"step {self.step}"
        row = "" if self.row is None else f" sequence {self.row[0]} token {self.row[1]}"
        return f"layer {self.layer} {step}{row}: {self.kind}: got {self.got}, expected {self.expected}"


def judge(
    case: GoldenCase, produced: Mapping[str, Array], layers: Iterable[int] | None = None
) -> list[Finding]:
    """Compare ``{what}.{layer}.{step}`` arrays [batch, tokens, ...], laid out as `GoldenCase.get` gives them.

    ``out``, and ``selection`` where a layer has one (int, -1 = none, any order and width), must be there for
    every recorded step of `layers` (default: all); further arrays are judged where both sides have them.
    Returns what differs, empty if all is as it should be.
    """
    chosen = set(range(case.config.n_layers) if layers is None else layers)
    findings: list[Finding] = []
    agrees: dict[tuple[int, int], NDArray[np.bool_]] = {}
    recorded = [entry for entry in case.recorded() if entry[1] in chosen]
    # Selections first: they decide which rows of the other arrays count.
    for what, layer, step in sorted(recorded, key=lambda entry: entry[0] != "selection"):
        name = f"{what}.{layer}" if step is None else f"{what}.{layer}.{step}"
        if name not in produced:
            if what in REQUIRED:
                findings.append(Finding(layer, step, None, what, "nothing", "an array"))
            continue
        got, expected = np.asarray(produced[name]), case.get(what, layer, step)
        if what == "selection":
            assert step is not None
            same, found = _judge_selection(case, layer, step, got, expected)
            agrees[layer, step] = same
            findings += found
        elif what == "window":
            findings += _judge_sets(layer, step, what, got, expected)
        else:
            rows = agrees.get((layer, step)) if step is not None and what in ("o", "out") else None
            findings += _judge_values(case, layer, step, what, got, expected, rows)
    return findings


def _judge_sets(layer: int, step: int | None, what: str, got: Array, expected: Array) -> list[Finding]:
    found = []
    for row in np.ndindex(*expected.shape[:2]):
        mine, theirs = _set(got[row]), _set(expected[row])
        if mine != theirs:
            found.append(
                Finding(layer, step, (row[0], row[1]), what, sorted(mine - theirs), sorted(theirs - mine))
            )
    return found


def _judge_selection(
    case: GoldenCase, layer: int, step: int, got: Array, expected: Array
) -> tuple[NDArray[np.bool_], list[Finding]]:
    """Which rows agree, and the rows that neither agree nor differ by a rounding tie."""
    same = np.ones(expected.shape[:2], bool)
    if got.shape[:2] != expected.shape[:2]:
        return same, [Finding(layer, step, None, "selection shape", got.shape, expected.shape)]
    found: list[Finding] = []
    scores = _recorded_scores(case, layer, step) if case.selection_differs else None
    for finding in _judge_sets(layer, step, "selection", got, expected):
        assert finding.row is not None
        same[finding.row] = False
        if scores is None or not _is_rounding_tie(scores[finding.row], finding.got, finding.expected):
            found.append(finding)
    few = max(1, int(FEW * same.size))
    if not found and (~same).sum() > few:
        differ = int((~same).sum())
        found.append(
            Finding(layer, step, None, "selections that differ by rounding", differ, f"at most {few}")
        )
    return same, found


def _recorded_scores(case: GoldenCase, layer: int, step: int) -> Array | None:
    source = case.config.role(layer).index_source
    if source is None or ("index_score", source, step) not in set(case.recorded()):
        return None
    return case.get("index_score", source, step)


def _is_rounding_tie(scores: Array, swapped_in: list[int], swapped_out: list[int]) -> bool:
    if len(swapped_in) != len(swapped_out) or max(swapped_in) >= len(scores):
        return False
    swapped = scores[swapped_in + swapped_out]
    steps = _ordered(swapped)
    return bool(np.isfinite(bf16_decode(swapped)).all() and steps.max() - steps.min() <= 1)


def _ordered(bits: Array) -> NDArray[np.int64]:
    """bf16 bits as integers that count bf16 steps."""
    magnitude = (bits & 0x7FFF).astype(np.int64)
    return np.where(bits & 0x8000, -magnitude, magnitude)


def _judge_values(
    case: GoldenCase,
    layer: int,
    step: int | None,
    what: str,
    got: Array,
    expected: Array,
    rows: NDArray[np.bool_] | None,
) -> list[Finding]:
    if step is not None and what not in CACHES and what != "kv_rows":
        got = got[:, got.shape[1] - expected.shape[1] :]
    if got.shape != expected.shape:
        return [Finding(layer, step, None, f"{what} shape", got.shape, expected.shape)]
    if expected.dtype == bool:
        return _judge_sets(layer, step, what, _positions(got), _positions(expected))
    mine, theirs = bf16_decode(got).astype(np.float64), bf16_decode(expected).astype(np.float64)
    if rows is not None:
        kept = rows[:, rows.shape[1] - expected.shape[1] :]
        mine, theirs = mine[kept], theirs[kept]
    if what == "index_score":
        hidden, expected_hidden = np.isneginf(mine), np.isneginf(theirs)
        if (hidden != expected_hidden).any():
            counts = int(hidden.sum()), int(expected_hidden.sum())
            return [Finding(layer, step, None, "hidden scores", *counts)]
        mine, theirs = mine[~hidden], theirs[~hidden]
    limit = max(SPREADS * case.spread.get(what, 0.0), FLOOR)
    error = relative_error(mine, theirs)
    if error <= limit:
        return []
    return [Finding(layer, step, None, f"{what} error", error, f"at most {limit:.3g}")]


def relative_error(got: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """||got - expected|| / ||expected|| (Frobenius); infinite if not finite, or if only `got` is not zero."""
    if not (np.isfinite(got).all() and np.isfinite(expected).all()):
        return float("inf")
    difference, size = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _positions(mask: Array) -> Array:
    """A mask over positions as the positions it holds, -1 elsewhere."""
    return np.where(mask, np.arange(mask.shape[-1]), -1)


def _set(row: Array) -> set[int]:
    return {int(position) for position in row if position >= 0}
