"""One safetensors file: a strict header reader, read-only memory-mapped views, and a writer.

Layout: uint64 little-endian header length, a JSON object ``{name: {dtype, shape, data_offsets}}``, then the
values. Our own reader because safetensors' NumPy front-end knows neither ``F8_E4M3`` nor ``F8_E8M0``; like
it, this one refuses overlapping tensors, holes and trailing bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import (
    BadHeader,
    CheckpointError,
    DuplicateTensor,
    OverlappingTensors,
    ShardChanged,
    TruncatedFile,
)
from ..strict_json import parse_object, short

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
HEADER_ALIGNMENT = 64
MAX_RANK = 32

# Sizes in bits of all types a shard may hold; the views below are made only of those that we read.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64,
    "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
CARRIED_AS = {"BF16": "<u2", "F32": "<f4", "F8_E4M3": "|u1", "F8_E8M0": "|u1"}
# widest first, so that every tensor is aligned to its type
_WRITE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3")


class Entry(msgspec.Struct, frozen=True):
    """Where one tensor lies: type, shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Identity(NamedTuple):
    """What tells that a file is still the one that was opened."""

    size: int
    modified_ns: int
    inode: int


class Shard:
    """A safetensors file whose header was read and checked; its values are mapped at the first ``view``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.identity = _identity(os.fstat(file.fileno()))
                self.entries = _read_header(path, file.read(8), file, self.identity.size)
        except OSError as exc:
            raise CheckpointError(f"{path}: cannot be read ({exc.strerror}); expected a safetensors file") from None
        self._map: NDArray[np.uint8] | None = None  # a plain view, so that results are plain arrays

    @property
    def is_mapped(self) -> bool:
        """Whether the file's values are mapped now."""
        return self._map is not None

    def view(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only view of the file.

        bf16 as uint16 bits, e4m3 and e8m0 as uint8, f32 as float32. Raises ``ShardChanged`` if the file was
        replaced, cut or written to since its header was read.
        """
        try:
            now = _identity(os.stat(self.path))
        except OSError as exc:
            raise ShardChanged(f"{self.path}: gone since it was opened ({exc.strerror}); load again") from None
        if now != self.identity:
            raise ShardChanged(
                f"{self.path}: changed since it was opened (was {self.identity.size} bytes, is {now.size}); load again"
            )
        if self._map is None:
            try:
                self._map = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
            except OSError as exc:
                raise CheckpointError(f"{self.path}: cannot be mapped into memory ({exc.strerror})") from None
        entry = self.entries[name]
        values = self._map[entry.start : entry.stop].view(CARRIED_AS[entry.dtype]).reshape(entry.shape)
        return values if values.flags.aligned else values.copy()

    def release(self) -> None:
        """Drops the map; the memory goes back once no view is left. The next ``view`` maps the file again."""
        self._map = None


def _identity(stat: os.stat_result) -> Identity:
    return Identity(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _read_header(path: Path, prefix: bytes, file: Any, size: int) -> dict[str, Entry]:
    if len(prefix) < 8:
        raise TruncatedFile(f"{path}: {size} bytes; expected at least the 8 bytes of the header length")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise BadHeader(f"{path}: header length {length}; expected at most {MAX_HEADER_BYTES}; not a safetensors file")
    if 8 + length > size:
        raise BadHeader(
            f"{path}: header length {length} is beyond the file of {size} bytes; the file is cut or damaged"
        )
    header = parse_object(file.read(length), f"{path}: header", BadHeader, duplicate=DuplicateTensor)
    header.pop("__metadata__", None)
    base = 8 + length
    entries = {name: _entry(f"{path}: tensor {short(name)}", value, base) for name, value in header.items()}
    _check_extents(path, entries, base, size)
    return entries


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(where: str, value: object, base: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"{where}: entry {short(value)}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise BadHeader(f"{where}: dtype {short(dtype)}; expected a string")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(n) for n in shape):
        raise BadHeader(f"{where}: shape {short(shape)}; expected a list of at most {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise BadHeader(f"{where}: data_offsets {short(offsets)}; expected two offsets that are not negative")
    start, stop = offsets
    if start > stop:
        raise BadHeader(f"{where}: data_offsets {offsets} run backwards; expected start <= end")
    bits = DTYPE_BITS.get(dtype)  # a type we do not know is judged only if a layer needs the tensor
    if bits is not None and (stop - start) * 8 != bits * math.prod(shape):
        raise BadHeader(
            f"{where}: data_offsets {offsets} span {stop - start} bytes, but shape {short(shape)} of {dtype} "
            f"takes {short(bits * math.prod(shape) // 8)}; the header is damaged"
        )
    return Entry(dtype, tuple(shape), base + start, base + stop)


def _check_extents(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor; the plainest reason is reported first."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    for name, entry in ordered:
        if entry.stop > size:
            raise TruncatedFile(
                f"{path}: tensor {short(name)} ends at byte {entry.stop}, but the file has {size}; copy the file again"
            )
    for (name, entry), (after, following) in pairwise(ordered):
        if following.start < entry.stop:
            raise OverlappingTensors(
                f"{path}: tensor {short(after)} starts at byte {following.start}, inside {short(name)}, "
                f"which ends at {entry.stop}; the header is damaged"
            )
    end = base
    for name, entry in ordered:
        if entry.start != end:
            raise BadHeader(
                f"{path}: bytes {end}..{entry.start} before tensor {short(name)} belong to none; expected no holes"
            )
        end = entry.stop
    if end != size:
        raise BadHeader(f"{path}: {size} bytes, but its tensors end at {end}; expected no trailing bytes")


class ShardWriter:
    """Writes one safetensors file of known names, types and shapes, tensor by tensor, in any order."""

    def __init__(self, path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        ordered = sorted(tensors, key=lambda t: (_WRITE_ORDER.index(t[1]), t[0]))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in ordered:
            begin, end = end, end + DTYPE_BITS[dtype] // 8 * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
        base = 8 + len(text)
        self._entries = {
            name: Entry(h["dtype"], tuple(h["shape"]), base + h["data_offsets"][0], base + h["data_offsets"][1])
            for name, h in header.items()
            if name != "__metadata__"
        }
        self._file = open(path, "xb")  # noqa: SIM115 - stays open for put()
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(base + end)

    def put(self, name: str, values: NDArray[Any]) -> None:
        """Writes the values of tensor ``name``, encoded as ``Shard.view`` gives them."""
        entry = self._entries.pop(name)
        data = np.ascontiguousarray(values, CARRIED_AS[entry.dtype])
        if data.shape != entry.shape:
            raise CheckpointError(f"{name}: shape {data.shape}; expected {entry.shape} as announced")
        self._file.seek(entry.start)
        self._file.write(data.data)

    def close(self) -> None:
        """Closes the file; raises ``CheckpointError`` if a tensor that the header names was not put."""
        self._file.close()
        if self._entries:
            raise CheckpointError(f"{self._file.name}: {', '.join(sorted(self._entries))} not written")

    def abort(self) -> None:
        """Closes the file as it is."""
        self._file.close()
