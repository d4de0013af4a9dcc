"""What an artefact holds, as data: read from its files alone, on any machine, without running anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.elf import SharedLibrary
from ds41_tvm.artifact.files import check_file, check_files, largest, open_regular, read_manifest_bytes
from ds41_tvm.artifact.manifest import Manifest
from ds41_tvm.artifact.occupancy import occupancy
from ds41_tvm.errors import BadManifest, UsageError
from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.program import Program
from ds41_tvm.strict_json import parse_object

CONTEXTS = (4 << 10, 128 << 10, 1 << 20)  # tokens


def describe(path: str | os.PathLike[str], expect: str | None = None, verify: bool = False) -> dict[str, Any]:
    """Everything that ``ds41-tvm inspect`` shows, JSON-ready. `verify`: hash every file whole.

    Raises the errors of `load` that damage causes; another processor or another TVM is no error here.
    """
    manifest, digest = read_manifest(path, expect)
    folder, module = Path(path), schema.module_name(manifest.target)
    if verify:
        check_files(folder, manifest, "full")
    else:
        check_file(folder / module, manifest.files[module], False, largest(module))
    code = SharedLibrary(folder / module, machine=None).kernels()
    program = manifest.program()
    return {
        "path": str(folder),
        "digest": digest,
        "verified": "all files" if verify else "manifest and code",
        "schema": manifest.schema,
        "config": manifest.config.to_dict(),
        "config_digest": manifest.config_digest,
        "target": manifest.target.name,
        "requires": list(manifest.requires),
        "linear": manifest.options.linear,
        "ties": manifest.options.ties,
        "pooling": manifest.options.pooling,
        "grouped": manifest.options.grouped,
        "block_rows": manifest.options.block_rows,
        "draft": manifest.options.draft,
        "versions": {name: getattr(manifest.versions, name) for name in manifest.versions.__struct_fields__},
        "layers": [
            {
                "layer": layer.role.layer,
                "kind": layer.role.kind,
                "ratio": layer.role.ratio,
                "latents_of": layer.role.kv_source,
                "selection_of": layer.role.index_source,
                "candidates_of": layer.role.candidate_source,
                "weight_bytes": None if layer.weights is None else manifest.files[layer.weights].size,
            }
            for layer in manifest.layers
        ],
        "kernels": [
            {
                "name": kernel.name,
                "op": kernel.op,
                "params": dict(kernel.params),
                "arguments": [
                    {"name": a.name, "dtype": a.dtype, "shape": list(a.shape), "alignment": a.alignment}
                    for a in kernel.arguments
                ],
                "schedule": kernel.rule,
                "fallback": kernel.fallback,
                "record": kernel.record,
                "code_bytes": code[kernel.name][1] if kernel.name in code else None,
                "ir": kernel.ir,
                "gpu": [
                    {**msgspec.structs.asdict(code), **occupancy(code, manifest.target.level)} for code in kernel.gpu
                ],
            }
            for kernel in manifest.kernels
        ],
        "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in manifest.files.items()},
        "cache": cache_bytes(program),
    }


def read_manifest(path: str | os.PathLike[str], expect: str | None = None) -> tuple[Manifest, str]:
    """The manifest and its digest."""
    data, digest = read_manifest_bytes(Path(path), expect)
    return schema.decode(data, str(Path(path) / schema.FILE)), digest


def cache_bytes(program: Program) -> dict[str, Any]:
    """Bytes of packed cache of one sequence: what it always has (rings), and what grows with its tokens.

    Per token: for every source layer one latent row and one index key row per `ratio` tokens. Blocks are handed out
    whole, so up to a block more is held than is used.
    """
    c = program.config
    window = (c.window_size + program.draft) * row_bytes("window", c.head_dim) * len(program.layers)
    members, per_token = 0, 0.0
    for layer in program.layers:
        role = c.role(layer)
        if role.kind == "full":
            rows = row_bytes("latent", c.head_dim) + row_bytes("index", c.index_head_dim)
            per_token += rows / role.ratio
            if role.ratio > 1:
                members += (role.ratio + program.draft) * 2 * c.head_dim * 4
    fixed = window + members
    return {
        "fixed": fixed,
        "per_token": per_token,
        "at": {str(tokens): fixed + round(per_token * tokens) for tokens in CONTEXTS},
    }


def ir_text(path: str | os.PathLike[str], kernel: str) -> str:
    """The scheduled IR of one kernel, as it was compiled. Raises UsageError naming the nearest kernels."""
    manifest, _ = read_manifest(path)
    name = find_kernel(manifest, kernel)
    file = Path(path) / schema.IR
    check_file(file, manifest.files[schema.IR], False, largest(schema.IR))
    with open_regular(file) as handle:
        texts = parse_object(handle.read(), str(file), BadManifest)
    if not isinstance(texts.get(name), str):
        raise BadManifest(f"{file}: has no text for {name}; compile the artefact again")
    text: str = texts[name]
    return text


def find_kernel(manifest: Manifest, text: str) -> str:
    """The kernel whose name is `text`, or the only one whose name contains it."""
    names = [kernel.name for kernel in manifest.kernels]
    if text in names:
        return text
    close = [name for name in names if text in name]
    if len(close) == 1:
        return close[0]
    listed = "\n  ".join(close or names)
    raise UsageError(f"kernel {text!r}: {len(close)} kernels have that in their name; expected one of\n  {listed}")
