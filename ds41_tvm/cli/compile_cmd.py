"""``ds41-tvm compile``: makes an artefact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ds41_tvm.cli.options import load_config, parse_layers
from ds41_tvm.cli.output import byte_size, print_json
from ds41_tvm.cli.progress import progress
from ds41_tvm.errors import UsageError


def compile_command(
    *,
    out: Path,
    checkpoint: Path | None = None,
    config: str | None = None,
    layers: str = "all",
    target: str = "cpu",
    linear: Literal["bf16", "fp8"] | None = None,
    ties: Literal["lowest-index", "torch-cpu"] = "lowest-index",
    pooling: Literal["bf16", "f32"] | None = None,
    block_rows: int = 128,
    draft: int = 64,
    no_weights: Annotated[bool, Parameter(negative="")] = False,
    records: Path | None = None,
    no_records: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Compile layers and pack their weights into a folder that runs without the compiler.

    The folder appears complete or not at all; an older artefact at its place is replaced. Needs a C++ compiler.

    Parameters
    ----------
    out
        Folder to write, such as artifacts/NAME.
    checkpoint
        Checkpoint directory: configuration and weights.
    config
        Instead of a checkpoint: flash, tiny, or a path to a config.json. Weights are then given when loading.
    layers
        Layers to compile, such as 0,2,20-24; with their sources.
    target
        cpu (this machine), or cpu:LEVEL+feature+... with LEVEL x86-64-v3, x86-64-v4 and so on.
    linear
        Arithmetic of the linear layers: bf16 or fp8; as the checkpoint has it if not given.
    ties
        Which of equal index scores are taken: lowest-index, or torch-cpu, as torch's topk picks.
    pooling
        Weights of compressors of a ratio above 1: bf16 as released, or f32; as the checkpoint has them if not given.
    block_rows
        Compressed positions per block of cache.
    draft
        Tokens that a sequence can take back.
    no_weights
        Leave the weights out: they are given when loading.
    records
        Folder of tuning records to use instead of those that come with the package; see tune.
    no_records
        Use no tuning records.
    json
        Print the result as JSON.
    """
    if (checkpoint is None) == (config is None):
        raise UsageError("expected either --checkpoint DIR or --config NAME")
    if records is not None and no_records:
        raise UsageError("--records and --no-records: expected one of the two")
    if records is not None and not records.is_dir():
        raise UsageError(f"--records {records}: no such folder; expected one that ds41-tvm tune --out wrote")
    from ds41_tvm.compiler.artifact import compile

    with progress() as report:
        made = compile(
            checkpoint if checkpoint is not None else load_config(config or ""),
            out,
            layers=parse_layers(layers),
            target=target,
            linear=linear,
            ties=ties,
            pooling=pooling,
            block_rows=block_rows,
            draft=draft,
            with_weights=not no_weights,
            progress=report,
            records=records if records is not None else not no_records,
        )
    size = sum(file.size for file in made.manifest.files.values())
    chosen = [layer.role.layer for layer in made.manifest.layers]
    if json:
        print_json(
            {
                "path": str(made.path),
                "digest": made.digest,
                "layers": chosen,
                "target": made.manifest.target.name,
                "linear": made.manifest.options.linear,
                "kernels": len(made.manifest.kernels),
                "weights": made.manifest.has_weights,
                "bytes": size,
                "records": {kernel.name: kernel.record or "fallback" for kernel in made.manifest.kernels},
                "notes": list(made.notes),
            }
        )
        return 0
    weights = "with weights" if made.manifest.has_weights else "without weights"
    print(f"{out}: {len(chosen)} layer(s), {len(made.manifest.kernels)} kernels, {weights}, {byte_size(size)}")
    print(f"{made.manifest.target.name}; linears {made.manifest.options.linear}; manifest {made.digest}")
    for note in made.notes:
        print(f"note: {note}")
    tuned = sum(kernel.record is not None for kernel in made.manifest.kernels)
    print(f"{tuned} of {len(made.manifest.kernels)} kernels by tuning records, the others by built-in rules (fallback)")
    if tuned:
        for kernel in made.manifest.kernels:
            print(f"  {kernel.name}: {kernel.record or 'fallback'}")
    return 0
