"""Just enough ELF: whether a shared library is whole, before the loader maps it, and where each kernel's code lies.

The system's loader trusts the headers: a file that ends before what they promise kills the process on first touch.
"""

from __future__ import annotations

import mmap
import platform
import struct
from pathlib import Path
from typing import NamedTuple

from ds41_tvm.errors import BadModule

PREFIX = "__tvm_ffi_"  # of the symbol of every entry point
_MACHINES = {"x86_64": 62, "aarch64": 183}
_LOAD, _DYNAMIC = 1, 2  # types of segments
_SYMTAB, _NOBITS = 2, 8  # types of sections
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class Section(NamedTuple):
    """A section: where its bytes lie in the file, and where in memory."""

    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


class SharedLibrary:
    """The headers of a shared library. Raises BadModule unless it is a whole one; `machine` None accepts any."""

    def __init__(self, path: Path, machine: str | None = platform.machine()) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: empty
            raise self._bad(f"cannot be read ({error})") from None
        try:
            self._parse(machine)
        except struct.error:
            raise self._bad("its headers end beyond the file") from None

    def _bad(self, what: str) -> BadModule:
        return BadModule(f"{self.path}: {what}; expected the shared library of compiled kernels; compile it again")

    def _parse(self, machine: str | None) -> None:
        size = len(self._data)
        if size < _HEADER.size:
            raise self._bad(f"has {size} bytes, less than an ELF header")
        (ident, kind, isa, _, _, segments, sections, _, _, segment_size, segment_count, section_size, section_count,
         names) = _HEADER.unpack_from(self._data)  # fmt: skip
        if ident[:6] != b"\x7fELF\x02\x01" or kind != 3:
            raise self._bad(f"begins with {ident[:6]!r}, type {kind}: not a 64-bit ELF shared library")
        if machine is not None and isa != _MACHINES.get(machine, isa):
            raise self._bad(f"is for machine type {isa}; this machine is {machine} ({_MACHINES.get(machine)})")
        if segment_size != _SEGMENT.size or section_size != _SECTION.size or not segment_count or not section_count:
            raise self._bad("has no usable table of segments and sections")
        for i in range(segment_count):
            kind, _, offset, _, _, length, _, _ = _SEGMENT.unpack_from(self._data, segments + i * segment_size)
            if kind in (_LOAD, _DYNAMIC) and offset + length > size:
                raise self._bad(f"ends at byte {size}, but segment {i} reaches to {offset + length}: it is cut short")
        raw = [_SECTION.unpack_from(self._data, sections + i * section_size) for i in range(section_count)]
        if any(s[1] != _NOBITS and s[4] + s[5] > size for s in raw) or names >= len(raw):
            raise self._bad(f"ends at byte {size}, before its last section: it is cut short")
        at = raw[names][4]
        self.sections = [Section(self._text(at + s[0]), s[1], s[3], s[4], s[5], s[6]) for s in raw]

    def _text(self, at: int) -> str:
        end = self._data.find(b"\0", at)
        return self._data[at : end if end >= 0 else at].decode(errors="replace")

    def symbols(self) -> dict[str, int]:
        """Addresses of the named symbols of the full symbol table that lie in a section."""
        found = {}
        for table in self.sections:
            if table.kind == _SYMTAB and table.link < len(self.sections):
                strings = self.sections[table.link].offset
                for at in range(table.offset, table.offset + table.size, _SYMBOL.size):
                    name, _, _, section, address, _ = _SYMBOL.unpack_from(self._data, at)
                    if name and section and section < 0xFF00:
                        found[self._text(strings + name)] = address
        return found

    def kernels(self) -> dict[str, tuple[int, int]]:
        """Address and bytes of each kernel's code: from its entry point to the next one.

        Each kernel is compiled to an object of its own and linked in order, so what lies between two entry points (the
        loop bodies have no names) belongs to the first.
        """
        text = next((s for s in self.sections if s.name == ".text"), None)
        if text is None:
            raise self._bad("has no code")
        end = text.address + text.size
        starts = sorted(
            (address, name.removeprefix(PREFIX))
            for name, address in self.symbols().items()
            if name.startswith(PREFIX) and name != f"{PREFIX}main" and text.address <= address < end
        )
        ends = [address for address, _ in starts[1:]] + [end]
        return {name: (address, stop - address) for (address, name), stop in zip(starts, ends, strict=True)}
