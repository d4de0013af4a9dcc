"""Files of packed tensors: safetensors whose every tensor starts at a multiple of 64 bytes, mapped copy-on-write.

Compiled code assumes that alignment, and NumPy hands only writable arrays to DLPack: a private writable map gives both
without a copy, and processes that map one file share its pages as long as nobody writes to them. safetensors allows no
holes, so small uint8 tensors named ``pad.N`` fill them. Same tensors, same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.errors import Ds41Error
from ds41_tvm.packing import ALIGNMENT
from ds41_tvm.strict_json import parse_object, short

DTYPES = {"U8": "|u1", "U16": "<u2", "U32": "<u4", "F32": "<f4"}
_NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
MAX_HEADER_BYTES = 16 << 20
DIGEST = "sha256"  # metadata key: digest of the whole file, taken with zeros in its own place
_NO_DIGEST = "0" * 64
Array = NDArray[Any]


class Spec(NamedTuple):
    """What is expected of a tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def write_packed(
    file: BinaryIO, tensors: Iterable[tuple[str, Spec]], make: Callable[[str], Array], metadata: Mapping[str, str]
) -> None:
    """Write the tensors in the given order, each asked of `make` when its turn comes, so that one is held at a time."""
    layout, entries, end, pads = list(tensors), {}, 0, 0
    order: list[tuple[str | None, int]] = []  # name, or None for padding; bytes
    for name, spec in layout:
        if gap := -end % ALIGNMENT:
            entries[f"pad.{pads}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
            order.append((None, gap))
            end, pads = end + gap, pads + 1
        size = spec.dtype.itemsize * math.prod(spec.shape)
        entries[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + size]}
        order.append((name, size))
        end += size
    text = _header(metadata, entries, _NO_DIGEST)
    file.write(text)
    digest, shapes = hashlib.sha256(text), dict(layout)
    for place, size in order:
        data: Any = bytes(size)
        if place is not None:
            array = np.ascontiguousarray(make(place), shapes[place].dtype)
            if array.shape != shapes[place].shape:
                raise ValueError(f"tensor {place}: shape {array.shape}, announced {shapes[place].shape}")
            data = array.reshape(-1).view(np.uint8).data if size else b""
        digest.update(data)
        file.write(data)
    # The digest is known now; its place in the header has the same length.
    file.seek(0)
    file.write(_header(metadata, entries, digest.hexdigest()))
    file.seek(0, os.SEEK_END)


def _header(metadata: Mapping[str, str], entries: Mapping[str, Any], digest: str) -> bytes:
    text = json.dumps({"__metadata__": {**metadata, DIGEST: digest}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class PackedFile:
    """An opened file of packed tensors. Raises `error` for anything that `write_packed` would not have written.

    Only the header is read; ``tensors`` are views of a private map, read from the disk when touched.
    """

    def __init__(self, path: Path, error: type[Ds41Error]) -> None:
        self.path, self._error = path, error
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                    raise error(
                        f"{path}: header of {length} bytes in a file of {size}; it is cut or damaged: copy it again"
                    )
                self._header = file.read(length)
                header = parse_object(self._header, f"{path}: header", error)
                self._base = 8 + length
                if self._base % ALIGNMENT:
                    raise error(f"{path}: the values start at byte {self._base}, no multiple of {ALIGNMENT}")
                self.metadata = self._strings(header.pop("__metadata__", None))
                self._entries = self._read(header, size - self._base)
                self._map = _map(file.fileno(), size)
        except OSError as exc:
            raise error(f"{path}: cannot be read ({exc.strerror}); expected a file of packed tensors") from None

    def _strings(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._error(f"{self.path}: __metadata__ {short(value)}; expected an object of strings")
        return value

    def _read(self, header: Mapping[str, Any], size: int) -> dict[str, tuple[Spec, int]]:
        entries, end = {}, 0
        for name, value in header.items():
            where = f"{self.path}: tensor {short(name)}"
            if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
                raise self._error(f"{where}: {short(value)}; expected dtype, shape and data_offsets")
            dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
            if not isinstance(dtype, str) or dtype not in DTYPES:
                raise self._error(f"{where}: dtype {short(dtype)}; expected one of {', '.join(DTYPES)}")
            if (
                not isinstance(shape, list)
                or len(shape) > 8
                or not all(type(n) is int and 0 <= n < 2**48 for n in shape)
            ):
                raise self._error(f"{where}: shape {short(shape)}; expected a list of sizes")
            spec = Spec(np.dtype(DTYPES[dtype]), tuple(shape))
            stop = end + spec.dtype.itemsize * math.prod(shape)
            if offsets != [end, stop] or (end % ALIGNMENT and not name.startswith("pad.")):
                raise self._error(f"{where}: data_offsets {short(offsets)}; expected {[end, stop]}, no holes, aligned")
            entries[name] = (spec, end)
            end = stop
        if end != size:
            raise self._error(f"{self.path}: holds {size} bytes of values, its header describes {end}; copy it again")
        return {name: entry for name, entry in entries.items() if not name.startswith("pad.")}

    def specs(self) -> dict[str, Spec]:
        """Types and shapes by name."""
        return {name: spec for name, (spec, _) in self._entries.items()}

    def check(self, expected: Mapping[str, Spec]) -> None:
        """Raises the error class unless the file holds exactly these tensors."""
        seen = self.specs()
        for name in sorted({*seen, *expected}):
            if seen.get(name) != expected.get(name):
                raise self._error(
                    f"{self.path}: tensor {short(name)}: {_show(seen.get(name))}; expected {_show(expected.get(name))}"
                )

    def tensor(self, name: str) -> Array:
        """A writable view; writing to it changes this process's copy only."""
        spec, start = self._entries[name]
        start += self._base
        size = spec.dtype.itemsize * math.prod(spec.shape)
        view: Array = self._map[start : start + size].view(spec.dtype).reshape(spec.shape)
        return view

    def verify(self) -> None:
        """Hash the whole file. Raises the error class if it is not what it was when it was written."""
        stated = self.metadata.get(DIGEST, "")
        blank = self._header.replace(stated.encode(), _NO_DIGEST.encode(), 1)
        digest = hashlib.sha256(len(self._header).to_bytes(8, "little") + blank)
        digest.update(self._map[self._base :].data)
        if len(stated) != len(_NO_DIGEST) or digest.hexdigest() != stated:
            raise self._error(
                f"{self.path}: has the digest {digest.hexdigest()}, states {short(stated)}; copy it again"
            )


def _show(spec: Spec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _map(descriptor: int, size: int) -> NDArray[np.uint8]:
    # MAP_NORESERVE: a private writable map would otherwise be charged as if every page were going to be copied.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags, access = mmap.MAP_PRIVATE | no_reserve, mmap.PROT_READ | mmap.PROT_WRITE
    return np.frombuffer(mmap.mmap(descriptor, size, flags=flags, prot=access), np.uint8)
