"""Reading the values of options that several verbs share; all raise ``UsageError`` on a bad value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ds41_tvm.errors import UsageError

if TYPE_CHECKING:
    from ds41_tvm.config import AttentionConfig


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """``0,2,20-24`` as ascending layers; ``all`` or nothing as ``None``, which everywhere means all."""
    if text is None or text.strip() == "all":
        return None
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise UsageError(f"--layers {text!r}: {part.strip()!r} is no layer; expected such as 0,2,20-24 or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--layers {text!r}: {part.strip()!r} runs backwards; expected {last}-{first}")
        layers += range(first, last + 1)
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if repeated:
        raise UsageError(f"--layers {text!r}: layer {repeated[0]} is given twice; name it once")
    return tuple(sorted(layers))


def load_config(name: str) -> AttentionConfig:
    """A preset by its name, else the configuration in a file or a checkpoint directory.

    Raises ``ConfigError`` if that is not a good one.
    """
    from ds41_tvm.config import AttentionConfig
    from ds41_tvm.config_names import PRESETS

    if name in PRESETS:
        return AttentionConfig.preset(name)
    if not Path(name).exists():
        raise UsageError(f"--config {name!r}: no such file; expected {', '.join(PRESETS)} or a path to config.json")
    return AttentionConfig.from_file(name)


def step_sizes(prompt: int, decode: int, chunk: int | None = None) -> list[int]:
    """Tokens per call: the prompt whole or in pieces of ``chunk``, then ``decode`` single tokens."""
    for name, value, least in (("--prompt", prompt, 0), ("--decode", decode, 0), ("--chunk", chunk, 1)):
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: expected at least {least}")
    if prompt + decode == 0:
        raise UsageError("--prompt 0 with --decode 0: nothing to run; give one of them")
    size = chunk or max(prompt, 1)
    pieces = [min(size, prompt - done) for done in range(0, prompt, size)]
    return pieces + [1] * decode


def case_files(paths: Iterable[str | Path]) -> list[Path]:
    """The case files (``.npz``) among ``paths``; a directory stands for those directly in it."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(path.glob("*.npz"))
            if not found:
                raise UsageError(f"{path}: holds no .npz file; expected recorded cases")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"{path}: no such file or directory; expected a recorded case (.npz)")
    return files
