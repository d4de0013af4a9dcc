"""How sparse attention on tensor cores cuts its work, from static sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

ROWS = 32  # rows of a tile: gathered, decoded and multiplied together
THREADS = 256
WARPS = THREADS // 32
MOST_HEADS = 64  # of a block: their sums fill half of its registers
MOST_STAGES = 4
# Shared memory that a block may take, of GPUs that run all heads in one block and of all: a KiB less than they have.
ROOM, SMALL_ROOM = 162 << 10, 98 << 10
SCORES = ROWS + 4  # floats between the scores of two heads: their lanes meet different banks
# Places are row numbers, 32 bits wide: 2^30 rows of a window would take 560 GB. Addresses are computed in 64 bits.
INVALID = -(1 << 30)  # place of a slot without a row
# bf16 values whose sum stands for a weight. One, as in the official GPU kernel, has an error of up to 2^-8 of the
# weight, two have 2^-16, three none: eight bits each. The recorded outputs, made with f32 weights, ask for three:
# already 2^-16 tips roundings to bf16 that follow. Each part takes as many products as the scores do.
WEIGHT_PARTS = 3


@dataclass(frozen=True)
class Sizes:
    """Parameters of `kernels.attention.sparse_attention`, into how many parts the heads are cut, and `mma`."""

    heads: int
    dim: int
    window: int
    ring_rows: int
    block_rows: int
    k: int
    split: int
    mma: str
    weight_parts: int = WEIGHT_PARTS
    stages: int = 0  # tiles of packed rows that are in shared memory or on their way there; 0 for `roomy_stages`
    slices: int = 1  # blocks that share the channels of an output, see `attention_split`

    def __post_init__(self) -> None:
        if not self.stages:
            object.__setattr__(self, "stages", self.roomy_stages)

    @property
    def parts(self) -> int:
        """Blocks that share the heads of a query. Heads do not touch each other, so the bits stay the same.

        Where the heads are to be shared out at all, tiles of 16 are: fewer heads would not be less work.
        """
        return -(-self.heads // (MOST_HEADS if self.split == 1 else 16))

    @property
    def part_heads(self) -> int:
        return -(-self.heads // self.parts)

    @property
    def head_tiles(self) -> int:
        """Tiles of 16 heads of a block."""
        return -(-self.part_heads // 16)

    @property
    def padded(self) -> int:
        return self.head_tiles * 16

    @property
    def split_rows(self) -> bool:
        """Whether the rows of a query are shared out too: where there are few queries, see `attention_split`."""
        return self.split > 2

    @property
    def most_slices(self) -> int:
        """Blocks that the channels of an output are shared out to where the rows are: 128 channels or so for each."""
        return next(n for n in (4, 2, 1) if self.dim % (n * 32) == 0)

    @property
    def most_tiles(self) -> int:
        """Tiles of rows that a query can have."""
        return self.slots // ROWS

    @property
    def channels(self) -> int:
        """Channels of the rows that are decoded into shared memory, and of the output."""
        return self.dim // self.slices

    # ---- rows: the window's first, then the latents, each from a tile of its own on

    @property
    def window_bytes(self) -> int:
        return self.dim + self.dim // 32

    @property
    def latent_bytes(self) -> int:
        return self.dim // 2 + self.dim // 16

    @property
    def raw_words(self) -> int:
        """Words between packed rows in shared memory."""
        return -(-self.window_bytes // 16) * 4

    @property
    def window_slots(self) -> int:
        return -(-self.window // ROWS) * ROWS

    @property
    def slots(self) -> int:
        return self.window_slots + -(-self.k // ROWS) * ROWS

    # ---- scores: chains over the whole row or, so that more warps have one, over its halves

    @property
    def steps(self) -> int:
        """Steps of 32 channels."""
        return self.dim // 32

    @property
    def halves(self) -> int:
        return 2 if self.steps % 2 == 0 else 1

    @property
    def row_groups(self) -> int:
        """Warps that share the rows of a tile."""
        return min(ROWS // 8, WARPS // (self.head_tiles * self.halves))

    @property
    def row_tiles(self) -> int:
        """Tiles of 8 rows of a warp."""
        return ROWS // 8 // self.row_groups

    @property
    def units(self) -> int:
        """Warps with scores of their own; the others repeat some."""
        return self.head_tiles * self.halves * self.row_groups

    # ---- output

    @property
    def channel_tiles(self) -> int:
        """Tiles of 8 channels of a warp: one, or pairs."""
        tiles = -(-self.channels // 8 // WARPS)
        return tiles if tiles == 1 else tiles + tiles % 2

    # ---- shared memory

    def shared_bytes(self, stages: int) -> int:
        """Bytes of a block with so many stages; a few words beside the large buffers are left out."""
        words = stages * ROWS * self.raw_words + self.weight_parts * self.padded * ROWS // 2
        if self.split_rows:
            words += ROWS * self.dim // self.most_slices // 2
        else:
            words += (self.padded + ROWS) * self.dim // 2 + self.halves * self.padded * SCORES
        return 4 * (words + self.slots)

    @property
    def roomy_stages(self) -> int:
        """As many stages, up to `MOST_STAGES`, as every GPU has room for that runs blocks of so many heads."""
        room = ROOM if self.split == 1 else SMALL_ROOM
        return max((n for n in range(1, MOST_STAGES + 1) if self.shared_bytes(n) <= room), default=1)

    # ---- its layout in words, 16-byte pieces of a row swapped about

    def piece(self, row: Any, piece: Any) -> Any:
        """Where piece `piece` (8 channels) of a row of values lies.

        The lanes of a warp read either two neighbouring rows at four pieces, or eight rows at one piece: in both cases
        they meet all banks.
        """
        pieces = self.channels // 8
        mask = min(8, pieces & -pieces) - 1
        swap = T.bitwise_or(T.bitwise_and(row, 1) * 4, T.bitwise_and(row // 2, 3))
        return row * (self.channels // 2) + T.bitwise_xor(piece, T.bitwise_and(swap, mask)) * 4

    @staticmethod
    def weight_piece(row: Any, piece: Any) -> Any:
        """Where piece `piece` of the weights of head `row` lies."""
        return row * (ROWS // 2) + T.bitwise_xor(piece, T.bitwise_and(row // 2, 3)) * 4

    @property
    def shared(self) -> str:
        return "shared.dyn" if self.mma == "ptx" else "shared"

    @property
    def each(self) -> Any:
        """Loops over registers: unrolled on a GPU; a processor gets less to compile."""
        return T.unroll if self.mma == "ptx" else T.serial
