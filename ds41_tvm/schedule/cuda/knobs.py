"""What may be chosen in the making of GPU programs: names, values, and the value used without tuning.

A knob changes the speed of a program and nothing else: no sum is cut or ordered by one. The first value is the default.
Values that some GPU has no room for are offered too: the compiler refuses them there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds41_tvm.schedule.cuda import attention_sizes, indexer_tile, linear_sizes

Params = dict[str, Any]
Space = dict[str, tuple[int, ...]]
LARGEST_BLOCK = 227 << 10  # bytes of shared memory that a block of the largest GPU has


def _default_first(default: int, *others: int) -> tuple[int, ...]:
    return (default, *(value for value in others if value != default))


def _divisors(n: int, *wanted: int) -> tuple[int, ...]:
    return tuple(d for d in wanted if d and n % d == 0)


def _linear(p: Params) -> Space:
    """One row: `columns` of a block, `warps` that share its chunks of inner indices, `ahead`: steps whose weights are
    loaded together. Many rows: `warp_columns`: warps next to each other, `row_tiles`: tiles of 16 rows of a warp,
    `stages`: steps that are in shared memory or on their way there.
    """
    names = ("n", "k", "groups", "weight", "out", "total", "tile", "rows")
    s = linear_sizes.Sizes(**{name: p[name] for name in names}, mma="ptx")
    if s.rows == 1:
        return {
            "columns": _default_first(s.columns, *s.columns_options),
            "warps": _default_first(s.warps, *_divisors(s.chunks, 4, 5, 16)),
            "ahead": _default_first(s.ahead, *_divisors(s.steps, s.ahead // 2, s.ahead * 2)),
        }
    rows = (1, 2, 4) if s.total == "f32" else (1, 2)  # f64 sums take twice the registers
    return {
        "warp_columns": _default_first(s.warp_columns, *s.warp_columns_options),
        "row_tiles": _default_first(s.row_tiles, *rows),
        "stages": _default_first(s.stages, 3, 6),
    }


def _attention(p: Params) -> Space:
    """`stages`: tiles of packed rows that are in shared memory or on their way there."""
    s = attention_sizes.Sizes(**{name: v for name, v in p.items() if name != "form"}, mma="ptx")
    fitting = (n for n in range(1, 7) if s.shared_bytes(n) <= LARGEST_BLOCK)
    return {"stages": _default_first(s.stages, *fitting)}


def _scores(p: Params) -> Space:
    """`queries`: queries of a block."""
    s = indexer_tile.Sizes(**p, mma="ptx")
    return {"queries": _default_first(s.queries, *(q for q in (1, 2, 4, 8) if q <= s.most_queries))}


_SPACES: dict[str, Callable[[Params], Space]] = {
    "linear-mma": _linear,
    "attention-mma": _attention,
    "index-scores-mma": _scores,
}


def space(rule: str, params: Params) -> Space:
    """Knobs of the programs that a rule makes, those with a choice only."""
    made = _SPACES[rule](params) if rule in _SPACES else {}
    return {name: values for name, values in made.items() if len(values) > 1}
