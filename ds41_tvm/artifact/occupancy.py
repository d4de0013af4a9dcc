"""How many blocks of a GPU kernel fit a multiprocessor, from what the assembler reports and NVIDIA's tables."""

from __future__ import annotations

from typing import NamedTuple

from ds41_tvm.artifact.manifest import GpuCode


class Limits(NamedTuple):
    """Of one multiprocessor, and of one block (CUDA C++ Programming Guide, "Technical Specifications")."""

    warps: int
    blocks: int
    shared: int  # bytes of a multiprocessor
    shared_block: int  # bytes that one block can have; each block costs `RESERVED` beside
    registers: int = 65536


LIMITS = {
    "sm_80": Limits(64, 32, 164 << 10, 163 << 10),
    "sm_86": Limits(48, 16, 100 << 10, 99 << 10),
    "sm_89": Limits(48, 24, 100 << 10, 99 << 10),
    "sm_90": Limits(64, 32, 228 << 10, 227 << 10),
    "sm_100": Limits(64, 32, 228 << 10, 227 << 10),
    "sm_120": Limits(48, 24, 100 << 10, 99 << 10),
}
RESERVED = 1 << 10  # bytes of shared memory that the system takes of every block
WARP, WARP_REGISTERS = 32, 256  # registers are handed out to warps in such units


def occupancy(code: GpuCode, level: str) -> dict[str, int | float | None]:
    """``blocks`` that fit a multiprocessor at a time, and ``occupancy``, the part of its warps that they are.

    Both None where the level or the number of threads is not known, 0 where not even one block fits.
    """
    limits = LIMITS.get(level.rstrip("af"))
    if limits is None or code.threads < 1:
        return {"blocks": None, "occupancy": None}
    warps = -(-code.threads // WARP)
    registers = -(-code.registers * WARP // WARP_REGISTERS) * WARP_REGISTERS * warps
    shared = code.shared_bytes + code.dynamic_shared_bytes
    fits = shared <= limits.shared_block and code.threads <= 1024
    blocks = min(
        limits.blocks,
        limits.warps // warps,
        limits.registers // max(registers, 1),
        limits.shared // (shared + RESERVED),
    )
    blocks = blocks if fits else 0
    return {"blocks": blocks, "occupancy": round(blocks * warps / limits.warps, 3)}
