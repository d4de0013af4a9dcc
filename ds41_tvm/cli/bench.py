"""``ds41-tvm bench``: whole layers beside torch and the machine's read bandwidth."""

from __future__ import annotations

import tempfile
from json import dumps
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from cyclopts import Parameter

from ds41_tvm.cli.options import load_config, parse_layers
from ds41_tvm.cli.output import console, table
from ds41_tvm.errors import UsageError

PEERS = ("torch", "torch-mv", "torch-f32", "onnxruntime")


def bench(
    *,
    config: str = "flash",
    layers: str = "0,2,20,24",
    prompt: int = 1024,
    decode: int = 16,
    rounds: int = 3,
    linear: str = "bf16",
    against: str = "torch-mv",
    threads: int | None = None,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Time layers at random weights beside the official arithmetic in torch, in turn, in one process.

    Parameters
    ----------
    config:
        A preset (flash, tiny) or a config.json.
    layers:
        Layer numbers with their sources, or all.
    prompt:
        Tokens of the prompt, fed in one step.
    decode:
        Single tokens fed after it.
    rounds:
        Counted rounds; one more warms up.
    linear:
        bf16 or fp8.
    against:
        Peers by name, separated by commas: torch (as the official code), torch-mv (single rows by matrix-vector
        products), torch-f32 (weights widened to f32), onnxruntime (the exported layers); or none.
    threads:
        Threads for both; all processors by default.
    json:
        File for the results.
    """
    peers = [] if against == "none" else against.split(",")
    unknown = [name for name in peers if name not in PEERS]
    if unknown or min(prompt, rounds) < 1 or decode < 1:
        raise UsageError(
            f"--against {against!r}, --prompt {prompt}, --decode {decode}, --rounds {rounds}: expected peers among "
            f"{', '.join(PEERS)} and positive numbers"
        )
    from ds41_tvm.api import build
    from ds41_tvm.bench.layers import Contestant, Ours, Torch, peak_memory, race, rows
    from ds41_tvm.bench.onnx_peer import Onnx
    from ds41_tvm.checkpoint import synthetic_weights

    sizes = load_config(config)
    chosen = parse_layers(layers)
    mode = sizes.check_linear(linear)
    out = console()
    weights = synthetic_weights(sizes, "bench", chosen, mode)
    with out.status("making weights and compiling"):
        runner = build(sizes, weights, chosen, linear=mode, threads=threads)
    contestants: dict[str, Contestant] = {"ours": Ours(runner)}
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder:
        for name in peers:
            with out.status(f"preparing {name}"):
                contestants[name] = (
                    Onnx(sizes, weights, runner.layers, mode, runner.threads, Path(folder))
                    if name == "onnxruntime"
                    else Torch(sizes, weights, runner.layers, mode, name, runner.threads)
                )
        del weights
        with out.status("measuring"):
            times, bandwidth = race(contestants, sizes, runner.layers, prompt, decode, rounds, runner.threads)
    records = rows(runner, times, bandwidth)
    summary: dict[str, Any] = {
        "target": runner.program.target.name,
        "linear": mode,
        "threads": runner.threads,
        "prompt": prompt,
        "read_bandwidth": median(bandwidth),
        "peak_memory": peak_memory(),
        "rows": records,
    }
    if json is not None:
        json.write_text(dumps(summary, indent=2) + "\n")
    out.print(_table(records, peers))
    out.print(
        f"read bandwidth {summary['read_bandwidth'] / 1e9:.1f} GB/s (median), {runner.threads} threads, "
        f"target {runner.program.target.name}, linear {mode}"
    )
    return 0


def _table(records: list[dict[str, Any]], peers: list[str]) -> Any:
    columns = ["layer", "role", "phase", "ms", "fastest..slowest"]
    columns += [text for peer in peers for text in (f"{peer} ms", "times faster")] + ["GB/s", "of bandwidth"]
    lines = []
    for r in records:
        line = [
            str(r["layer"]),
            f"{r['role']} {r['ratio']}",
            r["phase"],
            f"{r['seconds'] * 1e3:.1f}",
            f"{r['fastest'] * 1e3:.1f}..{r['slowest'] * 1e3:.1f}",
        ]
        for peer in peers:
            line += [f"{r['peers'][peer] * 1e3:.1f}", f"{r['peers'][peer] / r['seconds']:.2f}"]
        decode = r["phase"] == "decode"
        line += [f"{r['bytes_per_second'] / 1e9:.1f}", f"{r['share_of_read_bandwidth']:.0%}"] if decode else ["", ""]
        lines.append(line)
    return table(columns, lines)
