"""TVM targets for our own."""

from __future__ import annotations

import platform

from tvm.target import Target as TvmTarget

from ds41_tvm.target import Target


def tvm_target(target: Target) -> TvmTarget:
    """LLVM target with exactly the features of `target`; vectors as wide as the program asks for.

    For CUDA its architecture, with host code that every processor of this kind runs.
    """
    if target.kind == "cuda":
        host = Target("cpu", "x86-64" if platform.machine() in ("x86_64", "AMD64") else "generic")
        return TvmTarget({"kind": "cuda", "arch": target.level}, host=tvm_target(host))
    spec: dict[str, object] = {"kind": "llvm"}
    if target.level != "generic":
        spec["mcpu"] = target.level
        # Without this, LLVM splits our 512-bit vectors on the levels that it thinks prefer 256 bits.
        wide = ["-prefer-256-bit"] if target.has("avx512f") else []
        spec["mattr"] = [f"+{feature}" for feature in target.features] + wide
        spec["mtriple"] = "x86_64-unknown-linux-gnu" if platform.system() == "Linux" else "x86_64-unknown-unknown"
    return TvmTarget(spec)
