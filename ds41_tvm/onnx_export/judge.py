"""Judging one step of an engine by the compiled layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.config import AttentionConfig
from ds41_tvm.numerics.formats import U16, bf16_decode, bf16_encode
from ds41_tvm.onnx_export.play import Array

FEW = 0.02  # part of the rows whose selection may differ by a rounding tie


@dataclass
class Row:
    """One step of one engine: selections that differ from the compiled layers', and the worst error of y."""

    step: int
    tokens: int
    engine: str
    selections: int = 0
    differ: int = 0
    by_rounding: int = 0
    error: float | None = None
    layer: int | None = None
    seconds: float = 0.0
    ok: bool = True
    note: str = ""


def judge_step(
    config: AttentionConfig,
    layers: tuple[int, ...],
    got: Mapping[str, Array],
    expected: Mapping[int, tuple[U16, dict[str, Any]]],
    row: Row,
    tolerance: float,
) -> None:
    """Fill in `row`: selections and outputs of one step against what the compiled layers gave."""
    row.error = 0.0
    agree: dict[int, NDArray[np.bool_]] = {}
    for layer in layers:
        if f"selection.{layer}" in got:
            chosen, trace = got[f"selection.{layer}"], expected[layer][1]
            rows = chosen.reshape(len(trace["topk"]), chosen.shape[-1])  # may have no columns
            agree[layer] = _judge_selections(rows, trace["topk"], trace["scores"], row)
    if row.differ or row.by_rounding > max(1, int(FEW * row.selections)):
        row.ok = False
    for layer in layers:
        source = config.role(layer).index_source
        y: Array = bf16_decode(expected[layer][0]).astype(np.float64)
        mine: Array = got[f"y.{layer}"].reshape(y.shape).astype(np.float64)
        if source in agree:
            mine, y = mine[agree[source]], y[agree[source]]
        if not np.array_equal(bf16_decode(bf16_encode(mine.astype(np.float32))), mine):
            row.note, row.ok = f"y.{layer} holds values that are not bf16", False
        size = float(np.linalg.norm(y))
        error = float(np.linalg.norm(mine - y)) / size if size else float(np.linalg.norm(mine))
        if not error <= row.error:
            row.error, row.layer = error, layer
    row.ok = row.ok and bool(row.error <= tolerance)


def _judge_selections(mine: Array, theirs: Array, scores: U16, row: Row) -> NDArray[np.bool_]:
    """Which rows choose the same positions; the others counted in `row`, as rounding ties where they are."""
    same = np.ones(len(theirs), bool)
    for t in range(len(theirs)):
        ours, wanted = ({int(p) for p in side[t] if p >= 0} for side in (mine, theirs))
        if ours == wanted:
            continue
        same[t] = False
        swapped = sorted(ours ^ wanted)
        tie = len(ours) == len(wanted) and swapped[-1] < scores.shape[1] and _one_step_apart(scores[t, swapped])
        row.by_rounding += tie
        row.differ += not tie
    row.selections += len(theirs)
    return same


def _one_step_apart(bits: U16) -> bool:
    """Whether these bf16 numbers lie within one step of bf16."""
    magnitude = (bits & 0x7FFF).astype(np.int64)
    order = np.where(bits & 0x8000, -magnitude, magnitude)
    return bool(magnitude.max() < 0x7F80 and order.max() - order.min() <= 1)
