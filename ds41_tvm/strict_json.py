"""JSON read the strict way: what a lenient reader would silently repair is refused.

Python's ``json`` keeps the last of two equal keys, accepts ``NaN`` and ``Infinity``, and lets deep nesting
and very long integers end in ``RecursionError`` or ``ValueError``. Here each of these raises the caller's
error class.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from .errors import Ds41Error

MAX_JSON_BYTES = 256 << 20  # a released index (96 000 names) has 10 MB; anything near this is no such file


def short(value: object, limit: int = 80) -> str:
    """``repr`` cut to ``limit`` characters, for messages."""
    if isinstance(value, (list, tuple)) and len(value) > limit:
        return f"a list of {len(value)} entries"
    if isinstance(value, int) and abs(value).bit_length() > 256:
        return f"an integer of {abs(value).bit_length()} bits"  # str() of a huge integer raises ValueError
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def parse_object(
    data: bytes, where: str, error: type[Ds41Error], duplicate: type[Ds41Error] | None = None
) -> dict[str, Any]:
    """Parses ``data`` as UTF-8 JSON whose top level is an object.

    ``where`` names the file in messages. Raises ``duplicate`` (by default ``error``) if a key is given twice,
    ``error`` if it is not UTF-8, not JSON, not an object, holds
    a key twice, NaN, an infinity or a number too large for a double, or is nested too deeply.
    """

    def refuse_constant(text: str) -> NoReturn:
        raise error(f"{where}: the number {text} is not JSON; write a finite number")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"{where}: the number {short(text)} is too large for a float; write a finite number")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise (duplicate or error)(f"{where}: the key {short(key)} is given twice; keep one of them")
                seen.add(key)
        return result

    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=unique)
    except UnicodeDecodeError as exc:
        raise error(f"{where}: not UTF-8 text (byte {exc.start}); expected a JSON file") from None
    except json.JSONDecodeError as exc:
        what = f"{exc.msg} at line {exc.lineno} column {exc.colno}"
        raise error(f"{where}: not JSON ({what}); expected a JSON object") from None
    except RecursionError:
        raise error(f"{where}: nested too deeply; expected a JSON object of a few levels") from None
    except ValueError:  # Python refuses to convert integers of more than some thousand digits
        raise error(f"{where}: holds an integer with too many digits; expected sizes below 2^63") from None
    if not isinstance(value, dict):
        raise error(f"{where}: the top level is a {type(value).__name__}; expected a JSON object")
    return value


def read_object(path: str | os.PathLike[str], error: type[Ds41Error]) -> dict[str, Any]:
    """Reads the JSON object in the file ``path``; raises ``error`` if it is unreadable or not strict JSON."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise error(f"{path}: cannot be read ({reason}); expected a readable JSON file") from None
    if len(data) > MAX_JSON_BYTES:
        raise error(f"{path}: longer than {MAX_JSON_BYTES} bytes; expected a JSON file of a few megabytes at most")
    return parse_object(data, str(path), error)
