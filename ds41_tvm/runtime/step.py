"""The plan of a step: which token sits where, made once on the host and shared by all layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import StateError, StepError
from ds41_tvm.packing import aligned_copy
from ds41_tvm.reference.rope import rope_table
from ds41_tvm.runtime.state import Caches, Sequence

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Groups:
    """What a compression ratio adds to a plan. G groups complete in the step, sequence after sequence, ascending."""

    member: I64  # [G, ratio] row of the step, or -1 - row of the member ring
    first: I64  # [G] row of the step's last member: where a ratio-1 latent comes from
    rope: F32  # [G, pairs, 2] at position group * ratio
    row: I64  # [G] pool row
    visible: I32  # [n] groups that lie wholly at or before each token
    total: I32  # [n] groups of the token's sequence after the step
    table: I32  # [sequences, blocks]
    completes: tuple[bool, ...]  # whether the step completes a group, by sequence


@dataclass
class LayerRows:
    """What one layer leaves in a step until it is committed: rows for the rings, and results for consumer layers."""

    window: NDArray[np.uint8]
    members: tuple[F32, F32] | None = None
    selection: I32 | None = None
    candidates: I32 | None = None


@dataclass
class Step:
    """`counts[i]` new tokens of `sequences[i]`, one after the other in rows 0..tokens - 1."""

    caches: Caches = field(repr=False)
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]
    start: I32 = field(repr=False)  # [sequences] position of the first new token
    base: I32 = field(repr=False)  # [sequences] its row
    slot: I32 = field(repr=False)  # [sequences] place in the window rings
    sequence: I32 = field(repr=False)  # [n]
    position: I32 = field(repr=False)  # [n]
    rope: Mapping[bool, F32] = field(repr=False)  # by "is compressed": [n, pairs, 2]
    groups: Mapping[int, Groups] = field(repr=False)  # by ratio
    done: dict[int, LayerRows] = field(default_factory=dict, repr=False)  # by layer
    published: list[int | None] = field(default_factory=list, repr=False)
    stamps: tuple[int, ...] = field(default=(), repr=False)  # of the sequences, when the step was planned
    committed: bool = False

    @property
    def tokens(self) -> int:
        """Rows of x."""
        return len(self.position)

    def check_current(self) -> None:
        """Raises StepError or StateError if the sequences are not as they were when the step was planned.

        Equal lengths are not enough: tokens taken back and fed again leave other rows in other blocks, and a later step
        for the same tokens has written its latents where this one's were.
        """
        if self.committed:
            raise StepError("the step is committed already; plan a new one with runner.step(...)")
        for i, sequence in enumerate(self.sequences):
            sequence.check_open()
            if sequence.stamp != self.stamps[i]:
                raise StepError(
                    f"sequence {i} of the step had {self.start[i]} tokens when the step was planned and was changed, "
                    f"or planned for, since; it has {sequence.length} now; plan a new step"
                )


def plan_step(caches: Caches, frequencies: Mapping[bool, F32], parts: Iterable[tuple[Sequence, int]]) -> Step:
    """Plan `count` new tokens for each (sequence, count); see `Runner.step`."""
    pairs = _checked(caches, parts)
    sequences, counts = tuple(s for s, _ in pairs), tuple(n for _, n in pairs)
    count = np.array(counts, np.int64)
    start = np.array([s.length for s in sequences], np.int64)
    base = np.cumsum(count) - count
    sequence = np.repeat(np.arange(len(counts)), count)
    position = np.arange(count.sum()) - base[sequence] + start[sequence]
    for s, n in pairs:
        s.reserve(s.length + n)
        if n:
            s.touch()
    groups = {ratio: _plan_groups(caches, frequencies[True], ratio, sequences, start, count, base, sequence, position)
              for ratio in caches.sources}  # fmt: skip
    return Step(
        caches,
        sequences,
        counts,
        _i32(start),
        _i32(base),
        _i32(np.array([s.slot for s in sequences])),
        _i32(sequence),
        _i32(position),
        {key: aligned_copy(rope_table(f, position)) for key, f in frequencies.items()},
        groups,
        published=[s.published for s in sequences],
        stamps=tuple(s.stamp for s in sequences),
    )


def _checked(caches: Caches, parts: Iterable[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    try:
        pairs = [(sequence, count) for sequence, count in parts]
    except (TypeError, ValueError) as error:
        raise StepError(f"a step takes pairs (sequence, number of tokens), not {parts!r}") from error
    seen: set[int] = set()
    for sequence, count in pairs:
        if not isinstance(sequence, Sequence) or not sequence.belongs_to(caches):
            raise StepError(f"{sequence!r} is no sequence of this runner; make one with runner.new_sequence()")
        sequence.check_open()
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise StepError(f"number of tokens {count!r} of {sequence!r}: expected an integer of at least 0")
        if id(sequence) in seen:
            raise StepError(f"{sequence!r} occurs twice in the step; give all its new tokens at once")
        seen.add(id(sequence))
        limit = caches.config.max_seq_len
        if sequence.length + count > limit:
            raise StateError(
                f"{count} tokens after {sequence.length} exceed max_seq_len {limit}; shorten the sequence, or raise "
                f"max_seq_len in the configuration"
            )
    return [(s, int(n)) for s, n in pairs]


def _plan_groups(
    caches: Caches,
    frequencies: F32,
    ratio: int,
    sequences: tuple[Sequence, ...],
    start: I64,
    count: I64,
    base: I64,
    sequence: I64,
    position: I64,
) -> Groups:
    first, last = start // ratio, (start + count) // ratio
    done = last - first
    owner = np.repeat(np.arange(len(sequences)), done)
    group = np.arange(done.sum()) - np.repeat(np.cumsum(done) - done, done) + first[owner]
    member_position = group[:, None] * ratio + np.arange(ratio)
    row = base[owner][:, None] + member_position - start[owner][:, None]
    if ratio > 1:
        ring = caches.members[ratio].unit
        slot = np.array([s.member_slots[ratio] for s in sequences], np.int64)
        old = slot[owner][:, None] * ring + member_position % ring
        row = np.where(member_position >= start[owner][:, None], row, -1 - old)
    tables = [s.table(ratio) for s in sequences]
    # A width that grows in leaps: kernels are indifferent to it, and it keeps shapes few.
    table = np.zeros((len(sequences), max([1, *(len(t) for t in tables)])), np.int32)
    for i, blocks in enumerate(tables):
        table[i, : len(blocks)] = blocks
    rows = [s.rows(ratio, group[owner == i]) for i, s in enumerate(sequences)]
    return Groups(
        aligned_copy(np.ascontiguousarray(row, np.int64)),
        aligned_copy(np.ascontiguousarray(row[:, -1], np.int64)),
        aligned_copy(rope_table(frequencies, group * ratio)),
        aligned_copy(np.concatenate([np.zeros(0, np.int64), *rows])),
        _i32((position + 1) // ratio),
        _i32(last[sequence]),
        aligned_copy(table),
        tuple(bool(d) for d in done),
    )


def _i32(values: NDArray[Any]) -> I32:
    return aligned_copy(np.ascontiguousarray(values, np.int32))
