"""Sequences on disk: packed cache rows by position, so that a prefix computed once continues anywhere.

A file of packed tensors (`packed_file`). Per layer ``window.L`` (ring rows, oldest first), per source ``latent.L`` and
``key.L`` (all groups) and, at a ratio above 1, ``members.L``. The metadata name configuration, layers and modes: what
the rows depend on, or what chose the inputs of later layers. The block size, the number of draft tokens, the target and
the threads may differ between the runner that saves and the one that restores (another target rounds sums differently
from there on).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import StateError, StateFileError
from ds41_tvm.packed_file import PackedFile, Spec, write_packed
from ds41_tvm.runtime.state import Caches, Sequence

if TYPE_CHECKING:
    from ds41_tvm.runtime.memory import RowPool

FORMAT, SCHEMA = "ds41-tvm sequence", "1"
Rows = tuple["RowPool", Any, NDArray[np.int64]]  # pool, key of its array, rows


def save_sequence(caches: Caches, sequence: Sequence, path: Path) -> None:
    """Write `sequence` to `path`; a file that is there already is replaced once the new one is complete."""
    metadata = {
        **_identity(caches),
        "target": caches.program.target.name,
        "length": str(sequence.length),
        "highest": str(sequence.highest),
        "draft": str(caches.program.draft),
        "published": "" if sequence.published is None else str(sequence.published),
    }
    places = stored_rows(caches, sequence)
    specs = {
        name: Spec(pool.arrays[key].dtype, (len(rows), *pool.arrays[key].shape[1:]))
        for name, (pool, key, rows) in places.items()
    }

    def make(name: str) -> NDArray[Any]:
        pool, key, rows = places[name]
        return pool.read(key, rows)

    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w+b") as file:
                write_packed(file, specs.items(), make, metadata)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise StateError(f"{path}: the sequence cannot be written ({error.strerror or error})") from error


def restore_sequence(caches: Caches, path: Path) -> Sequence:
    """A new sequence from a file. Raises StateFileError if it is damaged or not of such a runner."""
    file = PackedFile(path, StateFileError)
    _check_identity(caches, file)
    length, highest, draft, published = (_number(file, name) for name in ("length", "highest", "draft", "published"))
    if length is None or highest is None or draft is None or not length <= highest:
        raise StateFileError(f"{path}: length {length}, highest {highest}, draft {draft}; the file is damaged")
    if length > caches.config.max_seq_len or (published is not None and published not in caches.program.layers):
        raise StateFileError(f"{path}: length {length}, published by layer {published}: the file is damaged")
    sequence = Sequence(caches)
    try:
        sequence.reserve(length)
        sequence.advance(length)
        sequence.published = published
        # Rows older than what was saved count as overwritten; so no ring holds more here than it did there.
        sequence.highest = max(length, highest - draft + caches.program.draft)
        saved = _saved_positions(caches, length, highest, draft)
        places = stored_rows(caches, sequence)
        file.check(
            {
                name: Spec(pool.arrays[key].dtype, (_count(name, saved, caches, length), *pool.arrays[key].shape[1:]))
                for name, (pool, key, _) in places.items()
            }
        )
        file.verify()
        for name, (pool, key, rows) in places.items():
            values = file.tensor(name)
            pool.write(key, rows, values[len(values) - len(rows) :])
    except BaseException:
        sequence.close()
        raise
    return sequence


def stored_rows(caches: Caches, sequence: Sequence) -> dict[str, Rows]:
    """Where the rows of a sequence lie, by the tensor names of a file: pool, key of its array, rows of that array."""
    return _places(caches, sequence, _positions(caches, sequence))


def _identity(caches: Caches) -> dict[str, str]:
    program = caches.program
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "config": program.config.digest(),
        "layers": ",".join(map(str, program.layers)),
        "linear": program.linear,
        "ties": program.ties,
        "keys": caches.identity.get("keys", ""),
        "weights": caches.identity.get("weights", ""),
    }


def _check_identity(caches: Caches, file: PackedFile) -> None:
    for name, mine in _identity(caches).items():
        its = file.metadata.get(name)
        unknown = name == "weights" and (not its or not mine)  # weights given as arrays have no digest
        if its != mine and not unknown:
            raise StateFileError(
                f"{file.path}: was saved with {name} {its!r}; this runner has {mine!r}: the caches would not be those "
                f"of the same tokens; restore it with the runner it belongs to, or feed the tokens again"
            )


def _number(file: PackedFile, name: str) -> int | None:
    text = file.metadata.get(name, "?")
    if text and not (text.isascii() and text.isdigit() and len(text) < 12):
        raise StateFileError(f"{file.path}: {name} {text[:40]!r}; expected a number; the file is damaged")
    return int(text) if text else None


# ---- which positions a ring holds, and where

Positions = dict[int, NDArray[np.int64]]  # by ratio of the member ring, 0 for the window rings


def _positions(caches: Caches, sequence: Sequence) -> Positions:
    """Positions that the rings of a sequence hold, ascending."""
    return _saved_positions(caches, sequence.length, sequence.highest, caches.program.draft)


def _saved_positions(caches: Caches, length: int, highest: int, draft: int) -> Positions:
    sizes = {0: caches.config.window_size, **{ratio: ratio for ratio in caches.members}}
    return {ratio: np.arange(min(max(0, highest - size - draft), length), length) for ratio, size in sizes.items()}


def _places(caches: Caches, sequence: Sequence, positions: Positions) -> dict[str, Rows]:
    """Where the rows of each tensor lie."""
    out: dict[str, Rows] = {}

    def ring(pool: RowPool, slot: int, ratio: int) -> NDArray[np.int64]:
        return slot * pool.unit + positions[ratio] % pool.unit

    for layer in caches.program.layers:
        out[f"window.{layer}"] = (caches.rings, layer, ring(caches.rings, sequence.slot, 0))
    for ratio, layers in caches.sources.items():
        groups = sequence.rows(ratio, np.arange(sequence.length // ratio))
        for layer in layers:
            out[f"latent.{layer}"] = (caches.blocks[ratio], (layer, "latent"), groups)
            out[f"key.{layer}"] = (caches.blocks[ratio], (layer, "key"), groups)
            if ratio > 1:
                pool = caches.members[ratio]
                out[f"members.{layer}"] = (pool, layer, ring(pool, sequence.member_slots[ratio], ratio))
    return out


def _count(name: str, saved: Positions, caches: Caches, length: int) -> int:
    """Rows of a tensor in the file."""
    kind, _, layer = name.partition(".")
    ratio = caches.config.role(int(layer)).ratio
    if kind in ("latent", "key"):
        return length // ratio
    return len(saved[0 if kind == "window" else ratio])
