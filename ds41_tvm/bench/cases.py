"""What is measured: cases as data, and how the options of `bench` name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from ds41_tvm.errors import UsageError

WHAT = ("prefill", "decode", "batch", "topk", "scores", "attention", "launch")
ALONE = {
    "topk": ("topk_lowest_index", "topk_torch_cpu"),
    "scores": ("index_scores",),
    "attention": ("sparse_attention",),
}
SPARE = 512  # tokens that a filled sequence can still take
CHUNK = 512  # tokens per step of prompts longer than ONE_STEP
ONE_STEP = 1024
BATCH_CONTEXT = 1024  # of each sequence where several are decoded together
ALONE_CONTEXT = 128 << 10  # of single kernels, or the longest context asked for where that is shorter
_SIZE = re.compile(r"(\d+)([KM]?)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")


class Timing(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of each layer in a step (or the steps of a prompt), and of planning and committing it."""

    layers: dict[int, float]
    plan: float = 0.0


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tokens` new ones for each of `batch` sequences that then have `context` tokens, `chunk` of them a step."""

    what: str
    tokens: int = 1
    context: int = 0
    batch: int = 1
    chunk: int = 0

    @property
    def name(self) -> str:
        """Such as ``decode 128K``."""
        if self.what == "launch":
            return "launch"
        if self.what == "prefill":
            chunked = f" by {self.chunk}" if self.chunk < self.tokens else ""
            return f"prefill {size_name(self.tokens)}{chunked}"
        several = f" x{self.batch}" if self.batch > 1 or self.what == "batch" else ""
        many = f" of {size_name(self.tokens)} queries" if self.tokens > 1 else ""
        return f"{self.what}{several} {size_name(self.context)}{many}"


def cases(what: Iterable[str], prefill: Iterable[int], context: Iterable[int], batch: Iterable[int]) -> Iterator[Case]:
    """The cases that the options ask for, short ones first within each kind."""
    contexts, prompts = sorted(set(context)), sorted(set(prefill))
    alone = max([c for c in contexts if c <= ALONE_CONTEXT] or contexts[:1])
    for kind in what:
        if kind == "prefill":
            for n in prompts:
                yield Case(kind, tokens=n, context=n, chunk=n if n <= ONE_STEP else CHUNK)
        elif kind == "decode":
            yield from (Case(kind, context=n) for n in contexts)
        elif kind == "batch":
            yield from (Case(kind, context=min(BATCH_CONTEXT, contexts[-1]), batch=n) for n in sorted(set(batch)))
        elif kind == "launch":
            yield Case(kind)
        else:
            yield Case(kind, context=alone)
            prompt = max([n for n in prompts if n <= ONE_STEP], default=0)
            if kind == "attention" and prompt:
                yield Case(kind, tokens=prompt, context=prompt)


def parse_what(text: str) -> tuple[str, ...]:
    """``prefill,decode`` or ``all``, in the order of `WHAT`. Raises UsageError."""
    if text == "all":
        return WHAT
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in WHAT]
    if unknown:
        raise UsageError(f"--what {text!r}: {unknown[0]!r} is unknown; expected some of {', '.join(WHAT)}, or all")
    return tuple(word for word in WHAT if word in words)


def parse_sizes(option: str, text: str, most: int | None = None) -> tuple[int, ...]:
    """``1K,4096,1M`` as numbers, K = 1,024. Raises UsageError naming `option`."""
    out = []
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip().upper())
        value = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]] if match else 0
        if value < 1:
            raise UsageError(f"{option} {text!r}: {word.strip()!r} is no size; expected such as 128,4K,1M")
        if most is not None and value > most:
            raise UsageError(f"{option} {text!r}: {word.strip()} is more than max_seq_len {most} of the configuration")
        out.append(value)
    return tuple(out)


def parse_time(text: str | None) -> float | None:
    """``90``, ``90s``, ``10m`` or ``1h`` in seconds; None for no limit. Raises UsageError."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"--time {text!r}: expected a positive time such as 90, 90s, 10m or 1h")
    return seconds


def size_name(n: int) -> str:
    """131072 as ``128K``."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)
