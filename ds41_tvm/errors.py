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


class UsageError(Ds41Error):
    """A command line or an API call contradicts itself."""
