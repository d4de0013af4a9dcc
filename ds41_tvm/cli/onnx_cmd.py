"""``ds41-tvm export-onnx`` and ``verify-onnx``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ds41_tvm.cli.options import load_config, parse_layers
from ds41_tvm.cli.output import byte_size, console, print_json, table
from ds41_tvm.cli.progress import progress
from ds41_tvm.errors import UsageError

if TYPE_CHECKING:
    from ds41_tvm.onnx_export.verify import Verified


def export_onnx(
    *,
    out: Path,
    checkpoint: Path | None = None,
    config: str | None = None,
    seed: str = "synthetic",
    layers: str = "all",
    opset: int = 18,
    linear: Literal["bf16", "fp8"] | None = None,
    weights: Literal["auto", "inline", "external", "none"] = "auto",
    keys: Literal["own", "published"] = "own",
    sample: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write layers as an ONNX model of standard operators, for prefill, chunks and decode alike.

    A layer whose source is not among the layers takes what that leaves in a step as further inputs.

    Parameters
    ----------
    out
        File to write, such as layer2.onnx.
    checkpoint
        Checkpoint directory: configuration and weights.
    config
        Instead of a checkpoint: flash, tiny, or a path to a config.json; with synthetic weights.
    seed
        Text from which synthetic weights follow.
    layers
        Layers to write, such as 2, 2-5 or all.
    opset
        Version of the standard operators, 18 or newer.
    linear
        Arithmetic of the linear layers: bf16 or fp8; as the checkpoint has it if not given.
    weights
        inline: in the file; external: beside it; none: as inputs of the graph; auto: external above 1 GiB.
    keys
        Index keys that are scored: own, or published as the official code does (for comparisons with it).
    sample
        Also write inputs and expected outputs of a prompt and a decode step to OUT.sample.
    json
        Print the result as JSON.
    """
    if (checkpoint is None) == (config is None):
        raise UsageError("expected either --checkpoint DIR or --config NAME")
    from ds41_tvm.onnx_export.export import export_onnx as export
    from ds41_tvm.onnx_export.sample import write_sample

    chosen = parse_layers(layers)
    if checkpoint is not None:
        sizes, mode, values = _open(checkpoint, chosen, linear)
    else:
        from ds41_tvm.checkpoint import synthetic_weights

        sizes, mode = load_config(config or ""), linear or "bf16"
        values = synthetic_weights(sizes, seed, chosen, mode)
    made = export(sizes, values, out, chosen, mode, opset, weights, keys)
    sets = write_sample(out, sizes, values, made.layers, mode, keys) if sample else []
    if json:
        fields = asdict(made)
        fields.update(path=str(made.path), data=made.data and str(made.data), sample=[str(s) for s in sets])
        print_json(fields)
        return 0
    where = f" + {made.data.name}" if made.data else ""
    print(
        f"{out}{where}: layers {','.join(map(str, made.layers))}; linears {mode}; opset {made.opset}; "
        f"{made.nodes} nodes, {made.functions} functions, weights {byte_size(made.weight_bytes)}"
    )
    if made.outside:
        print(f"takes what layers {','.join(map(str, made.outside))} leave in a step as inputs")
    if sets:
        print(f"{len(sets)} sample calls in {sets[0].parent}")
    return 0


def verify_onnx(
    file: Path,
    /,
    *,
    checkpoint: Path | None = None,
    engines: str = "onnxruntime,onnx,tvm",
    steps: str | None = None,
    batch: int = 1,
    tolerance: float | None = None,
    threads: int | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check an exported model and run it in several engines beside the compiled layers. Exit code 1 if any differs.

    Parameters
    ----------
    file
        A file that export-onnx wrote.
    checkpoint
        Where the weights are that the file lacks: all of them, or those of source layers.
    engines
        onnxruntime (its CPU provider), onnx (its evaluator) and tvm (its importer); the last two for small files.
    steps
        Tokens per call, such as 150,5,1,1; by default a prompt beyond window and selection, a chunk, three steps.
    batch
        Sequences in the batch.
    tolerance
        Largest relative error of a layer's output; if not given 0.002, 0.01 from dim 128 on, 0.02 with fp8 linears.
    threads
        Threads to run on; by default all processors.
    json
        Print the findings as JSON.
    """
    if not file.is_file():
        raise UsageError(f"{file}: no such file; expected one that export-onnx wrote")
    from ds41_tvm.onnx_export.verify import verify_onnx as run

    values = None if checkpoint is None else _open(checkpoint, None, None)[2]
    with progress() as report:
        found = run(
            file,
            steps=_steps(steps),
            weights=values,
            engines=[name.strip() for name in engines.split(",")],
            batch=batch,
            tolerance=tolerance,
            threads=threads,
            progress=report,
        )
    if json:
        rows = [asdict(row) for row in found.rows]
        print_json({"ok": found.ok, "path": str(file), "checker": found.checker, "rows": rows})
    else:
        _show(found)
    return 0 if found.ok else 1


def _open(directory: Path, layers: tuple[int, ...] | None, linear: str | None) -> tuple[Any, str, Mapping[str, Any]]:
    from ds41_tvm.checkpoint import load_checkpoint

    opened = load_checkpoint(directory, layers, linear)
    return opened.config, opened.linear, opened.weights


def _steps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    # A number of more digits than any sensible one would be refused by int() itself.
    if not all(part.isdecimal() and len(part) < 19 and int(part) > 0 for part in parts):
        raise UsageError(f"--steps {text[:60]!r}: expected tokens per call, such as 150,5,1,1")
    return [int(part) for part in parts]


def _show(found: Verified) -> None:
    meta = found.metadata
    print(f"layers {meta['layers']}; linears {meta['linear']}; keys {meta['keys']}; ties {meta['ties']}")
    print(f"checker (full) and strict shape inference: {found.checker or 'nothing to object'}")
    rows = [
        (
            row.step if row.tokens else None,
            row.tokens or None,
            row.engine,
            row.selections if row.tokens else None,
            row.differ if row.tokens else None,
            row.by_rounding if row.tokens else None,
            row.error,
            row.layer,
            row.seconds if row.tokens else None,
            ("ok" if row.tokens else "-") if row.ok else "WRONG",
        )
        for row in found.rows
    ]
    columns = (
        "step", "tokens", "engine", "selections", "differ", "by rounding", "error of y", "layer", "s", "state",
    )  # fmt: skip
    if rows:
        console().print(table(columns, rows, "against the compiled layers"))
    for row in found.rows:
        if row.note:
            print(f"{row.engine}{f' step {row.step}' if row.tokens else ''}: {row.note}")
