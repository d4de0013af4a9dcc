"""What an artefact is compiled for, as data: the strings users write and the canonical form that manifests hold."""

from __future__ import annotations

import difflib

import msgspec

from ds41_tvm.cpu_features import LEVELS, host_features, host_level
from ds41_tvm.errors import TargetError

_EXTRAS = (
    "avx512vnni", "avx512vbmi", "avx512vbmi2", "avxvnni", "avx512bf16", "avx512bitalg", "avx512vpopcntdq", "avx512ifma",
    "amx-tile", "amx-bf16", "amx-int8",
)  # fmt: skip
# NVIDIA architectures that nvcc 13 makes machine code for and that have what the schedules use: bf16 tensor cores.
CUDA_LEVELS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SMALL_SHARED = ("sm_86", "sm_89", "sm_120")  # a block has 99 KiB of shared memory; 163 KiB or more elsewhere
_SHORT = {"vnni": ("avx512vnni",), "vbmi": ("avx512vbmi",), "amx": ("amx-tile", "amx-bf16"), "bf16": ("avx512bf16",)}


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of processor.

    `kind` ``cpu``: `level` is an x86-64 level (``generic`` on other machines), `features` LLVM names beyond it.
    ``cuda``: `level` is an architecture such as ``sm_90``. ``opencl``: the kernels of ``cuda`` as OpenCL, to show on a
    processor that they are right (see `ds41_tvm.proof`); nothing to use otherwise. The last two have no features.
    """

    kind: str
    level: str
    features: tuple[str, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether kernels are bound to blocks and threads: the programs of `schedule.cuda`."""
        return self.kind != "cpu"

    @property
    def name(self) -> str:
        """Canonical string, e.g. ``cpu:x86-64-v4+avx512vnni``; parses back to the same target."""
        return "+".join((f"{self.kind}:{self.level}", *self.features))

    def has(self, feature: str) -> bool:
        """Whether generated code may use this LLVM feature."""
        return feature in self.features or feature in LEVELS.get(self.level, ())

    def missing_here(self) -> tuple[str, ...]:
        """Features that this machine's processor lacks; of a GPU nothing is asked here, but when it is opened."""
        if self.is_gpu:
            return ()
        host = set(host_features())
        return tuple(f for f in (*LEVELS.get(self.level, ()), *self.features) if f not in host)


def parse_target(text: str) -> Target:
    """``cpu`` (this machine), ``cpu:LEVEL`` or ``cpu:LEVEL+feature+...``, LEVEL an x86-64 level or ``native``;
    ``cuda:sm_90`` and other architectures; ``opencl`` (for proofs, see `Target`).

    Raises TargetError on anything else, naming the nearest known word.
    """
    kind, _, rest = text.partition(":")
    if kind == "cuda":
        if rest not in CUDA_LEVELS:
            raise TargetError(f"target {text!r}: unknown architecture {rest!r}; {_near(rest, CUDA_LEVELS)}")
        return Target("cuda", rest)
    if kind == "opencl":
        if rest not in ("", "generic"):
            raise TargetError(f"target {text!r}: unknown level {rest!r}; expected opencl, which has none")
        return Target("opencl", "generic")
    if kind != "cpu":
        raise TargetError(
            f"target {text!r}: unknown kind {kind!r}; expected cpu, cpu:LEVEL, cpu:LEVEL+FEATURE+... or cuda:sm_NN"
        )
    level, *names = (rest or "native").split("+")
    if level == "native":
        if not host_features():
            return Target("cpu", "generic")
        level, own = host_level(), set(LEVELS[host_level()])
        names = [f for f in host_features() if f not in own and f in _EXTRAS] + names
    if level not in (*LEVELS, "generic"):
        raise TargetError(f"target {text!r}: unknown level {level!r}; {_near(level, (*LEVELS, 'native'))}")
    features: set[str] = set()
    for name in names:
        if name not in _SHORT and name not in _EXTRAS:
            raise TargetError(f"target {text!r}: unknown feature {name!r}; {_near(name, (*_EXTRAS, *_SHORT))}")
        features.update(_SHORT.get(name, (name,)))
    return Target("cpu", level, tuple(sorted(features)))


def _near(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"expected one of {', '.join(known)}"
