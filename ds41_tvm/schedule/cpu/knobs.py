"""What may be chosen in the making of CPU programs: names, values, and the value used without tuning.

A knob changes the speed of a program and nothing else: no sum is cut or ordered by one. The first value is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Params = dict[str, Any]
Space = dict[str, tuple[int, ...]]


def _default_first(default: int, *others: int) -> tuple[int, ...]:
    return (default, *(value for value in others if value != default))


def _linear_amx(p: Params) -> Space:
    """`lead`: bytes of prefetch; `task_kib`: bf16 weights of a task; `panel`: row tiles laid out together."""
    if p["rows"] == 1:
        return {"lead": (1024, 0, 512, 2048, 4096, 8192)}
    return {"task_kib": (1024, 256, 512, 768, 1536), "panel": (32, 8, 16, 64)}


def _linear_dot(p: Params) -> Space:
    """`together`: column tiles that one row takes in step; `lead`: bytes of prefetch; `task_kib`: bf16 weights of a
    task; `panel`: row tiles laid out together.
    """
    from ds41_tvm.schedule.cpu.linear_pairs import together_options

    if p["rows"] == 1:
        return {"together": together_options(p["n"], p["tile"], p["groups"]), "lead": (0, 512, 1024, 2048, 4096, 8192)}
    return {"task_kib": (512, 128, 256, 1024), "panel": (64, 16, 32, 128)}


def _linear_row(p: Params) -> Space:
    """`lead`: bytes that prefetches run ahead."""
    return {"lead": (1024, 0, 512, 2048, 4096, 8192)}


def _linear_fma(p: Params) -> Space:
    """`unroll`: inner indices written out in a row; `decode_first`: whether a column tile is decoded before it is used,
    which pays when many rows use it; `columns`: column tiles that a task takes in a row.
    """
    from ds41_tvm.kernels.linear import WORD, chunk_of

    per_word = WORD[p["weight"]][1]
    chunk = chunk_of(-(-p["k"] // per_word) * per_word, p["weight"], p["total"])
    plain = 1 if p["weight"] == "f32" else 2
    space = {"unroll": _default_first(plain, *(u for u in (1, 2, 4, 8, 16) if chunk % u == 0))}
    if p["rows"] > 1 and p["weight"] != "f32":
        space["decode_first"] = _default_first(int(p["weight"] == "fp8"), 0, 1)
    return space


def _attention_vector(p: Params) -> Space:
    """`rows` x `wide` accumulators of a score tile; `heads` x `lanes` of an output tile; `block` rows of the output."""
    from ds41_tvm.schedule.cpu.attention import MOST

    most = MOST[p["form"]]
    wide = [w for w in (64, 32, 16) if -(-(p["heads"] // p["split"]) // 16) * 16 % w == 0]
    lanes = [w for w in (64, 32, 16) if (64 if p["dim"] % 64 == 0 else 32) % w == 0]
    return {
        "rows": (6, 2, 3, 4, 8, 12),
        "wide": _default_first(max(w for w in wide if w <= most), *wide),
        "heads": _default_first(4 if most == 64 else 6, 1, 2, 3, 4, 6, 8),
        "lanes": _default_first(max(w for w in lanes if w <= most), *lanes),
        "block": (32, 16, 64),
    }


def _attention_amx(p: Params) -> Space:
    """`columns`: output tiles that share a load of weights."""
    return {"columns": tuple(c for c in (4, 2, 1) if p["dim"] % (16 * c) == 0)}


def _scores(p: Params) -> Space:
    """`tile`: positions of a register tile; `columns`: columns of a task."""
    return {"tile": (8, 2, 4, 6, 12, 16), "columns": (512, 128, 256, 1024, 2048)}


# Operators that treat rows one by one and have an innermost loop to put into vectors.
_VECTORS = frozenset({"rms_norm", "rope", "pack_rows", "quantize_activation", "pool_groups", "copy_rows"})


def _scores_vnni(p: Params) -> Space:
    """`columns`: columns of a task."""
    return {"columns": (512, 128, 256, 1024, 2048)}


def _rowwise(p: Params) -> Space:
    """`lanes`: elements of a vector of the innermost loops."""
    return {"lanes": (16, 4, 8, 32, 64)}


_SPACES: dict[str, Callable[[Params], Space]] = {
    "linear-amx": _linear_amx,
    "linear-dot": _linear_dot,
    "linear-row": _linear_row,
    "linear-fma": _linear_fma,
    "attention-dot": _attention_vector,
    "attention-avx512": _attention_vector,
    "attention-fma": _attention_vector,
    "attention-amx": _attention_amx,
    "index-scores": _scores,
    "index-scores-vnni": _scores_vnni,
    "rowwise": _rowwise,
}


def space(rule: str, op: str, params: Params) -> Space:
    """Knobs of the programs that a rule makes, those with a choice only."""
    if rule not in _SPACES or (rule == "rowwise" and op not in _VECTORS):
        return {}
    made = _SPACES[rule](params)
    return {name: values for name, values in made.items() if len(values) > 1}
