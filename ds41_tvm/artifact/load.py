"""Loading an artefact: every check first, then native code, then weights; kernels run only after all of that.

Loading runs the machine code in the artefact: load only what you trust, and pin what you fetched (`expect`). Digests in
a manifest find damage; they do not tell who wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.elf import PREFIX, SharedLibrary
from ds41_tvm.artifact.files import Verify, check_files, read_manifest_bytes
from ds41_tvm.artifact.manifest import Manifest
from ds41_tvm.artifact.weights import from_file
from ds41_tvm.cpu_features import host_features, request_tiles
from ds41_tvm.errors import (
    AbiMismatch,
    ArtifactError,
    BadModule,
    BadWeightFile,
    ConfigMismatch,
    NoWeights,
    UnsupportedCpu,
    UnsupportedGpu,
)
from ds41_tvm.packed_file import PackedFile
from ds41_tvm.runtime.device import Device
from ds41_tvm.runtime.ffi import abi, load_cuda_runtime, load_runtime
from ds41_tvm.runtime.runner import Runner
from ds41_tvm.runtime.weights import LayerWeights, to_device

if TYPE_CHECKING:
    from ds41_tvm.runtime.device_cuda import CudaDevice

Weights = str | os.PathLike[str] | Mapping[str, Any]


class Artifact:
    """An opened artefact: code and weights (mapped, or on the GPU), shared by all runners made of it.

    May be used from any thread.
    """

    def __init__(
        self, path: Path, manifest: Manifest, digest: str, verify: Verify, with_weights: bool, gpu: int = 0
    ) -> None:
        self.path, self.manifest, self.digest, self.gpu = path, manifest, digest, gpu
        device = open_device(manifest, gpu, path)
        module = path / schema.module_name(manifest.target)
        self.program = manifest.program()
        check_versions(manifest, path)
        check_processor(manifest, path)
        check_files(path, manifest, verify, with_weights)
        check_module(module, manifest)
        self.weights: dict[int, LayerWeights] | None = None
        if with_weights and manifest.has_weights:
            self.weights = {
                layer.role.layer: from_file(
                    PackedFile(path / (layer.weights or ""), BadWeightFile), self.program, layer.role
                )
                for layer in manifest.layers
            }
        self.functions = _functions(module, manifest)
        if device is not None and self.weights is not None:
            self.weights = {layer: to_device(weights, device) for layer, weights in self.weights.items()}
            device.synchronize()  # runners work on streams of their own

    def runner(
        self, weights: Weights | None = None, threads: int | None = None, keys: Literal["own", "published"] = "own"
    ) -> Runner:
        """A runner with sequences of its own; see `load`."""
        if weights is None:
            if self.weights is None:
                raise NoWeights(
                    f"{self.path}: compiled without weights; hand them to load(..., weights=...): a checkpoint "
                    f"directory or tensors by name"
                )
            return self._runner(self.weights, threads, keys, self.manifest.weights_digest())
        if isinstance(weights, str | os.PathLike):
            return self._runner(self._from_checkpoint(weights), threads, keys)
        return self._runner(weights, threads, keys)

    def _runner(self, weights: Mapping[Any, Any], threads: int | None, keys: str, weights_digest: str = "") -> Runner:
        device: Device | None = open_device(self.manifest, self.gpu, self.path)  # one each: it keeps freed memory
        return Runner(self.program, self.functions, weights, threads, keys, weights_digest, device)

    def _from_checkpoint(self, directory: str | os.PathLike[str]) -> Mapping[str, Any]:
        from ds41_tvm.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(directory, self.program.layers, self.program.linear)
        theirs, mine = checkpoint.config.to_dict(), self.program.config.to_dict()
        if different := [name for name in mine if theirs[name] != mine[name]]:
            name = different[0]
            raise ConfigMismatch(
                f"{directory}: its configuration is {checkpoint.config.digest()}, the artefact {self.path} is for "
                f"{self.manifest.config_digest}: {name} is {theirs[name]}, the kernels have {mine[name]}"
                f"{f' (and {len(different) - 1} more)' if len(different) > 1 else ''}; compile for this checkpoint"
            )
        return checkpoint.weights


def load(
    path: str | os.PathLike[str],
    expect: str | None = None,
    weights: Weights | None = None,
    threads: int | None = None,
    keys: Literal["own", "published"] = "own",
    verify: Verify = "auto",
    gpu: int = 0,
) -> Runner:
    """A runner from an artefact that `ds41_tvm.compile` made. Runs the code in it: load only what you trust.

    `expect`: ``sha256:...``, the digest of the manifest that you pinned. `weights`: None for those in the artefact, a
    checkpoint directory, or tensors by official name (NumPy, ml_dtypes, anything with DLPack); the last two are packed
    now. `threads`, `keys`: see `Runner`. `verify`: ``auto`` hashes every file, but of weights of more than 64 MiB in
    all only header and samples, so that loading them takes no time; ``full`` hashes everything. `gpu`: the number of
    the GPU that an artefact for CUDA runs on, as the driver counts those that this process may use.

    Raises an `ArtifactError` before any kernel runs: for CUDA first NoDriver, UnsupportedGpu and NoCudaRuntime;
    MissingFile, WrongFileSize, PinMismatch, BadManifest, UnknownSchema, AbiMismatch, UnsupportedCpu, DigestMismatch,
    BadModule, BadWeightFile, NoWeights, ConfigMismatch; and what `load_checkpoint` raises.
    """
    return open_artifact(path, expect, verify, weights is None, gpu).runner(weights, threads, keys)


def open_artifact(
    path: str | os.PathLike[str],
    expect: str | None = None,
    verify: Verify = "auto",
    with_weights: bool = True,
    gpu: int = 0,
) -> Artifact:
    """Check and open an artefact, for several runners that share code and weights; see `load`."""
    folder = Path(path)
    for _ in range(3):
        before = _identity(folder)
        try:
            data, digest = read_manifest_bytes(folder, expect)
            manifest = schema.decode(data, str(folder / schema.FILE))
            return Artifact(folder, manifest, digest, verify, with_weights, gpu)
        except ArtifactError as error:
            refused = error
            if _identity(folder) == before:
                break
            # Another process replaced the artefact while we read it: begin again with the new one.
    raise refused


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def open_device(manifest: Manifest, gpu: int, path: Path) -> CudaDevice | None:
    """The GPU that the code is for; None for code of a processor. Raises NoDriver, UnsupportedGpu, NoCudaRuntime."""
    if manifest.target.kind == "cpu":
        return None
    if manifest.target.kind != "cuda":
        raise UnsupportedGpu(f"{path}: compiled for {manifest.target.name}; expected cpu or cuda: compile it again")
    from ds41_tvm.runtime.device_cuda import CudaDevice

    device = CudaDevice(gpu)
    device.check_level(manifest.target.level, str(path))
    return device


def check_versions(manifest: Manifest, path: Path) -> None:
    """Raises AbiMismatch unless the runtime here is the one that the code was made for."""
    here = abi()
    for name, made, what in (
        ("tvm", manifest.versions.tvm, "TVM"),
        ("tvm_ffi", manifest.versions.tvm_ffi_abi, "the tvm-ffi ABI"),
    ):
        if here[name] != made:
            raise AbiMismatch(
                f"{path}: compiled for version {made} of {what}; this process has {here[name]}; compile it again, or "
                f"install apache-tvm=={manifest.versions.tvm} with apache-tvm-ffi=={manifest.versions.tvm_ffi}"
            )


def check_processor(manifest: Manifest, path: Path) -> None:
    """Raises UnsupportedCpu if the code may use a feature that this processor lacks."""
    here = host_features()
    missing = [feature for feature in manifest.requires if feature not in here]
    if missing or ("amx-tile" in manifest.requires and not request_tiles()):
        raise UnsupportedCpu(
            f"{path}: compiled for {manifest.target.name}; this processor lacks "
            f"{', '.join(missing) or 'tile registers'} and has {' '.join(here) or 'features that cannot be read'}; "
            f"compile for 'cpu' here, or for a lower level"
        )


def check_module(path: Path, manifest: Manifest) -> None:
    """Raises BadModule unless the file is a whole shared library with exactly the manifest's kernels."""
    present = SharedLibrary(path).kernels()
    for kernel in manifest.kernels:
        if kernel.name not in present:
            raise BadModule(f"{path}: has no symbol {PREFIX}{kernel.name}; expected all kernels; compile it again")


def _functions(path: Path, manifest: Manifest) -> dict[str, Callable[..., Any]]:
    ffi = load_runtime() if manifest.target.kind == "cpu" else load_cuda_runtime()
    try:
        module = ffi.load_module(str(path.resolve()))
        return {kernel.name: module[kernel.name] for kernel in manifest.kernels}
    except Exception as error:  # whatever the system's loader finds wrong
        raise BadModule(f"{path}: cannot be loaded ({error}); compile it again") from error
