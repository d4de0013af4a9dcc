"""What `ds41-tvm run` feeds to the layers, and the file that it writes their outputs to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from ds41_tvm.errors import InputError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    U16 = NDArray[np.uint16]

DEFAULT_PROMPT, DEFAULT_DECODE, DEFAULT_CHUNK = 40, 8, 1024
MOST_SEQUENCES = 1 << 16
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Work:
    """`prompts[i]` tokens of sequence i in pieces of at most `chunk`, then `decode` single tokens of each."""

    prompts: tuple[int, ...]
    decode: int
    chunk: int

    @property
    def totals(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(prompt + self.decode for prompt in self.prompts)

    @property
    def equal(self) -> bool:
        """Whether all sequences are as long."""
        return len(set(self.prompts)) == 1

    @property
    def prefill_steps(self) -> int:
        """Steps before the first single token."""
        return -(-max(self.prompts) // self.chunk)

    @property
    def widest(self) -> int:
        """Rows of the largest step."""
        return sum(min(self.chunk, prompt) for prompt in self.prompts)

    def steps(self) -> Iterator[tuple[int, ...]]:
        """New tokens of each sequence, step by step."""
        for first in range(0, max(self.prompts), self.chunk):
            yield tuple(max(0, min(self.chunk, prompt - first)) for prompt in self.prompts)
        for _ in range(self.decode):
            yield (1,) * len(self.prompts)


def plan_work(prompt: str | None, decode: int | None, batch: int | None, chunk: int | None, x: U16 | None) -> Work:
    """The work that the options ask for, or that an input [batch, tokens, dim] holds.

    Raises UsageError on numbers out of range or options that contradict each other, InputError on an input that is
    longer or shorter than they say.
    """
    for name, value, least in (("--decode", decode, 0), ("--batch", batch, 1), ("--chunk", chunk, 1)):
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: expected at least {least}")
    if batch is not None and batch > MOST_SEQUENCES:
        raise UsageError(f"--batch {batch}: expected at most {MOST_SEQUENCES}")
    lengths = _lengths(prompt)
    given = None if x is None else x.shape[1]
    if decode is None:
        decode = DEFAULT_DECODE if given is None or lengths else max(0, min(DEFAULT_DECODE, given - 1))
    if not lengths:
        if given is not None and given <= decode:
            raise InputError(f"--input holds {given} tokens and --decode {decode} takes all; expected a prompt too")
        lengths = (DEFAULT_PROMPT,) if given is None else (given - decode,)
    need = max(lengths) + decode
    if need > MOST_TOKENS:
        raise UsageError(f"--prompt and --decode ask for {need} tokens; expected at most {MOST_TOKENS}")
    if given is not None and given != need:
        raise InputError(f"--input holds {given} tokens; --prompt {max(lengths)} and --decode {decode} take {need}")
    count = len(lengths) if len(lengths) > 1 else batch or (1 if x is None else len(x))
    for name, value in (("--batch", batch), ("--input", None if x is None else len(x))):
        if value is not None and value != count:
            raise UsageError(f"{name} has {value} sequences where the other options have {count}; expected the same")
    prompts = lengths if len(lengths) > 1 else lengths * count
    return Work(prompts, decode, min(chunk or DEFAULT_CHUNK, max(prompts)))


def _lengths(text: str | None) -> tuple[int, ...]:
    """``100,37`` as numbers, empty if not given."""
    if text is None:
        return ()
    lengths = []
    for part in text.split(","):
        # A number of more digits than any sensible one would be refused by int() itself.
        if not part.strip().isdecimal() or len(part.strip()) > 18 or int(part) < 1:
            raise UsageError(
                f"--prompt {text[:60]!r}: expected a length of at least 1, or one per sequence such as 100,37"
            )
        lengths.append(int(part))
    if len(lengths) > MOST_SEQUENCES:
        raise UsageError(f"--prompt has {len(lengths)} lengths; expected at most {MOST_SEQUENCES}")
    return tuple(lengths)


def read_input(path: Path, dim: int) -> tuple[U16, bool]:
    """The array in an ``.npy`` file, mapped, as [batch, tokens, dim], and whether it was stored without a batch.

    Raises InputError naming the file, its dtype and its shape unless it holds bf16 bits of the right size.
    """
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read as .npy ({error}); expected what numpy.save writes") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: holds several arrays; expected one, in an .npy file")
    expected = f"bf16 bits (uint16) [tokens, {dim}] or [batch, tokens, {dim}]"
    if array.dtype != np.uint16:
        raise InputError(
            f"{path}: dtype {array.dtype}, shape {array.shape}; expected {expected}; round float32 with "
            f"ds41_tvm.numerics.formats.bf16_encode, and save ml_dtypes.bfloat16 as .view(numpy.uint16)"
        )
    if array.ndim not in (2, 3) or array.shape[-1] != dim or not array.size:
        raise InputError(f"{path}: dtype {array.dtype}, shape {array.shape}; expected {expected}")
    return array.reshape(-1, *array.shape[-2:]), array.ndim == 2


class Inputs:
    """Rows to feed: those of a file, the same to every layer, or by the naming rule of `checkpoint.random_input`.

    By the rule, sequence i of layer l is row i of ``x.{l}.0`` [sequences, longest, dim]: the same rows however the
    prompt is cut into steps.
    """

    def __init__(self, work: Work, dim: int, x: U16 | None, seed: str) -> None:
        self._shape = (len(work.prompts), max(work.totals), dim)
        self._x, self._seed = x, seed

    def rows(self, layer: int, starts: Sequence[int], counts: Sequence[int]) -> U16:
        """bf16 bits [sum(counts), dim]: the next rows of each sequence."""
        import numpy as np

        parts = [self._part(layer, i, first, n) for i, (first, n) in enumerate(zip(starts, counts, strict=True)) if n]
        return np.concatenate(parts)

    def _part(self, layer: int, i: int, first: int, count: int) -> U16:
        from ds41_tvm.checkpoint.values import golden_rows
        from ds41_tvm.numerics.formats import bf16_encode

        if self._x is not None:
            return self._x[i, first : first + count]
        _, longest, dim = self._shape
        begin = (i * longest + first) * dim
        values = golden_rows(self._seed, f"x.{layer}.0", self._shape, begin, count * dim)
        return bf16_encode(values).reshape(count, dim)


class OutputFile:
    """A file that appears complete or not at all. Raises UsageError at once if it could not be written later."""

    def __init__(self, path: Path, arrays: int, overwrite: bool) -> None:
        self.path = path
        if path.suffix not in (".npy", ".npz"):
            raise UsageError(f"--output {path}: expected a name that ends in .npy (one array) or .npz (several)")
        if path.suffix == ".npy" and arrays != 1:
            raise UsageError(f"--output {path}: there are {arrays} arrays to write; expected a name that ends in .npz")
        try:
            there = path.exists()  # raises for a name that is too long
        except OSError as error:
            raise UsageError(f"--output {path}: cannot be written ({error.strerror or error})") from None
        if there and not path.is_file():
            what = "a directory" if path.is_dir() else "no regular file"
            raise UsageError(f"--output {path}: is {what}; expected the name of a file")
        if there and not overwrite:
            raise UsageError(f"--output {path}: exists; choose another name or pass --overwrite")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            number, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent)
        except OSError as error:
            raise UsageError(f"--output {self.path}: cannot be written ({error.strerror or error})") from None
        self._partial = Path(name)
        self._file = os.fdopen(number, "wb")
        return self

    def write(self, arrays: dict[str, Any]) -> None:
        """Write the arrays and put the file in its place."""
        import numpy as np

        assert self._file is not None  # within the context
        try:
            if self.path.suffix == ".npy":
                np.save(self._file, next(iter(arrays.values())))
            else:
                np.savez(self._file, **arrays)
            self._file.close()
            mask = os.umask(0)
            os.umask(mask)
            self._partial.chmod(0o666 & ~mask)  # a temporary file is private, a result is not
            os.replace(self._partial, self.path)
        except OSError as error:
            raise UsageError(f"--output {self.path}: cannot be written ({error.strerror or error})") from None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._partial.unlink(missing_ok=True)
