"""A folder that appears at its place complete or not at all.

It is built in a hidden sibling and exchanged with what is there. A process that is killed leaves at most that sibling,
which the next one to publish at the same place removes: its lock went with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ds41_tvm.errors import NotAnArtifact


def publish(out: Path, fill: Callable[[Path], None], is_ours: Callable[[Path], bool]) -> None:
    """Let `fill` write into a new folder and put it at `out`, in place of an older one that `is_ours`.

    Of several processes that publish at one place, each puts a whole folder there; the last one stays. Raises
    NotAnArtifact if something else is at `out`.
    """
    refuse_others(out, is_ours)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, lock = _claim(out)
    try:
        fill(folder)
        _sync(folder)
        with _locked(out.parent):
            refuse_others(out, is_ours)
            _exchange(folder, out)
        _sync(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the older artefact, or what was begun
        os.close(lock)


def refuse_others(out: Path, is_ours: Callable[[Path], bool]) -> None:
    """Raises NotAnArtifact if `out` exists and is neither an artefact nor an empty folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise NotAnArtifact(f"{out}: exists and is no folder; expected a new name, or an artefact to replace")
    if out.is_dir() and any(out.iterdir()) and not is_ours(out):
        raise NotAnArtifact(f"{out}: holds something else than an artefact; expected a new name, or one to replace")


def _claim(out: Path) -> tuple[Path, int]:
    """A new sibling folder and the descriptor that keeps it locked; leftovers of the dead are removed on the way."""
    prefix = f".{out.name}.building-"
    with _locked(out.parent):
        for stale in [path for path in out.parent.iterdir() if path.name.startswith(prefix)]:
            with _descriptor(stale) as descriptor:
                if descriptor is not None and _try_lock(descriptor):
                    shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        folder.chmod(0o777 & ~_umask())
        lock = os.open(folder, os.O_RDONLY)
        _try_lock(lock)
    return folder, lock


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def _descriptor(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Held for moments only: while siblings are claimed and exchanged."""
    with _descriptor(folder) as descriptor:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Have names and contents on the disk before the exchange is."""
    for path in (*(p for p in folder.iterdir() if p.is_file() and not p.is_symlink()), folder):
        with _descriptor(path) as descriptor:
            if descriptor is not None:
                os.fsync(descriptor)


def _exchange(new: Path, out: Path) -> None:
    """Swap two folders in one step, or, where the file system cannot, leave a moment without any."""
    if not out.exists():
        os.rename(new, out)
        return
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(out), swap) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(out))
    aside = new.with_name(new.name + "-old")
    os.rename(out, aside)
    os.rename(new, out)
    os.rename(aside, new)
