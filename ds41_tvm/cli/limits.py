"""What this machine allows, asked before anything long begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds41_tvm.cli import machine
from ds41_tvm.cli.output import byte_size
from ds41_tvm.errors import TargetError, UsageError

if TYPE_CHECKING:
    from ds41_tvm.target import Target


def check_target(text: str) -> Target:
    """The target `text`. Raises TargetError if there is none such, or this machine cannot run what it compiles to."""
    from ds41_tvm.target import parse_target

    target = parse_target(text)
    missing = target.missing_here()
    if missing:
        raise TargetError(
            f"--target {text}: this machine's processor lacks {', '.join(missing)}; expected one that runs here, "
            f"such as cpu; see ds41-tvm doctor"
        )
    return target


def check_memory(needed: int, what: str) -> None:
    """Raises UsageError if this process cannot have `needed` more bytes."""
    free = available_memory()
    if free is not None and needed > free:
        raise UsageError(
            f"{what} needs about {byte_size(needed)} of memory and {byte_size(free)} are available; choose fewer "
            f"--layers, a smaller --batch, --prompt or --chunk, or a larger machine"
        )


def available_memory() -> int | None:
    """Bytes that this process may still take, None where the system does not say."""
    found = machine.memory()
    known = [size for size in (found["available"], found["limit"]) if size is not None]
    return min(known, default=None)
