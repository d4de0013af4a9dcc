"""``manifest.json``: what an artefact holds, for which machine, made by what. Schema version 1.

The field ``digest`` is the SHA-256 of the rest in canonical JSON and finds accidents; a pin (``load(expect=...)``) is
the SHA-256 of the whole file and finds intent. Unknown fields, repeated keys and wrong types are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Literal

import msgspec

from ds41_tvm.config import AttentionConfig, LayerRole
from ds41_tvm.cpu_features import LEVELS
from ds41_tvm.errors import BadManifest, Ds41Error, UnknownSchema, UnsafeFileName
from ds41_tvm.program import Kernel, Linear, Program, Ties, Value
from ds41_tvm.strict_json import parse_object, short
from ds41_tvm.target import Target

FORMAT, SCHEMA = "ds41-tvm artifact", 2
FILE = "manifest.json"
MODULE, IR = "kernels.cpu.so", "kernels.ir.json"  # of a processor; see `module_name`
MAX_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SHA = re.compile(r"sha256:[0-9a-f]{64}")


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One argument of an entry point: sizes, or the name of a size that the caller chooses. `alignment` in bytes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    alignment: int


class GpuCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What NVIDIA's assembler reports of one function that a kernel launches.

    `registers` of a thread; `stack_bytes`, `spill_stores`, `spill_loads` in bytes of a thread; `shared_bytes` of a
    block, declared, and `dynamic_shared_bytes` beside; `threads` of a block.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    dynamic_shared_bytes: int
    threads: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A compiled kernel: the symbol is ``__tvm_ffi_`` and `name`.

    `rule` made its schedule, the `fallback` if no other took it, with `knobs` from a tuning `record` if there is one.
    `gpu`: the functions that it launches on a GPU; none on a processor.
    """

    name: str
    op: str
    params: tuple[tuple[str, Value], ...]
    arguments: tuple[Buffer, ...]
    rule: str
    fallback: bool
    record: str | None
    ir: str  # sha256 of its text in kernels.ir.json
    gpu: tuple[GpuCode, ...] = ()
    knobs: tuple[tuple[str, int], ...] = ()


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`sample`: of a weight file, the digest of header and sampled pages, see `files.sample_digest`."""

    size: int
    sha256: str
    sample: str | None = None


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A layer, its role, and the file of its packed weights."""

    role: LayerRole
    weights: str | None


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choices of `Program` beside configuration, layers and target."""

    linear: Literal["bf16", "fp8"]
    ties: Ties
    pooling: Literal["bf16", "f32"]
    grouped: Literal["bf16", "fp8"]
    block_rows: int
    draft: int
    choices: tuple[Linear, ...] = ()


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What made the artefact. `tvm` and `tvm_ffi_abi` must be what runs it; the others are for the record."""

    ds41_tvm: str
    tvm: str
    tvm_ffi: str
    tvm_ffi_abi: str
    llvm: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. `requires`: every processor feature that the code may use, by LLVM's names."""

    format: str
    schema: int
    config: AttentionConfig
    config_digest: str
    layers: tuple[Layer, ...]
    options: Options
    target: Target
    requires: tuple[str, ...]
    versions: Versions
    kernels: tuple[Entry, ...]
    files: dict[str, File]

    def program(self) -> Program:
        """The program that the kernels implement."""
        return Program(
            config=self.config,
            layers=tuple(layer.role.layer for layer in self.layers),
            target=self.target,
            linear=self.options.linear,
            ties=self.options.ties,
            pooling=self.options.pooling,
            grouped=self.options.grouped,
            block_rows=self.options.block_rows,
            draft=self.options.draft,
            choices=self.options.choices,
        )

    @property
    def has_weights(self) -> bool:
        """Whether packed weights of every layer lie in the artefact."""
        return all(layer.weights is not None for layer in self.layers)

    def weights_digest(self) -> str:
        """A digest of all packed weights; empty without weights."""
        if not self.has_weights:
            return ""
        parts = [f"{layer.role.layer} {self.files[layer.weights or ''].sha256}" for layer in self.layers]
        return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The bytes of the file: the same for equal manifests."""
    values = msgspec.to_builtins(manifest)
    return (json.dumps({**values, "digest": _digest(values)}, indent=1) + "\n").encode()


def _digest(values: dict[str, Any]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def decode(data: bytes, where: str) -> Manifest:
    """Read and check a manifest. Raises BadManifest, UnsafeFileName, UnknownSchema."""
    values = parse_object(data, where, BadManifest)
    if values.get("format") != FORMAT:
        raise BadManifest(f"{where}: format {short(values.get('format'))}; expected {FORMAT!r}: this is no artefact")
    version = values.get("schema")
    if type(version) is not int:
        raise BadManifest(f"{where}: schema {short(version)}; expected the number {SCHEMA}")
    if version != SCHEMA:
        older = "a newer version of ds41-tvm" if version > SCHEMA else "an older version of ds41-tvm, or compile again"
        raise UnknownSchema(f"{where}: schema version {short(version)}; this package reads {SCHEMA}: use {older}")
    stated = values.pop("digest", None)
    if stated != (actual := _digest(values)):
        raise BadManifest(
            f"{where}: its digest is {actual}, it states {short(stated)}: it was changed after it was written; copy "
            f"the artefact again, or compile it again"
        )
    try:
        manifest = msgspec.convert(values, Manifest)
        _check(manifest, where)
    except msgspec.ValidationError as error:
        raise BadManifest(f"{where}: {error}; expected what schema version {SCHEMA} says; compile it again") from None
    except BadManifest:
        raise
    except Ds41Error as error:  # of the configuration or the program
        raise BadManifest(f"{where}: {error}; compile it again") from None
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """What types cannot say: names, digests, and that the parts agree with each other."""

    def expect(what: str, seen: Any, expected: Any) -> None:
        if seen != expected:
            raise BadManifest(f"{where}: {what}: {short(seen)}; expected {short(expected)}")

    for name, file in manifest.files.items():
        if not _NAME.fullmatch(name):
            raise UnsafeFileName(f"{where}: file name {short(name)}; expected a plain name inside the folder")
        for digest in filter(None, (file.sha256, file.sample)):
            if not _SHA.fullmatch(digest):
                raise BadManifest(f"{where}: {name}: {short(digest)}; expected sha256: and 64 hexadecimal digits")
        if not 0 <= file.size < 2**48:
            raise BadManifest(f"{where}: {name}: size {short(file.size)}; expected bytes of a file")
    expect("config_digest", manifest.config_digest, manifest.config.digest())
    roles = [layer.role for layer in manifest.layers]
    expect("layers", roles, [manifest.config.role(role.layer) for role in roles])
    expect("requires", list(manifest.requires), list(required_features(manifest.target)))
    program = manifest.program()
    manifest.config.check_linear(program.linear)
    expect("kernels", [Kernel(k.op, k.params) for k in manifest.kernels], list(program.kernels()))
    expect("names of kernels", [k.name for k in manifest.kernels], [k.name for k in program.kernels()])
    weights = [layer.weights for layer in manifest.layers if layer.weights is not None]
    if weights and len(weights) != len(manifest.layers):
        raise BadManifest(
            f"{where}: {len(weights)} of {len(manifest.layers)} layers have weights; expected all or none"
        )
    expect("files", sorted(manifest.files), sorted({module_name(manifest.target), IR, *weights}))
    expect("files with a sample", sorted(n for n, f in manifest.files.items() if f.sample), sorted(set(weights)))


def module_name(target: Target) -> str:
    """The file of an artefact's code: ``kernels.cpu.so``, or for a GPU such as ``kernels.cuda-sm_90.so``."""
    return MODULE if target.kind == "cpu" else f"kernels.{target.kind}-{target.level}.so"


def required_features(target: Target) -> tuple[str, ...]:
    """Every feature that code for `target` may use: those of its level and those named."""
    return tuple(sorted({*LEVELS.get(target.level, ()), *target.features}))
