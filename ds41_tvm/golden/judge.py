"""Judging the arrays that an implementation gives against a recorded case.

* Selection: per query the same set of positions. Another set passes only in a case that has rounding ties
  (`selection_differs` names some), if every position swapped in or out has recorded scores at most one bf16
  step apart, and if such rows are few.
* Values: over the rows whose selection agrees, relative Frobenius error at most max(4 * spread, 2e-3), where
  spread is how far the recorded run and one with torch's own float32 accumulation lie apart.
* Candidates and what is masked: equal.
* Another tie rule than the recorded one: a row that differs in which of several equal scores it takes is not
  judged, nor is a row that looks inside candidate blocks chosen that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.golden.case import Array, GoldenCase
from ds41_tvm.numerics.formats import bf16_decode

FLOOR = 2e-3
SPREADS = 4.0
# Rounding ties: at most this part of a selection's rows, and always one.
FEW = 0.02
REQUIRED = ("out", "selection")
Mask = NDArray[np.bool_]


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


@dataclass(frozen=True)
class Error:
    """Relative Frobenius error of one array, and the greatest that passes."""

    what: str
    layer: int
    step: int | None
    error: float
    limit: float


@dataclass
class Verdict:
    """Everything that a comparison finds, empty `findings` if all is as it should be.

    `rows`: queries whose output was recorded; `selections`: queries whose selection was. Of those, `rounding_ties`
    differ by scores one bf16 step apart and `tie_decided` by the tie rule alone. `errors`: every compared array.
    """

    findings: list[Finding] = field(default_factory=list)
    rows: int = 0
    selections: int = 0
    rounding_ties: int = 0
    tie_decided: int = 0
    errors: list[Error] = field(default_factory=list)

    @property
    def worst(self) -> Error | None:
        """The error that comes closest to its limit, or exceeds it most."""
        return max(self.errors, key=lambda e: (e.error / e.limit, e.error), default=None)

    @property
    def mismatches(self) -> int:
        """Queries whose selection is another one, not explained by ties."""
        return sum(f.kind == "selection" for f in self.findings)


def judge(
    case: GoldenCase,
    produced: Mapping[str, Array],
    layers: Iterable[int] | None = None,
    steps: int | None = None,
    ties: str | None = None,
) -> list[Finding]:
    """What differs between `produced` and the case, see `examine`."""
    return examine(case, produced, layers, steps, ties).findings


def examine(
    case: GoldenCase,
    produced: Mapping[str, Array],
    layers: Iterable[int] | None = None,
    steps: int | None = None,
    ties: str | None = None,
) -> Verdict:
    """Compare ``{what}.{layer}.{step}`` arrays [batch, tokens, ...], laid out as `GoldenCase.get` gives them.

    ``out``, and ``selection`` where a layer has one (int, -1 = none, any order and width), must be there for
    every recorded step of `layers` (default: all) below `steps` (default: all, and the caches at the end);
    further arrays are judged where both sides have them. `ties`: the rule that made `produced`, if not the case's.
    """
    chosen = set(range(case.config.n_layers) if layers is None else layers)
    last = len(case.steps) if steps is None else steps
    judging = _Judging(case, ties is not None and ties != case.ties)
    # Candidates, then selections: they decide which rows of the other arrays count.
    order = {"candidates": 0, "selection": 1}
    for what, layer, step in sorted(case.recorded(), key=lambda entry: order.get(entry[0], 2)):
        if layer not in chosen or (step is None and last < len(case.steps)) or (step is not None and step >= last):
            continue
        name = f"{what}.{layer}" if step is None else f"{what}.{layer}.{step}"
        expected = case.get(what, layer, step)
        if what == "out":
            judging.verdict.rows += int(np.prod(expected.shape[:2]))
        if name in produced:
            judging.compare(what, layer, step, np.asarray(produced[name]), expected)
        elif what in REQUIRED:
            judging.found(layer, step, None, what, "nothing", "an array")
    return judging.verdict


class _Judging:
    """One comparison on its way."""

    def __init__(self, case: GoldenCase, other_ties: bool) -> None:
        self.case, self.other_ties = case, other_ties
        self.verdict = Verdict()
        self.agrees: dict[tuple[int, int], Mask] = {}  # rows of a selection that are the same, by (source, step)
        self.loose: dict[tuple[int, int], Mask] = {}  # rows of candidates that another tie rule chose
        self.names = set(case.recorded())

    def found(self, layer: int, step: int | None, row: tuple[int, int] | None, kind: str, got: Any, exp: Any) -> None:
        self.verdict.findings.append(Finding(layer, step, row, kind, got, exp))

    def compare(self, what: str, layer: int, step: int | None, got: Array, expected: Array) -> None:
        if what in ("selection", "window"):
            if got.shape[:2] != expected.shape[:2]:
                self.found(layer, step, None, f"{what} shape", got.shape, expected.shape)
                return
        elif got.ndim == expected.ndim and step is not None and what != "kv_rows":
            got = got[:, max(0, got.shape[1] - expected.shape[1]) :]
        if what == "selection":
            assert step is not None
            self._selection(layer, step, got, expected)
        elif what == "window":
            for row, mine, theirs in _differences(got, expected):
                self.found(layer, step, row, what, mine, theirs)
        elif got.shape != expected.shape:
            self.found(layer, step, None, f"{what} shape", got.shape, expected.shape)
        elif what == "candidates":
            assert step is not None
            self._candidates(layer, step, got, expected)
        else:
            self._values(what, layer, step, got, expected)

    def _candidates(self, layer: int, step: int, got: Array, expected: Array) -> None:
        loose = self.loose[layer, step] = np.zeros(expected.shape[:2], bool)
        scores = self._scores(layer, step) if self.other_ties else None
        size = self.case.config.candidate_block_size
        for row, mine, theirs in _differences(_positions(got), _positions(expected)):
            if scores is not None and _same_scores(_blocks(scores[row], size), *_in_blocks(mine, theirs, size)):
                loose[row] = True
            else:
                self.found(layer, step, row, "candidates", mine, theirs)

    def _selection(self, layer: int, step: int, got: Array, expected: Array) -> None:
        same = self.agrees[layer, step] = np.ones(expected.shape[:2], bool)
        self.verdict.selections += same.size
        scores = self._scores(layer, step) if self.case.selection_differs or self.other_ties else None
        loose = self._loose_rows(layer, step, same.shape)
        rounding, findings = 0, len(self.verdict.findings)
        for row, mine, theirs in _differences(got, expected):
            same[row] = False
            if self.other_ties and (loose[row] or (scores is not None and _same_scores(scores[row], mine, theirs))):
                self.verdict.tie_decided += 1
            elif scores is not None and self.case.selection_differs and _is_rounding_tie(scores[row], mine, theirs):
                rounding += 1
            else:
                self.found(layer, step, row, "selection", mine, theirs)
        self.verdict.rounding_ties += rounding
        few = max(1, int(FEW * same.size))
        if len(self.verdict.findings) == findings and rounding > few:
            self.found(layer, step, None, "selections that differ by rounding", rounding, f"at most {few}")

    def _values(self, what: str, layer: int, step: int | None, got: Array, expected: Array) -> None:
        mine, theirs = bf16_decode(got).astype(np.float64), bf16_decode(expected).astype(np.float64)
        rows: Mask | None = None
        if step is not None and what in ("o", "out"):
            rows = self.agrees.get((layer, step))
        elif step is not None and what == "index_score" and self.other_ties:
            rows = ~self._loose_rows(layer, step, got.shape[:2])
        if rows is not None:
            kept = rows[:, rows.shape[1] - expected.shape[1] :]
            mine, theirs = mine[kept], theirs[kept]
        if what == "index_score":
            hidden, expected_hidden = np.isneginf(mine), np.isneginf(theirs)
            if (hidden != expected_hidden).any():
                self.found(layer, step, None, "hidden scores", int(hidden.sum()), int(expected_hidden.sum()))
                return
            mine, theirs = mine[~hidden], theirs[~hidden]
        limit = max(SPREADS * self.case.spread.get(what, 0.0), FLOOR)
        error = relative_error(mine, theirs)
        self.verdict.errors.append(Error(what, layer, step, error, limit))
        if error > limit:
            self.found(layer, step, None, f"{what} error", error, f"at most {limit:.3g}")

    def _loose_rows(self, layer: int, step: int, shape: tuple[int, ...]) -> Mask:
        """Rows of an indexer, or of a layer that reuses its selection, that look inside blocks of another tie rule."""
        source = self.case.config.role(layer).index_source
        candidate_source = None if source is None else self.case.config.role(source).candidate_source
        rows = None if candidate_source is None else self.loose.get((candidate_source, step))
        if rows is None:
            return np.zeros(shape[:2], bool)
        return rows[:, rows.shape[1] - shape[1] :]

    def _scores(self, layer: int, step: int) -> Array | None:
        """The recorded scores, bf16 bits [batch, tokens, positions], if those of every token were recorded."""
        source = self.case.config.role(layer).index_source
        if source is None or ("index_score", source, step) not in self.names:
            return None
        scores = self.case.get("index_score", source, step)
        return scores if scores.shape[1] == self.case.steps[step] else None


def _differences(got: Array, expected: Array) -> Iterable[tuple[tuple[int, int], list[int], list[int]]]:
    """(row, positions only in `got`, positions only in `expected`) of the rows that are not the same set."""
    for row in np.ndindex(*expected.shape[:2]):
        mine, theirs = _set(got[row]), _set(expected[row])
        if mine != theirs:
            yield (row[0], row[1]), sorted(mine - theirs), sorted(theirs - mine)


def _is_rounding_tie(scores: Array, swapped_in: list[int], swapped_out: list[int]) -> bool:
    if len(swapped_in) != len(swapped_out) or max(swapped_in) >= len(scores):
        return False
    swapped = scores[swapped_in + swapped_out]
    steps = _ordered(swapped)
    return bool(np.isfinite(bf16_decode(swapped)).all() and steps.max() - steps.min() <= 1)


def _same_scores(scores: Array, swapped_in: list[int], swapped_out: list[int]) -> bool:
    """Whether both are the same choice but for ties: equal scores, masked positions (which torch takes) not counted."""
    if max([*swapped_in, *swapped_out]) >= len(scores):
        return False
    mine, theirs = (np.sort(_ordered(scores[p][scores[p] != 0xFF80])) for p in (swapped_in, swapped_out))
    return np.array_equal(mine, theirs)


def _blocks(scores: Array, size: int) -> Array:
    """bf16 bits of the best score in each candidate block."""
    padded = np.full(-(-len(scores) // size) * size, 0xFF80, np.uint16)
    padded[: len(scores)] = scores
    order = _ordered(padded).reshape(-1, size)
    best: Array = np.take_along_axis(padded.reshape(-1, size), order.argmax(1)[:, None], 1)[:, 0]
    return best


def _in_blocks(mine: list[int], theirs: list[int], size: int) -> tuple[list[int], list[int]]:
    """Positions as the blocks that hold them."""
    return sorted({p // size for p in mine}), sorted({p // size for p in theirs})


def _ordered(bits: Array) -> NDArray[np.int64]:
    """bf16 bits as integers that count bf16 steps."""
    magnitude = (bits & 0x7FFF).astype(np.int64)
    return np.where(bits & 0x8000, -magnitude, magnitude)


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
