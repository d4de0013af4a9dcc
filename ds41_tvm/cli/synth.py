"""``ds41-tvm synth``: writes a synthetic checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ds41_tvm.cli.options import load_config, parse_layers
from ds41_tvm.cli.output import byte_size, print_json


def synth(
    out: Path,
    /,
    *,
    config: str = "tiny",
    layers: str = "all",
    linear: Literal["bf16", "fp8"] = "bf16",
    seed: str = "synthetic",
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write a synthetic checkpoint in the released layout: the same bytes for the same options.

    Parameters
    ----------
    out
        Directory to write; new or empty.
    config
        flash, tiny, or a path to a config.json or to a checkpoint directory.
    layers
        Layers to write, such as 0,2,20-24.
    linear
        Number format of the weights of linear layers: bf16, or fp8 as released.
    seed
        Text from which, with its name, every value follows.
    overwrite
        Replace a checkpoint that is there already.
    json
        Print the result as JSON.
    """
    from ds41_tvm.checkpoint import write_synthetic

    sizes = load_config(config)
    chosen = parse_layers(layers)
    folder = write_synthetic(sizes, out, linear=linear, seed=seed, layers=chosen, overwrite=overwrite)
    written = list(range(sizes.n_layers) if chosen is None else chosen)
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    if json:
        print_json(
            {
                "directory": str(folder),
                "layers": written,
                "linear": linear,
                "seed": seed,
                "shards": len(shards),
                "bytes": sum(shards),
                "config": sizes.digest(),
            }
        )
    else:
        names = ",".join(map(str, written))
        print(f"{folder}: layers {names}; linears {linear}; {len(shards)} shard(s), {byte_size(sum(shards))}")
    return 0
