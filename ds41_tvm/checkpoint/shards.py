"""The shards of one checkpoint directory: which file holds a tensor, opened only when asked for."""

from __future__ import annotations

import os
from pathlib import Path, PureWindowsPath

from ..errors import BadIndex, DuplicateTensor, MissingShard, ShardOutsideDirectory
from ..strict_json import read_object, short
from .safetensors import Shard

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class ShardSet:
    """Tensors of a directory by name.

    With ``model.safetensors.index.json`` a shard is opened when one of its tensors is located; without it
    ``model.safetensors``, or else every ``*.safetensors``, is opened at once. Raises ``MissingShard``,
    ``BadIndex``, ``ShardOutsideDirectory``, ``DuplicateTensor``, and what ``Shard`` raises.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._shards: dict[str, Shard] = {}
        index = directory / INDEX_FILE
        if index.exists():
            self._files = _read_index(index)
        else:
            self._files = self._scan()

    def _scan(self) -> dict[str, str]:
        single = self.directory / SINGLE_FILE
        paths = [single] if single.exists() else sorted(self.directory.glob("[!.]*.safetensors"))
        if not paths:
            raise MissingShard(
                f"{self.directory}: no {INDEX_FILE}, no *.safetensors; expected a checkpoint as released"
            )
        files: dict[str, str] = {}
        for path in paths:
            for name in self._open(path.name).entries:
                if name in files:
                    raise _twice(self.directory, name, files[name], path.name)
                files[name] = path.name
        return files

    def _open(self, file: str) -> Shard:
        if file not in self._shards:
            path = self.directory / file
            if not os.path.isfile(path):  # pathlib's raises on names too long for the system
                raise MissingShard(
                    f"{self.directory}: {INDEX_FILE} names the shard {short(file)}, which is absent; "
                    "expected it beside the index; download it again"
                )
            self._shards[file] = Shard(path)
        return self._shards[file]

    def locate(self, name: str) -> Shard | None:
        """The shard that holds ``name``; ``None`` if the index does not name it or the shard lacks it."""
        file = self._files.get(name)
        if file is None:
            return None
        shard = self._open(file)
        return shard if name in shard.entries else None

    def listed_in(self, name: str) -> str | None:
        """The file in which ``name`` should lie, without opening it."""
        return self._files.get(name)

    @property
    def names(self) -> list[str]:
        """All names that the index, or the opened shards, give."""
        return list(self._files)

    @property
    def opened(self) -> list[Shard]:
        """Shards opened so far, in the order of their names."""
        return [self._shards[file] for file in sorted(self._shards)]

    def refuse_twins(self, names: list[str]) -> None:
        """Raises ``DuplicateTensor`` if an opened shard holds a tensor that the index places elsewhere."""
        for name in names:
            for file, shard in self._shards.items():
                if name in shard.entries and file != self._files.get(name, file):
                    raise _twice(self.directory, name, self._files[name], file)

    def release(self) -> None:
        """Drops the memory maps of all shards; see ``Shard.release``."""
        for shard in self._shards.values():
            shard.release()


def _twice(directory: Path, name: str, first: str, second: str) -> DuplicateTensor:
    return DuplicateTensor(f"{directory}: tensor {short(name)} is in {first} and in {second}; expected it in one shard")


def _read_index(index: Path) -> dict[str, str]:
    values = read_object(index, BadIndex)
    files = values.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise BadIndex(f"{index}: weight_map {short(files)}; expected an object of tensor names and files")
    for name, file in files.items():
        where = f"{index}: weight_map[{short(name)}]"
        if not isinstance(file, str) or not file or "\0" in file:
            raise BadIndex(f"{where}: {short(file)}; expected the name of a file")
        # Only the name is judged: in a download cache the shard itself may well be a link to elsewhere.
        # Windows' rules see both kinds of slashes, drives, and leading slashes.
        parsed = PureWindowsPath(file)
        if parsed.drive or parsed.root or ".." in parsed.parts:
            raise ShardOutsideDirectory(f"{where}: {short(file)}; expected a file inside {index.parent}")
    return dict(files)
