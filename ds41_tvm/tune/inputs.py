"""What tuned kernels are run on: random values of the right kind in the right places, the same for every program.

`arguments` gives the arrays of one call, the output last and filled with garbage. A linear layer's are made from its
plain weights and rows, so that programs of different tiles compute the same thing; indices and positions are such as a
runner hands over. Values are never NaN, infinite or subnormal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds41_tvm.numerics.formats import row_bytes
from ds41_tvm.packing import aligned, pack_linear
from ds41_tvm.program import Kernel, Linear

Array = NDArray[Any]
Params = dict[str, Any]
GARBAGE = 0xA5
MANY = 96  # tokens of a kernel for many rows: whole tiles of every height
FEW = 16  # tokens up to which a linear layer is bound by reading its weights
RATE = 3.0e-4  # spacing of rotation angles


class Case(NamedTuple):
    """A situation that a kernel is measured in: `tokens` queries, `width` positions of context where that matters."""

    tokens: int
    width: int = 0

    def __str__(self) -> str:
        return f"{self.tokens} token(s)" + (f" at {self.width} positions" if self.width else "")


def cases(kernel: Kernel) -> tuple[Case, ...]:
    """Situations that a kernel is to be fast in, all of equal weight."""
    p: Params = dict(kernel.params)
    if kernel.op == "linear":
        return (Case(1 if p["rows"] == 1 else MANY),)
    if kernel.op == "sparse_attention":
        return (Case(32, 32768),) if p["split"] == 1 else (Case(1, 32768),)
    if kernel.op == "index_scores":
        return (Case(1, 32768), Case(16, 4096))
    return (Case(256),)


def checks(kernel: Kernel) -> tuple[Case, ...]:
    """Situations in which a program is compared with the default one: odd counts, tiles that are not full."""
    if kernel.op == "linear":
        return (Case(1),) if dict(kernel.params)["rows"] == 1 else (Case(37),)
    return (Case(5, 3001), Case(1, 257)) if kernel.op in ("sparse_attention", "index_scores") else (Case(37),)


def arguments(kernel: Kernel, case: Case, packed: bool = False) -> list[Array]:
    """Arrays of a call. `packed`: fill packed weights at random instead of packing random weights, which takes time."""
    rng = np.random.default_rng(1)
    p: Params = dict(kernel.params)
    if kernel.op == "linear":
        made = _linear(rng, p, case, packed)
    else:
        made = _MAKERS[kernel.op](rng, p, case)
    out = aligned(made[-1].shape, made[-1].dtype)
    out.view(np.uint8).reshape(-1)[:] = GARBAGE
    return [*map(_aligned, made[:-1]), out]


def flops(kernel: Kernel, case: Case) -> float:
    """Multiplications and additions of the products in a call; 0 for kernels without."""
    p: Params = dict(kernel.params)
    if kernel.op == "linear":
        return 2.0 * int(p["n"]) * int(p["k"]) * case.tokens
    if kernel.op == "sparse_attention":
        return 4.0 * int(p["heads"]) * int(p["dim"]) * int(p["window"] + p["k"]) * case.tokens
    if kernel.op == "index_scores":
        return 2.0 * int(p["heads"]) * int(p["dim"]) * case.width * case.tokens
    return 0.0


def output_rows(kernel: Kernel, case: Case, out: Array) -> Array:
    """The rows of an output that hold results: row tiles may reach beyond the last token."""
    return out.reshape(-1, out.shape[-1])[: case.tokens] if kernel.op == "linear" else out


def _aligned(array: Array) -> Array:
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


def _fill(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, make: Callable[[int], Array]) -> Array:
    """An array of repeated random values: a megabyte of them is enough, and takes no time."""
    out = aligned(shape, dtype)
    block = make(min(out.size, 1 << 18)).astype(dtype, copy=False)
    flat = out.reshape(-1)
    for start in range(0, flat.size, block.size):
        flat[start : start + block.size] = block[: flat.size - start]
    return out


def _bf16(rng: np.random.Generator, *shape: int) -> Array:
    """Normal values as bf16 bits."""
    return _fill(
        rng, shape, np.uint16, lambda n: (rng.standard_normal(n, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    )


def _f32(rng: np.random.Generator, *shape: int) -> Array:
    return _fill(rng, shape, np.float32, lambda n: rng.standard_normal(n, np.float32))


def _e4m3(rng: np.random.Generator, *shape: int) -> Array:
    """Codes of all normal values but the largest: 0x08 to 0x77 with either sign."""

    def codes(n: int) -> Array:
        magnitudes, signs = rng.integers(0x08, 0x78, n, np.uint8), rng.integers(0, 2, n, np.uint8)
        out: Array = magnitudes | (signs << 7)
        return out

    return _fill(rng, shape, np.uint8, codes)


def _e8m0(rng: np.random.Generator, *shape: int) -> Array:
    return _fill(rng, shape, np.uint8, lambda n: rng.integers(120, 130, n, np.uint8))


def _bytes(rng: np.random.Generator, *shape: int) -> Array:
    return _fill(rng, shape, np.uint8, lambda n: rng.integers(0, 256, n, np.uint8))


def _packed_rows(rng: np.random.Generator, kind: str, *shape: int) -> Array:
    """Packed rows of a cache, see `numerics.formats`; the last of `shape` is the number of elements."""
    *rows, dim = shape
    if kind == "window":
        return np.concatenate([_e4m3(rng, *rows, dim), _e8m0(rng, *rows, dim // 32)], axis=-1)
    if kind == "index":
        return np.concatenate([_bytes(rng, *rows, dim // 2), _e8m0(rng, *rows, dim // 32)], axis=-1)
    scales = _fill(rng, (*rows, dim // 16), np.uint8, lambda n: rng.integers(0x28, 0x48, n, np.uint8))
    return np.concatenate([_bytes(rng, *rows, dim // 2), scales], axis=-1)


def _linear(rng: np.random.Generator, p: Params, case: Case, packed: bool) -> list[Array]:
    fields = {name: value for name, value in p.items() if name != "rows"}
    linear = Linear(**fields, rows=p["rows"], few=1)
    n, k, tile, rows = p["n"], p["k"], p["tile"], p["rows"]
    tiles = -(-case.tokens // rows)
    x = aligned((tiles * rows, p["groups"] * k), np.uint16)
    x[: case.tokens] = _bf16(rng, case.tokens, p["groups"] * k)
    x[case.tokens :] = 0
    y = np.empty((tiles, rows, n), np.float32 if p["out"] == "f32" else np.uint16)
    make = {"bf16": _bf16, "fp8": _e4m3, "f32": _f32}[p["weight"]]
    scales = [_e8m0(rng, -(-n // 32), -(-k // 32))] if p["weight"] == "fp8" else []
    if packed:
        per_word = 1 if p["weight"] == "f32" else 2
        word = {"bf16": np.uint32, "fp8": np.uint16, "f32": np.float32}[p["weight"]]
        words = -(-k // per_word)
        weights = [make(rng, n // tile, words, tile * per_word).view(word).reshape(n // tile, words, tile), *scales]
    else:
        weights = list(pack_linear(linear, make(rng, n, k), *scales))
    return [x.reshape(tiles, rows, -1), *weights, y]


def _attention(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    n, heads, dim, k, block = case.tokens, p["heads"], p["dim"], p["k"], p["block_rows"]
    old = case.width
    made = [
        _bf16(rng, n, heads, dim),
        _packed_rows(rng, "window", n, dim),
        _packed_rows(rng, "window", 2 * p["ring_rows"], dim),
        _f32(rng, heads),
        (old + np.arange(n)).astype(np.int32),
        np.zeros(n, np.int32),
        np.array([old], np.int32),
        np.zeros(1, np.int32),
        np.ones(1, np.int32),
    ]
    if k:
        table, rows = _table(rng, case.width, block)
        step = max(1, case.width // k)
        chosen = np.arange(k) * step + rng.integers(0, step, (n, k))
        made += [_packed_rows(rng, "latent", rows, dim), table, np.minimum(chosen, case.width - 1).astype(np.int32)]
    return [*made, np.empty((n, heads, dim), np.uint16)]


def _table(rng: np.random.Generator, width: int, block: int) -> tuple[Array, int]:
    """Blocks of one sequence in any order, and the rows of the memory that they lie in."""
    blocks = -(-width // block)
    return (rng.permutation(blocks) + 1).astype(np.int32)[None], (blocks + 1) * block


def _scores(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    n, heads, dim, size = case.tokens, p["heads"], p["dim"], p["candidate_block"]
    table, rows = _table(rng, case.width, p["block_rows"])
    made = [
        _packed_rows(rng, "index", n, heads, dim),
        _bf16(rng, n, heads),
        _packed_rows(rng, "index", rows, dim),
        table,
        np.zeros(n, np.int32),
        np.full(n, case.width, np.int32),
    ]
    if not size:
        return [*made, np.empty((n, case.width), np.uint16)]
    # A candidate source keeps at most some thousand positions; here every second block.
    chosen = np.arange(0, -(-case.width // size), 2, dtype=np.int32)
    width = case.width if p["spread"] else len(chosen) * size
    return [*made, np.broadcast_to(chosen, (n, len(chosen))), np.empty((n, width), np.uint16)]


def _rms_norm(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    shape = case.tokens, p["dim"]
    return [_bf16(rng, *shape), _bf16(rng, p["dim"]), np.empty(shape, np.uint16)]


def _rope(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    shape, pairs = (case.tokens, p["heads"], p["dim"]), p["rope_dim"] // 2
    angle = np.outer(np.arange(case.tokens), np.arange(1, pairs + 1)).astype(np.float32) * np.float32(RATE)
    table = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
    return [_bf16(rng, *shape), table, np.empty(shape, np.uint16)]


def _pack_rows(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    out = np.empty((case.tokens, p["heads"], row_bytes(p["kind"], p["dim"])), np.uint8)
    return [_bf16(rng, case.tokens, p["heads"], p["dim"]), np.arange(case.tokens, dtype=np.int64), out]


def _quantize(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    shape = case.tokens, p["dim"]
    return [_bf16(rng, *shape), np.empty(shape, np.uint16)]


def _pool(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    n, dim, ratio = case.tokens * p["ratio"], p["dim"], p["ratio"]
    kv, gate, ring = _f32(rng, n, dim), _f32(rng, n, dim), _f32(rng, ratio, 2, dim)
    member = np.arange(n, dtype=np.int64).reshape(case.tokens, ratio)
    member[0, 0] = -1
    return [kv, gate, ring, member, np.empty((case.tokens, dim), np.uint16)]


def _copy_rows(rng: np.random.Generator, p: Params, case: Case) -> list[Array]:
    order = rng.permutation(case.tokens).astype(np.int64)
    shape = case.tokens, p["size"]
    return [_bytes(rng, *shape), np.arange(case.tokens, dtype=np.int64), order, np.empty(shape, np.uint8)]


_MAKERS: dict[str, Callable[[np.random.Generator, Params, Case], list[Array]]] = {
    "sparse_attention": _attention,
    "index_scores": _scores,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "pack_rows": _pack_rows,
    "quantize_activation": _quantize,
    "pool_groups": _pool,
    "copy_rows": _copy_rows,
}
