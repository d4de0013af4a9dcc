"""`compile`: from a configuration or a checkpoint to an artefact, a folder that runs without the compiler.

    manifest.json                  what it holds, see `artifact.manifest`
    kernels.cpu.so                 machine code of every kernel, shared by all layers of the same shapes; for a GPU
                                   kernels.cuda-sm_90.so and so on: code of the host, machine code of the device
    kernels.ir.json                the scheduled IR of each kernel as text
    weights.layer-NN.safetensors   the layer's weights as the kernels read them, 64-byte aligned, to be mapped

Equal inputs give equal bytes in every file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds41_tvm import __version__
from ds41_tvm.api import grouped_format, pooling_format
from ds41_tvm.artifact import files
from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.manifest import Manifest
from ds41_tvm.artifact.weights import as_tensors, metadata, packed_tensors
from ds41_tvm.checkpoint import Checkpoint, load_checkpoint
from ds41_tvm.compiler.publish import publish, refuse_others
from ds41_tvm.config import AttentionConfig, closure
from ds41_tvm.errors import TargetError, UsageError
from ds41_tvm.packed_file import write_packed
from ds41_tvm.program import Program, Ties
from ds41_tvm.runtime.ffi import abi
from ds41_tvm.runtime.weights import pack_layer
from ds41_tvm.target import Target, parse_target
from ds41_tvm.tune.apply import Tuned, selection

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Compiled:
    """Where an artefact was put, what it holds, and the digest to pin it by (`load(path, expect=digest)`).

    `notes`: tuning records that were not used, and why.
    """

    path: Path
    digest: str
    manifest: Manifest
    notes: tuple[str, ...] = ()


def compile(
    source: AttentionConfig | Checkpoint | str | os.PathLike[str],
    out: str | os.PathLike[str],
    weights: Mapping[str, Any] | None = None,
    layers: Iterable[int] | None = None,
    target: str | Target = "cpu",
    linear: Literal["bf16", "fp8"] | None = None,
    ties: Ties = "lowest-index",
    pooling: Literal["bf16", "f32"] | None = None,
    block_rows: int = 128,
    draft: int = 64,
    with_weights: bool = True,
    progress: Progress | None = None,
    records: bool | str | os.PathLike[str] = True,
) -> Compiled:
    """Compile the kernels of `layers` (None: all) and pack their weights into a folder `out`.

    `source`: a checkpoint (or its directory), whose weights go in, or a configuration, with `weights` by official name
    or without any; what has none gets them when it is loaded. `linear`: None for the checkpoint's own mode (bf16 for a
    configuration). `pooling`: format of the weights of compressors of ratio above 1, None for that of the weights (bf16
    without any). The others as in `build`. `progress`: called with (phase, done, total).
    `records`: tuning records to use, as in `build`; the manifest says of every kernel which one made it.

    `out` appears complete or not at all, in place of an older artefact. Needs a C++ compiler. Raises TargetError,
    ConfigError, CompileError, NotAnArtifact, and CheckpointError's classes.
    """
    aim = target if isinstance(target, Target) else parse_target(target)
    if aim.kind == "opencl":
        raise TargetError(f"target {aim.name!r} is for proofs in one process; expected cpu, cpu:LEVEL or cuda:sm_NN")
    place = Path(out).absolute()
    refuse_others(place, is_artifact)
    if isinstance(source, str | os.PathLike):
        source = load_checkpoint(source, layers, linear)
    checkpoint = source if isinstance(source, Checkpoint) else None
    if checkpoint is not None:
        if weights is not None:
            raise UsageError("weights were given beside a checkpoint; expected one of the two")
        weights, layers = checkpoint.weights, checkpoint.layers if layers is None else layers
        linear = linear or checkpoint.linear
    config = source if isinstance(source, AttentionConfig) else source.config
    program = Program(
        config=config,
        layers=closure(config, layers),
        target=aim,
        linear=config.check_linear(linear or "bf16"),
        ties=ties,
        pooling=pooling or pooling_format(config, weights or {}),
        grouped=grouped_format(config, linear or "bf16", weights),
        block_rows=block_rows,
        draft=draft,
    )
    tell = progress or (lambda phase, done, total: None)
    tuned = selection(records)(program)
    result: list[Compiled] = []

    def fill(folder: Path) -> None:
        made = _fill(folder, tuned, weights if with_weights else None, checkpoint, tell)
        data = schema.encode(made)
        (folder / schema.FILE).write_bytes(data)
        result.append(Compiled(place, files.digest_of(data), made, tuned.notes))

    publish(place, fill, is_artifact)
    return result[0]


def is_artifact(folder: Path) -> bool:
    """Whether a folder may be replaced by an artefact: it holds a manifest that names itself one."""
    try:
        return f'"format": "{schema.FORMAT}"'.encode() in (folder / schema.FILE).read_bytes()[:200]
    except OSError:
        return False


def _fill(
    folder: Path, tuned: Tuned, weights: Mapping[str, Any] | None, checkpoint: Checkpoint | None, tell: Progress
) -> Manifest:
    import tvm
    import tvm_ffi

    from ds41_tvm.compiler.objects import compile_kernels, link

    program = tuned.program
    kernels = compile_kernels(program, lambda done, total: tell("kernels", done, total), tuned)
    module = schema.module_name(program.target)
    device = [kernel.device for kernel in kernels if kernel.device is not None]
    link([kernel.code for kernel in kernels], folder / module, device)
    texts = {kernel.entry.name: kernel.ir for kernel in kernels}
    (folder / schema.IR).write_text(json.dumps(texts, indent=0), encoding="utf-8")
    layers = []
    for done, layer in enumerate(program.layers):
        name = None
        if weights is not None:
            tell("weights", done, len(program.layers))
            name = f"weights.layer-{layer:02}.safetensors"
            _write_weights(folder / name, program, layer, weights)
            if checkpoint is not None:
                checkpoint.release()
        layers.append(schema.Layer(role=program.config.role(layer), weights=name))
    if weights is not None:
        tell("weights", len(program.layers), len(program.layers))
    of_weights = {layer.weights for layer in layers if layer.weights is not None}
    return Manifest(
        format=schema.FORMAT,
        schema=schema.SCHEMA,
        config=program.config,
        config_digest=program.config.digest(),
        layers=tuple(layers),
        options=schema.Options(
            linear=program.linear,
            ties=program.ties,
            pooling=program.pooling,
            grouped=program.grouped,
            block_rows=program.block_rows,
            draft=program.draft,
            choices=program.choices,
        ),
        target=program.target,
        requires=schema.required_features(program.target),
        versions=schema.Versions(
            ds41_tvm=__version__,
            tvm=abi()["tvm"],
            tvm_ffi=tvm_ffi.__version__,
            tvm_ffi_abi=abi()["tvm_ffi"],
            llvm=str(tvm.target.codegen.llvm_version_major()),
        ),
        kernels=tuple(kernel.entry for kernel in kernels),
        files={
            name: files.describe(folder / name, name in of_weights) for name in sorted({module, schema.IR, *of_weights})
        },
    )


def _write_weights(path: Path, program: Program, layer: int, weights: Mapping[str, Any]) -> None:
    role = program.config.role(layer)
    tensors = as_tensors(pack_layer(program, role, weights))
    with open(path, "xb") as file:
        write_packed(file, packed_tensors(program, role).items(), tensors.__getitem__, metadata(program, role))
