"""What the programs of linear layers know of their sizes, on every target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds41_tvm.numerics.tir import f32_to_bf16


@dataclass(frozen=True)
class LinearSizes:
    """Parameters of `kernels.linear.linear`, and what follows from them."""

    n: int
    k: int
    groups: int
    weight: str
    out: str
    total: str
    tile: int

    @property
    def out_type(self) -> str:
        return "float32" if self.out == "f32" else "uint16"

    @property
    def total_type(self) -> str:
        return {"f32": "float32", "f64": "float64"}[self.total]

    @property
    def word_bytes(self) -> int:
        """Bytes of the packed word of two inner indices."""
        return 2 if self.weight == "fp8" else 4

    def store(self, value: Any) -> Any:
        """An f32 result as it is stored."""
        return value if self.out == "f32" else f32_to_bf16(value)
