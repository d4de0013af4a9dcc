"""How the linear layers on tensor cores cut their work, from static sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ds41_tvm.schedule.linear_sizes import LinearSizes

STEP = 32  # inner indices of a step: two products
PAIRS = STEP // 2
# Inner indices summed in the tensor cores' accumulators before they join the total, by type of the total.
CHUNK = {"f32": 256, "f64": 128}
MULTIPROCESSORS = 132  # of an H200; others have similar counts
MOST_WARPS = 10  # that share the chunks of a block of one row
THREADS = 256  # of a block of many rows
STAGES = 4  # of many rows, see `Sizes.stages`


def _largest_divisor(n: int, most: int) -> int:
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


@dataclass(frozen=True)
class Sizes(LinearSizes):
    """Parameters of `kernels.linear.linear`, the form of products (see `mma`), and what follows from them.

    `knobs`: what is chosen otherwise than here, see `schedule.cuda.knobs`.
    """

    rows: int
    mma: str
    knobs: tuple[tuple[str, int], ...] = ()

    def _or(self, name: str, default: int) -> int:
        """What the knob says, or else the default."""
        return dict(self.knobs).get(name, default)

    @property
    def per_group(self) -> int:
        return self.n // self.groups

    @property
    def steps(self) -> int:
        """Steps of a chunk: as many as stay within `CHUNK` and divide k."""
        return _largest_divisor(self.k // STEP, CHUNK[self.total] // STEP)

    @property
    def chunks(self) -> int:
        return self.k // STEP // self.steps

    # ---- one row

    @property
    def columns(self) -> int:
        """Columns of a block: a whole tile, or less where the blocks would not fill the GPU twice.

        Not below a memory sector of 32 bytes.
        """
        options = self.columns_options
        filling = next((c for c in options if self.n // c >= 2 * MULTIPROCESSORS), options[-1])
        return self._or("columns", filling)

    @property
    def columns_options(self) -> tuple[int, ...]:
        """Parts of a tile that `columns` may be, the widest first."""
        least = 8 if self.weight == "bf16" else 16
        return tuple(c for c in (self.tile, self.tile // 2, self.tile // 4) if c >= least)

    @property
    def wide(self) -> int:
        """Columns of a lane, next to each other: products of a warp's step."""
        return self.columns // 8

    @property
    def words(self) -> int:
        """Registers that hold a pair of inner indices of a lane's columns."""
        return self.wide if self.weight == "bf16" else self.wide // 2

    @property
    def warps(self) -> int:
        return self._or("warps", _largest_divisor(self.chunks, MOST_WARPS))

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def rounds(self) -> int:
        return self.chunks // self.warps

    @property
    def ahead(self) -> int:
        """Steps whose weights are loaded together: 32 registers of them."""
        return self._or("ahead", _largest_divisor(self.steps, max(1, 32 // (4 * self.words))))

    # ---- many rows

    @property
    def warp_columns(self) -> int:
        """Warps next to each other, one packed tile each: 4 if that leaves enough blocks for a short prompt."""
        enough = next(w for w in self.warp_columns_options if w == 1 or self.n // (self.tile * w) >= 16)
        return self._or("warp_columns", enough)

    @property
    def warp_columns_options(self) -> tuple[int, ...]:
        """What `warp_columns` may be: tiles of one group of columns, the most first."""
        return tuple(w for w in (4, 2, 1) if self.per_group // self.tile % w == 0)

    @property
    def warp_rows(self) -> int:
        return 8 // self.warp_columns

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of a warp. Its sums, in f32 and in the type of the total, fit its registers."""
        fitting = {(4, "f32"): 4, (1, "f32"): 1, (1, "f64"): 1}.get((self.warp_columns, self.total), 2)
        return self._or("row_tiles", fitting)

    @property
    def stages(self) -> int:
        """Steps that are in shared memory or on their way there."""
        return self._or("stages", STAGES)

    @property
    def block_rows(self) -> int:
        return self.warp_rows * self.row_tiles * 16

    @property
    def lane_columns(self) -> int:
        """Columns of a lane, next to each other, in a packed tile."""
        return self.tile // 8

    @property
    def row_words(self) -> int:
        """Words that hold the results of a lane in one row."""
        return self.lane_columns * (2 if self.out == "f32" else 1)

    @property
    def weight_stages(self) -> int:
        """fp8 weights wait in registers, and need a place only while they are used or decoded."""
        return self.stages if self.weight == "bf16" else 2

    @property
    def shared(self) -> str:
        """Scope of large shared buffers: CUDA wants anything above 48 KiB to be dynamic, which OpenCL has not."""
        return "shared.dyn" if self.mma == "ptx" else "shared"

    # ---- loops

    @property
    def each(self) -> Any:
        """Loops over registers: unrolled on a GPU; a processor gets less to compile."""
        return T.unroll if self.mma == "ptx" else T.serial
