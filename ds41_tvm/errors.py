"""Every error a user of the package can meet.

A message says what is wrong, the value seen, the value expected, and what to do. All of them derive from
``Ds41Error``, so ``except Ds41Error`` separates a refused input from a defect of the package.
"""

from __future__ import annotations


class Ds41Error(Exception):
    """Base of all errors that the package raises on purpose."""


class ConfigError(Ds41Error):
    """A configuration (file, dictionary or keyword arguments) is not one that the package can run."""


class CheckpointError(Ds41Error):
    """A checkpoint cannot be read, or does not fit its configuration; base of the classes below."""


class MissingTensor(CheckpointError):
    """A tensor (weight or scale) that a layer's role needs is in no shard of the checkpoint."""


class WrongShape(CheckpointError):
    """A weight, or the scale of a quantised weight, has another shape than the configuration gives it."""


class WrongDtype(CheckpointError):
    """A tensor is stored in a type that its role does not allow, or that the package does not know."""


class TruncatedFile(CheckpointError):
    """A shard ends before the bytes that its header promises."""


class BadHeader(CheckpointError):
    """The header of a safetensors file is not readable, or contradicts itself."""


class OverlappingTensors(CheckpointError):
    """Two tensors of one shard claim the same bytes."""


class DuplicateTensor(CheckpointError):
    """One tensor name is stored twice: in two shards, or twice in one header."""


class UnexpectedTensor(CheckpointError):
    """A layer has a compressor or indexer tensor that its role in the configuration does not use."""


class BadIndex(CheckpointError):
    """``model.safetensors.index.json`` is not readable, or contradicts the shards it names."""


class MissingShard(CheckpointError):
    """The index names a shard that is absent, or the directory holds no safetensors file at all."""


class ShardOutsideDirectory(CheckpointError):
    """The index names a shard outside the checkpoint directory (absolute path, ``..``)."""


class NonFiniteWeight(CheckpointError):
    """A scale is NaN, or a weight, norm weight or sink is NaN or infinite."""


class ShardChanged(CheckpointError):
    """A shard is not the file any more that it was when the checkpoint was opened."""


class CheckpointClosed(CheckpointError):
    """A tensor was asked of a checkpoint after its ``close()``."""


class OutputExists(CheckpointError):
    """A checkpoint was to be written into a directory that already holds something."""


class NumericsError(Ds41Error):
    """An array handed to a number-format conversion has the wrong dtype or shape."""


class StateError(Ds41Error):
    """A sequence or its caches cannot do what was asked (closed, over-long, truncated too far)."""


class StepError(Ds41Error):
    """A step is malformed, or is used out of order (not planned, committed twice, layers out of order)."""


class InputError(Ds41Error):
    """An input array of a step has the wrong dtype, shape or layout."""


class TargetError(Ds41Error):
    """A compilation target is unknown, or this machine cannot serve it."""


class CompileError(Ds41Error):
    """A program could not be compiled, or a compiled artefact cannot be loaded."""


class TooLargeForGpu(CompileError):
    """A program asks for more shared memory, threads or registers than a block of the architecture has."""


class NoCudaCompiler(CompileError):
    """Kernels for CUDA were to be compiled and NVIDIA's compiler was not found."""


class UsageError(Ds41Error):
    """A command line or an API call contradicts itself."""


class UsedConcurrently(UsageError):
    """A runner was called from a second thread while a call of the first was still running."""


class AfterFork(UsageError):
    """A forked child called kernels from the thread whose workers only its parent has."""


class StateFileError(StateError):
    """A saved sequence is damaged, or belongs to another configuration, mode or set of weights."""


class ArtifactError(Ds41Error):
    """A compiled artefact cannot be used; base of the classes below. Raised before any of its kernels runs."""


class MissingFile(ArtifactError):
    """The artefact's folder, its manifest, or a file that the manifest names is absent or unreadable."""


class BadManifest(ArtifactError):
    """``manifest.json`` is not what its schema says, or contradicts itself."""


class UnsafeFileName(BadManifest):
    """The manifest names a file that would lie outside the artefact's folder."""


class UnknownSchema(ArtifactError):
    """The manifest has a schema version that this version of the package does not read."""


class PinMismatch(ArtifactError):
    """The manifest is not the one whose digest the caller expects."""


class DigestMismatch(ArtifactError):
    """A file's content is not what the manifest says."""


class WrongFileSize(ArtifactError):
    """A file is shorter or longer than the manifest says, or larger than any such file may be."""


class BadModule(ArtifactError):
    """The compiled module is not a whole shared library for this machine, or lacks a kernel."""


class BadWeightFile(ArtifactError):
    """A file of packed weights does not hold the tensors that the kernels read."""


class AbiMismatch(ArtifactError):
    """The artefact was built for another version of TVM's runtime or of tvm-ffi than is installed."""


class UnsupportedCpu(ArtifactError):
    """The kernels use processor features that this machine lacks."""


class ConfigMismatch(ArtifactError):
    """The weights given belong to another configuration than the artefact was compiled for."""


class NoWeights(ArtifactError):
    """The artefact was compiled without weights, and none were given."""


class NotAnArtifact(ArtifactError):
    """The output folder holds something else than an artefact and would be overwritten."""


class BundleError(ArtifactError):
    """A bundle could not be packed: a library or a wheel that it needs was not found."""


class DeviceError(Ds41Error):
    """A GPU cannot be used, or refused a request; base of the classes below."""


class NoDriver(DeviceError, ArtifactError):
    """Kernels for a GPU were loaded on a machine without a GPU's driver, or without a GPU."""


class NoCudaRuntime(DeviceError, ArtifactError):
    """A library that runs kernels for CUDA was not found: NVIDIA's runtime, or TVM's part for CUDA."""


class UnsupportedGpu(DeviceError, ArtifactError):
    """The kernels were compiled for another generation of GPU than is present."""


class HostAccess(DeviceError):
    """Values in a device's memory were used as if they were on the host."""


class CaptureError(DeviceError):
    """Something that cannot be part of a graph was asked for while one was captured, or a graph does not fit a step."""


class PeerError(Ds41Error):
    """Another library that the benchmark measures beside the layer failed, or its process ended."""


class TuneError(Ds41Error):
    """Tuning cannot begin or go on: a missing package, no machine to measure on, a folder that cannot be written."""


class WrongProgram(TuneError):
    """A program that tuning found does not give the results of the default one. It was not saved."""
