"""The tables of ``ds41-tvm inspect --floors``."""

from __future__ import annotations

from typing import Any

from ds41_tvm.cli.output import console, table


def show_floors(found: dict[str, Any]) -> None:
    """Print what `bench.floors.floors` found."""
    out, rates = console(), found["rates"]
    out.print(
        f"At {rates['read'] / 1e12:g} TB/s, {rates['products'] / 1e12:g} TFLOP/s of bf16 and twice that of int8; "
        f"bytes and operations of all calls."
    )
    for case in found["cases"]:
        kernels: list[tuple[object, ...]] = [
            (
                k["label"], k["registers"], k["shared"],
                "unknown" if k["occupancy"] is None else f"{k['occupancy']:.0%}",
                k["calls"], *_amounts(k), k["limit"],
            )
            for k in case["kernels"]
        ]  # fmt: skip
        names = ("regs", "shared", "occ.", "calls", "MB", "GFLOP", "µs", "limit")
        out.print(table((case["case"], *names), kernels))
        layers: list[tuple[object, ...]] = [
            (x["layer"], x["kind"], x["ratio"], x["calls"], *_amounts(x), round(x["least"] * 1e6, 2))
            for x in case["layers"]
        ]
        columns = ("kind", "ratio", "kernels", "MB", "GFLOP", "µs", "µs in one piece")
        out.print(table((f"{case['case']}: layer", *columns), layers))


def _amounts(row: dict[str, Any]) -> tuple[float, float, float]:
    """MB, GFLOP and µs, to what can be read."""
    return (
        round(row["bytes"] / 1e6, 3),
        round((row["flops"] + row["dots"]) / 1e9, 3),
        round(row["seconds"] * 1e6, 2),
    )
