"""Opening an artefact's files with suspicion: regular files of the stated size and digest, nothing else."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from ds41_tvm.artifact.manifest import FILE, IR, MAX_BYTES, File, Manifest
from ds41_tvm.errors import DigestMismatch, MissingFile, PinMismatch, UsageError, WrongFileSize

Verify = Literal["auto", "full"]
# Weights up to this many bytes in all are hashed on every load; beyond, header and samples are.
HASHED_WEIGHTS = 64 << 20
SAMPLES, SAMPLE_BYTES = 16, 4096
LARGEST_MODULE, LARGEST_IR = 1 << 30, 1 << 28
_AGAIN = "copy the artefact again, or compile it again"


def open_regular(path: Path) -> BinaryIO:
    """The file opened for reading. Raises MissingFile if it is absent or not a regular file (a pipe would hang)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFile(f"{path}: cannot be opened ({reason}); expected a file of an artefact; {_AGAIN}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MissingFile(f"{path}: not a regular file; expected a file of an artefact; {_AGAIN}")
    return os.fdopen(descriptor, "rb")


def read_manifest_bytes(folder: Path, expect: str | None) -> tuple[bytes, str]:
    """The manifest and its digest. Raises MissingFile, WrongFileSize, and PinMismatch if it is not the expected one."""
    if expect is not None and (not isinstance(expect, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", expect)):
        raise UsageError(f"expect is {expect!r}; expected sha256: and 64 hexadecimal digits, as `inspect` prints them")
    if not folder.is_dir():
        raise MissingFile(f"{folder}: no such folder; expected an artefact made by ds41-tvm compile")
    with open_regular(folder / FILE) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise WrongFileSize(f"{folder / FILE}: longer than {MAX_BYTES} bytes; expected a manifest of some kilobytes")
    digest = digest_of(data)
    if expect is not None and digest != expect:
        raise PinMismatch(
            f"{folder / FILE}: its digest is {digest}; expected {expect}; this is another artefact than the one you "
            f"pinned: do not load it unless you know why"
        )
    return data, digest


def sample_digest(file: BinaryIO, size: int) -> str:
    """SHA-256 of the start of a weight file (its header) and of pages spread evenly over it.

    Finds another file in its place, or one that was not copied to the end; does not find one changed byte.
    """
    digest = hashlib.sha256()
    file.seek(0)
    digest.update(file.read(8 * SAMPLE_BYTES))
    for i in range(SAMPLES):
        file.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return "sha256:" + digest.hexdigest()


def full_digest(file: BinaryIO) -> str:
    """SHA-256 of the whole file."""
    file.seek(0)
    return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def check_files(folder: Path, manifest: Manifest, verify: Verify, weights: bool = True) -> None:
    """Check every file that the manifest names, the weights only if `weights` is set.

    All are hashed, except weights of more than `HASHED_WEIGHTS` in all, of which header and samples are, unless
    `verify` is ``full``. Raises MissingFile, WrongFileSize, DigestMismatch.
    """
    if verify not in ("auto", "full"):
        raise UsageError(f"verify is {verify!r}; expected 'auto' or 'full'")
    of_weights = [file for file in manifest.files.values() if file.sample]
    sampled = verify == "auto" and sum(file.size for file in of_weights) > HASHED_WEIGHTS
    for name, file in manifest.files.items():
        if weights or not file.sample:
            check_file(folder / name, file, sampled and file.sample is not None, largest(name))


def largest(name: str) -> int | None:
    """Bytes that no file of this name has; None for weights."""
    if name == IR:
        return LARGEST_IR
    return LARGEST_MODULE if name.endswith(".so") else None


def check_file(path: Path, expected: File, sampled: bool, most: int | None) -> None:
    """Check one file's size and digest. `most`: bytes that no such file exceeds."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size or (most is not None and size > most):
            state = "cut short" if size < expected.size else "longer" if size > expected.size else "too large"
            raise WrongFileSize(f"{path}: {size} bytes; expected {expected.size}: the file is {state}; {_AGAIN}")
        actual, stated = (
            (sample_digest(file, size), expected.sample) if sampled else (full_digest(file), expected.sha256)
        )
    if actual != stated:
        raise DigestMismatch(f"{path}: its content has the digest {actual}; expected {stated}; {_AGAIN}")


def digest_of(data: bytes) -> str:
    """SHA-256 of bytes in the form that manifests use."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def describe(path: Path, sampled: bool) -> File:
    """A file as a manifest states it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return File(size=size, sha256=full_digest(file), sample=sample_digest(file, size) if sampled else None)
