"""Block quantisers as the layer uses them: cache rows as bytes, values through a format and back."""

from __future__ import annotations

from collections.abc import Callable

from ds41_tvm.errors import NumericsError
from ds41_tvm.numerics import formats
from ds41_tvm.numerics.formats import U8, U16, RowKind

_QUANTIZE: dict[str, Callable[[U16], tuple[U8, U8]]] = {
    "window": formats.quantize_window,
    "latent": formats.quantize_latent,
    "index": formats.quantize_index,
}
_PACK: dict[str, Callable[[U8, U8], U8]] = {
    "window": formats.pack_window_row,
    "latent": formats.pack_latent_row,
    "index": formats.pack_index_row,
}


def pack_rows(kind: RowKind, x: U16) -> U8:
    """bf16 bits [..., D] -> packed cache rows uint8 [..., bytes of a row]: codes, then scales.

    ``window``: e4m3, block 32, e8m0 scales; ``latent``: e2m1, block 16, e4m3 scales; ``index``: e2m1, block
    32, e8m0.
    """
    if kind not in _QUANTIZE:
        raise NumericsError(f"unknown kind of packed row {kind!r}: expected one of {', '.join(_QUANTIZE)}")
    return _PACK[kind](*_QUANTIZE[kind](x))


def unpack_rows(kind: RowKind, rows: U8, dim: int) -> U16:
    """Packed cache rows uint8 [..., bytes of a row] -> bf16 bits [..., D], exact."""
    if kind == "window":
        return formats.dequantize_window(*formats.unpack_window_row(rows, dim))
    if kind == "latent":
        return formats.dequantize_latent(*formats.unpack_latent_row(rows, dim))
    return formats.dequantize_index(*formats.unpack_index_row(rows, dim))


def round_trip(kind: RowKind, x: U16) -> U16:
    """bf16 bits -> the values a cache of this kind gives back, bf16 bits of the same shape."""
    return unpack_rows(kind, pack_rows(kind, x), x.shape[-1])


def quantize_activation(x: U16) -> U16:
    """y = e4m3(x / s) * s per block of 32, s = 2^ceil(log2(max(amax, 1e-4) / 448)): an fp8 layer's input."""
    return round_trip("window", x)
