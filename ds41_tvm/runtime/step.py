"""The plan of a step: which token sits where, made once on the host and shared by all layers.

What kernels read of it goes to the device in one upload, and beside it lie the rows that the layers will leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import StateError, StepError
from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.program import PAD_ROWS
from ds41_tvm.reference.rope import rope_tables
from ds41_tvm.runtime.device import Array
from ds41_tvm.runtime.state import Caches, Sequence

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Groups:
    """What a compression ratio adds to a plan. G groups complete in the step, sequence after sequence, ascending."""

    count: int  # G
    most: I32  # [n] groups of the token's sequence after the step, on the host
    completes: tuple[bool, ...]  # whether the step completes a group, by sequence
    # On the device:
    member: Array  # int64 [G, ratio]: row of the step, or -1 - row of the member ring
    rope: Array  # f32 [G, pairs, 2] at position group * ratio
    row: Array  # int64 [G]: pool row
    visible: Array  # int32 [n]: groups that lie wholly at or before each token
    total: Array  # int32 [n]: `most`
    table: Array  # int32 [sequences, blocks]
    visible_blocks: Array | None  # int32 [n]: candidate blocks of the visible groups (ratio of the candidate source)
    total_blocks: Array | None
    keep: tuple[Array, Array, Array] | None  # int64: rows of the step that the member rings keep, and where (kv, gate)


@dataclass
class LayerRows:
    """What one layer leaves in a step until it is committed: rows for the rings, and results for consumer layers."""

    window: Array  # uint8 [n, bytes]
    members: tuple[Array, Array] | None = None  # f32 [n + PAD_ROWS, head_dim]: kv, gate
    selection: Array | None = None  # int32 [n, index_topk]
    candidates: Array | None = None  # int32 [n, candidate_topk_blocks]


@dataclass(frozen=True)
class Plan:
    """What kernels read of a step, on the device; fields as in `Step`."""

    start: Array
    base: Array
    slot: Array
    sequence: Array
    position: Array
    rows: Array  # int64 [n]: 0, 1, 2, ...
    rope: Mapping[bool, Array]  # by "is compressed": f32 [n, pairs, 2]
    keep: tuple[Array, Array]  # int64: rows of the step that the window rings keep, and where


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
    plan: Plan = field(repr=False)
    groups: Mapping[int, Groups] = field(repr=False)  # by ratio
    rows: dict[int, LayerRows] = field(repr=False)  # by layer: memory for what it leaves
    memory: Mapping[str, Array] = field(repr=False)  # all of that, by name
    done: dict[int, LayerRows] = field(default_factory=dict, repr=False)  # by layer: those that ran
    published: list[int | None] = field(default_factory=list, repr=False)
    stamps: tuple[int, ...] = field(default=(), repr=False)  # of the sequences, when the step was planned
    committed: bool = False
    graph: Any = None  # the `StepGraph` that ran it
    replaced: bool = False  # a later step was planned into its memory

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
        if self.replaced:
            raise StepError("another step was planned like this one and has its memory now; run and commit that one")
        for i, sequence in enumerate(self.sequences):
            sequence.check_open()
            if sequence.stamp != self.stamps[i]:
                raise StepError(
                    f"sequence {i} of the step had {self.start[i]} tokens when the step was planned and was changed, "
                    f"or planned for, since; it has {sequence.length} now; plan a new step"
                )


def plan_step(
    caches: Caches,
    frequencies: Mapping[bool, F32],
    parts: Iterable[tuple[Sequence, int]],
    like: Step | None = None,
) -> Step:
    """Plan `count` new tokens for each (sequence, count); see `Runner.step`."""
    pairs = _checked(caches, parts)
    sequences, counts = tuple(s for s, _ in pairs), tuple(n for _, n in pairs)
    count = np.array(counts, np.int64)
    start = np.array([s.length for s in sequences], np.int64)
    base = np.cumsum(count) - count
    sequence = np.repeat(np.arange(len(counts)), count)
    n = len(sequence)
    position = np.arange(n) - base[sequence] + start[sequence]
    for s, new in pairs:
        s.reserve(s.length + new)
        if new:
            s.touch()
    slot = np.array([s.slot for s in sequences], np.int64)
    host: dict[str, NDArray[Any]] = {
        name: values.astype(np.int32)
        for name, values in (
            ("start", start), ("base", base), ("slot", slot), ("sequence", sequence), ("position", position),
        )
    }  # fmt: skip
    arrays: dict[str, NDArray[Any]] = {**host, "rows": np.arange(n)}
    turns = {f"rope {key}": (f, position) for key, f in frequencies.items()}
    end = (start + count)[sequence]
    arrays["keep"], arrays["keep to"] = _kept(caches.window_ring, slot, sequence, position, end)
    completed: dict[int, tuple[I32, tuple[bool, ...]]] = {}
    width = caches.device.leap(max([1, *(len(s.table(ratio)) for s in sequences for ratio in caches.sources)]))
    for ratio in caches.sources:
        made, group = _plan_groups(caches, ratio, sequences, start, count, base, sequence, position, width)
        turns[f"{ratio} rope"] = frequencies[True], group * ratio
        arrays |= {f"{ratio} {name}": array for name, array in made.items()}
        completed[ratio] = arrays[f"{ratio} total"], tuple(bool(d) for d in (start + count) // ratio - start // ratio)
    arrays |= zip(turns, rope_tables(list(turns.values())), strict=True)
    scratch = _row_specs(caches, n)
    if like is not None:
        _check_like(like, arrays, n)
    placed = caches.device.place(arrays, scratch, None if like is None else like.memory)
    return Step(
        caches=caches,
        sequences=sequences,
        counts=counts,
        start=host["start"],
        base=host["base"],
        slot=host["slot"],
        sequence=host["sequence"],
        position=host["position"],
        plan=Plan(
            start=placed["start"],
            base=placed["base"],
            slot=placed["slot"],
            sequence=placed["sequence"],
            position=placed["position"],
            rows=placed["rows"],
            rope={key: placed[f"rope {key}"] for key in frequencies},
            keep=(placed["keep"], placed["keep to"]),
        ),
        groups={ratio: _groups(placed, ratio, *completed[ratio]) for ratio in caches.sources},
        rows={layer: _layer_rows(placed, layer) for layer in caches.program.layers},
        memory=placed,
        published=[s.published for s in sequences],
        stamps=tuple(s.stamp for s in sequences),
    )


def _check_like(like: Step, arrays: Mapping[str, NDArray[Any]], n: int) -> None:
    """Raises StepError unless a step with these arrays fits the memory of `like`; takes it from that step."""
    for name, array in arrays.items():
        if tuple(like.memory[name].shape) != array.shape:
            raise StepError(
                f"the step is not like the given one: {name} has the shape {list(array.shape)}, there it is "
                f"{list(like.memory[name].shape)} ({n} tokens here, {like.tokens} there); plan it without `like`"
            )
    like.replaced = not like.committed


def _kept(ring: int, slot: I64, sequence: I64, position: I64, end: I64) -> tuple[I64, I64]:
    """Rows of the step among the last `ring` of their sequence, and their places in the rings."""
    rows = np.nonzero(position >= end - ring)[0]
    return rows, slot[sequence[rows]] * ring + position[rows] % ring


def _row_specs(caches: Caches, n: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of what the layers will leave."""
    c = caches.config
    specs: dict[str, tuple[tuple[int, ...], Any]] = {}
    for layer in caches.program.layers:
        role = c.role(layer)
        specs[f"window {layer}"] = ((n, row_bytes("window", c.head_dim)), np.uint8)
        if role.kind == "full" and role.ratio > 1:
            for name in ("kv", "gate"):
                specs[f"{name} {layer}"] = ((n + PAD_ROWS, c.head_dim), np.float32)
        if role.kind in ("full", "reindex"):
            specs[f"selection {layer}"] = ((n, c.index_topk), np.int32)
        if role.is_candidate_source:
            specs[f"candidates {layer}"] = ((n, c.candidate_topk_blocks), np.int32)
    return specs


def _layer_rows(placed: Mapping[str, Array], layer: int) -> LayerRows:
    kv, gate = placed.get(f"kv {layer}"), placed.get(f"gate {layer}")
    return LayerRows(
        placed[f"window {layer}"],
        None if kv is None else (kv, gate),
        placed.get(f"selection {layer}"),
        placed.get(f"candidates {layer}"),
    )


def _groups(placed: Mapping[str, Array], ratio: int, most: I32, completes: tuple[bool, ...]) -> Groups:
    def get(name: str) -> Any:
        return placed.get(f"{ratio} {name}")

    return Groups(
        count=len(get("row")),
        most=most,
        completes=completes,
        member=get("member"),
        rope=get("rope"),
        row=get("row"),
        visible=get("visible"),
        total=get("total"),
        table=get("table"),
        visible_blocks=get("visible_blocks"),
        total_blocks=get("total_blocks"),
        keep=None if get("keep") is None else (get("keep"), get("keep kv"), get("keep gate")),
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
    ratio: int,
    sequences: tuple[Sequence, ...],
    start: I64,
    count: I64,
    base: I64,
    sequence: I64,
    position: I64,
    width: int,
) -> tuple[dict[str, NDArray[Any]], I64]:
    """Arrays of `Groups` by name but for `rope`, and the groups that complete; `width`: columns of the block table."""
    first, last = start // ratio, (start + count) // ratio
    done = last - first
    owner = np.repeat(np.arange(len(sequences)), done)
    group = np.arange(done.sum()) - np.repeat(np.cumsum(done) - done, done) + first[owner]
    member_position = group[:, None] * ratio + np.arange(ratio)
    row = base[owner][:, None] + member_position - start[owner][:, None]
    out: dict[str, NDArray[Any]] = {}
    if ratio > 1:
        ring = caches.members[ratio].unit
        slot = np.array([s.member_slots[ratio] for s in sequences], np.int64)
        old = slot[owner][:, None] * ring + member_position % ring
        row = np.where(member_position >= start[owner][:, None], row, -1 - old)
        out["keep"], place = _kept(ring, slot, sequence, position, (start + count)[sequence])
        out["keep kv"], out["keep gate"] = 2 * place, 2 * place + 1
    # Of one width for all ratios: with published keys, a table serves queries of another ratio. Block 0 is all zeros.
    table = np.zeros((len(sequences), width), np.int32)
    for i, s in enumerate(sequences):
        blocks = s.table(ratio)
        table[i, : len(blocks)] = blocks
    rows = [s.rows(ratio, group[owner == i]) for i, s in enumerate(sequences)]
    out["member"] = row
    out["row"] = np.concatenate([np.zeros(0, np.int64), *rows])
    out["visible"] = ((position + 1) // ratio).astype(np.int32)
    out["total"] = last[sequence].astype(np.int32)
    out["table"] = table
    c, source = caches.config, caches.config.candidate_source_layer
    if source in caches.program.layers and c.role(source).ratio == ratio:
        size = c.candidate_block_size
        out["visible_blocks"], out["total_blocks"] = -(-out["visible"] // size), -(-out["total"] // size)
    return out, group
