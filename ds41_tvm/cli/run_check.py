"""The check of `ds41-tvm run`: the same tokens through the NumPy reference, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.cli.run_input import Inputs, Work
from ds41_tvm.cli.run_layers import LayerResult, Opened
from ds41_tvm.errors import UsageError
from ds41_tvm.golden.judge import FEW, FLOOR, SPREADS, relative_error
from ds41_tvm.numerics.formats import bf16_decode
from ds41_tvm.reference.layer import Reference
from ds41_tvm.reference.linear import Accumulate

Report = Callable[[str, int, int], None]
# By reference run, sequence, layer: arrays by name, a row per token.
Found = dict[str, list[dict[int, dict[str, NDArray[Any]]]]]

# Multiplications (weights times tokens) that the reference does in about a minute, and in about a second.
LONG, SHORT = 2e11, 2e9
CALL = 32  # a call of the reference reads and converts all weights: about the work of so many tokens
FEWEST = 16  # tokens checked however large the layers are
# Without a second run to tell how far rounding carries: what it did at released sizes, with margin.
LIMIT_RELEASED = 3e-2
NEAR = 0.04  # of a row's root mean square score: how far a tie by rounding may lie apart


@dataclass(frozen=True)
class Agreement:
    """Of one layer: rows compared, selections that differ (`near`: only between scores that rounding can swap), the
    relative Frobenius error of the output and the greatest that passes.
    """

    rows: int
    selections: int
    differ: int
    near: int
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than rounding."""
        few = max(1, int(FEW * self.selections))
        return self.error <= self.limit and self.differ == self.near and self.near <= few


@dataclass(frozen=True)
class Part:
    """What of a run is checked: the first `tokens` of each sequence, in the run's own steps if that is `all` of it."""

    tokens: int
    all: bool
    exact: bool  # whether the reference also runs with sums in float64


def part_to_check(opened_weights: int, work: Work) -> Part:
    """As much of the run as the reference does in about a minute. `opened_weights`: weights of all layers together."""
    calls = work.prefill_steps + work.decode
    cost = opened_weights * (sum(work.totals) + CALL * calls * len(work.prompts))
    if cost <= LONG:
        return Part(max(work.totals), True, cost <= SHORT)
    tokens = int(LONG / opened_weights / len(work.prompts)) - CALL
    return Part(min(max(FEWEST, tokens), work.chunk), False, False)


def check(
    opened: Opened, work: Work, inputs: Inputs, part: Part, results: dict[int, LayerResult], report: Report
) -> dict[int, Agreement]:
    """Compare the first rows of every sequence with the reference. Raises UsageError if there are no weights for it."""
    if opened.weights is None:
        raise UsageError("--check needs the weights of the checkpoint; give --checkpoint")
    runs: tuple[Accumulate, ...] = ("f64", "f32") if part.exact else ("f32",)
    total, done = len(runs) * len(work.prompts) * len(opened.runner.layers), 0
    found: Found = {run: [] for run in runs}
    for run in runs:
        program = opened.runner.program
        model = Reference(program.config, opened.weights, program.layers, opened.linear, program.ties, opened.keys, run)
        for i in range(len(work.prompts)):
            rows: dict[int, list[dict[str, NDArray[Any]]]] = {layer: [] for layer in model.layers}
            sequence = model.new_sequence()
            for start, count in _pieces(work, part, i):
                for layer in model.layers:
                    starts, counts = [0] * len(work.prompts), [0] * len(work.prompts)
                    starts[i], counts[i] = start, count
                    trace: dict[str, Any] = {}
                    model.forward(layer, inputs.rows(layer, starts, counts), start, sequence, trace)
                    rows[layer].append({k: trace[k] for k in ("out", "selection", "index_score") if k in trace})
                    if start == 0:
                        done += 1
                        report("check", done, total)
            found[run].append({layer: _joined(parts) for layer, parts in rows.items()})
    return {layer: _agreement(layer, found, results[layer]) for layer in opened.runner.layers}


def _pieces(work: Work, part: Part, i: int) -> list[tuple[int, int]]:
    """(start, tokens) of the calls for sequence i. A part is one call: it lies within the first step."""
    if not part.all:
        return [(0, min(part.tokens, work.prompts[i]))]
    pieces, start = [], 0
    for counts in work.steps():
        if counts[i]:
            pieces.append((start, counts[i]))
            start += counts[i]
    return pieces


def _joined(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Rows of all calls; scores padded to the same number of positions with -infinity."""
    joined = {}
    for what in parts[0]:
        arrays = [part[what] for part in parts]
        width = max(array.shape[1] for array in arrays)
        fill = 0xFF80 if what == "index_score" else -1
        if what != "out":
            arrays = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=fill) for a in arrays]
        joined[what] = np.concatenate(arrays)
    return joined


def _agreement(layer: int, found: Found, result: LayerResult) -> Agreement:
    expected = [rows[layer] for rows in next(iter(found.values()))]
    selections = differ = near = 0
    same = [np.ones(len(rows["out"]), bool) for rows in expected]
    for i, rows in enumerate(expected):
        if not result.selection:
            break
        for t, theirs in enumerate(rows["selection"]):
            selections += 1
            mine, other = ({int(p) for p in row if p >= 0} for row in (result.selection[i][t], theirs))
            if mine != other:
                same[i][t] = False
                differ += 1
                near += _is_near(rows["index_score"][t], mine - other, other - mine)
    kept = [bf16_decode(result.out[i][: len(s)])[s].astype(np.float64) for i, s in enumerate(same)]
    theirs_out = [bf16_decode(rows["out"])[s].astype(np.float64) for rows, s in zip(expected, same, strict=True)]
    error = relative_error(np.concatenate(kept), np.concatenate(theirs_out))
    limit = LIMIT_RELEASED
    if "f64" in found:
        exact, rounded = (
            np.concatenate([bf16_decode(rows[layer]["out"]) for rows in found[run]]).astype(np.float64)
            for run in ("f64", "f32")
        )
        limit = max(SPREADS * relative_error(rounded, exact), FLOOR)
    return Agreement(sum(map(len, same)), selections, differ, near, error, limit)


def _is_near(scores: NDArray[np.uint16], swapped_in: set[int], swapped_out: set[int]) -> bool:
    values = bf16_decode(scores).astype(np.float64)
    swapped = values[sorted(p for p in swapped_in | swapped_out if p < len(values))]
    if len(swapped_in) != len(swapped_out) or not np.isfinite(swapped).all():
        return False
    seen = values[np.isfinite(values)]
    return bool(swapped.max() - swapped.min() <= NEAR * np.sqrt(np.mean(seen * seen)))
