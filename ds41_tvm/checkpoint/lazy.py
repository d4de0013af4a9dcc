"""Weights made when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from ..errors import CheckpointClosed

Arrays = dict[str, NDArray[Any]]
Maker = Callable[[], Arrays]


class LazyWeights(Mapping[str, NDArray[Any]]):
    """Arrays by name, read-only: bf16 as uint16 bits, e4m3 codes and e8m0 scales as uint8, float32.

    ``makers`` gives for each name a function that makes it (and possibly its scale with it). What was made is
    kept until ``release``. Asking for it from several threads is allowed.
    """

    def __init__(self, makers: Mapping[str, Maker]) -> None:
        self._makers = dict(makers)
        self._made: Arrays = {}
        self._lock = threading.Lock()
        self._closed = False

    def __getitem__(self, name: str) -> NDArray[Any]:
        maker = self._makers[name]
        with self._lock:
            if self._closed:
                raise CheckpointClosed(f"{name}: the checkpoint is closed; load it again")
            if name not in self._made:
                for key, array in maker().items():
                    array.flags.writeable = False
                    self._made[key] = array
            return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def release(self) -> None:
        """Forgets the arrays made so far; they are made anew when asked for."""
        with self._lock:
            self._made.clear()

    def close(self) -> None:
        """``release`` for good: asking for a weight afterwards raises ``CheckpointClosed``."""
        with self._lock:
            self._closed = True
            self._made.clear()
