"""Block quantisers: cache rows as bytes, values through a format and back. Rows are those of the compiled layer."""

from __future__ import annotations

from onnx import TensorProto

from ds41_tvm.numerics.formats import INDEX_BLOCK, LATENT_BLOCK, NIBBLE_RUN, WINDOW_BLOCK, RowKind, row_parts
from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import (
    DECODE_E2M1,
    DECODE_E4M3,
    DECODE_E8M0,
    DECODE_HIGH,
    DECODE_LOW,
    LARGEST,
    SCALE_INDEX,
    SCALE_WINDOW,
    block_maximum,
    define,
    encode_e2m1,
    encode_e4m3,
    is_negative,
)

BLOCK = {"window": WINDOW_BLOCK, "latent": LATENT_BLOCK, "index": INDEX_BLOCK}
_TITLE = {"window": "e4m3, blocks of 32, e8m0 scales", "latent": "e2m1, blocks of 16, e4m3 scales"}
_TITLE["index"] = "e2m1, blocks of 32, e8m0 scales"


def _blocks(kind: RowKind) -> Function:
    """Blocks [..., n, block] -> codes [..., n, block] and scale codes [..., n, 1], whole numbers in f32."""
    encode, sign = (encode_e4m3, 128) if kind == "window" else (encode_e2m1, 8)
    not_a_number = 127 if kind == "latent" else 255

    @define(
        f"Quantize{kind.title()}Blocks",
        "x",
        "codes scales",
        f"{_TITLE[kind]}: code = round(x / scale); a block with a NaN or infinity: NaN scale, zero codes.",
    )
    def made(b: Body, x: str) -> list[str]:
        amax, bad = b.call(block_maximum, x)
        if kind == "latent":
            # scale = e4m3(max(amax, 6 * 2^-9) / 6)
            floored = b.op("Clip", amax, b.f32(6 * 2.0**-9), b.f32(LARGEST))
            scales = b.call(encode_e4m3, b.op("Div", floored, b.f32(6)))
            scale = b.call(DECODE_E4M3, scales)
        else:
            scales = b.call(SCALE_WINDOW if kind == "window" else SCALE_INDEX, amax)
            scale = b.call(DECODE_E8M0, scales)
        signs = b.op("Where", b.call(is_negative, x), b.f32(sign), b.f32(0))
        codes = b.op("Add", b.call(encode, b.op("Abs", b.op("Div", x, scale))), signs)
        return [
            b.op("Where", bad, b.f32(0), codes),
            b.op("Where", bad, b.f32(not_a_number), scales),
        ]

    return made


def pack_rows(kind: RowKind, dim: int) -> Function:
    """bf16 values [batch, rows, dim] -> packed cache rows uint8 [batch, rows, bytes]: codes, then scales."""
    count = dim // BLOCK[kind]

    @define(f"Pack{kind.title()}Rows{dim}", "x", "rows", f"Values -> packed rows: {_TITLE[kind]}, codes then scales.")
    def made(b: Body, x: str) -> str:
        blocks = b.op("Reshape", x, b.i64([0, 0, count, BLOCK[kind]]))
        codes, scales = b.call(_blocks(kind), blocks)
        if kind == "window":
            data = b.op("Reshape", codes, b.i64([0, 0, dim]))
        else:
            # Within a run of 32, elements i and i + 16 share a byte.
            runs = b.op("Reshape", codes, b.i64([0, 0, dim // NIBBLE_RUN, 2, NIBBLE_RUN // 2]))
            low, high = b.ops("Split", runs, b.i64([1, 1]), outputs=2, axis=3)
            both = b.op("Add", low, b.op("Mul", high, b.f32(16)))
            data = b.op("Reshape", both, b.i64([0, 0, dim // 2]))
        row = b.op("Concat", data, b.op("Reshape", scales, b.i64([0, 0, count])), axis=2)
        return b.cast(row, TensorProto.UINT8)

    return made


def unpack_rows(kind: RowKind, dim: int) -> Function:
    """Packed rows uint8 [a, b, c, bytes] -> values f32 [a, b, c, dim], exact."""
    data_bytes, scale_bytes = row_parts(kind, dim)
    block = BLOCK[kind]

    @define(f"Unpack{kind.title()}Rows{dim}", "rows", "x", f"Packed rows -> values: {_TITLE[kind]}.")
    def made(b: Body, rows: str) -> str:
        data, scales = b.ops("Split", rows, b.i64([data_bytes, scale_bytes]), outputs=2, axis=3)
        scale = b.call(DECODE_E4M3 if kind == "latent" else DECODE_E8M0, scales)
        if kind == "window":
            values = b.call(DECODE_E4M3, data)
        else:
            half = NIBBLE_RUN // 2
            runs = b.op("Reshape", data, b.i64([0, 0, 0, dim // NIBBLE_RUN, half]))
            values = b.op("Concat", b.call(DECODE_LOW, runs), b.call(DECODE_HIGH, runs), axis=4)
        blocks = b.op("Reshape", values, b.i64([0, 0, 0, scale_bytes, block]))
        scaled = b.op("Mul", blocks, b.op("Unsqueeze", scale, b.i64([4])))
        return b.op("Reshape", scaled, b.i64([0, 0, 0, dim]))

    return made


def round_trip(kind: RowKind, dim: int) -> Function:
    """bf16 values [batch, rows, dim] -> the values that the format gives back, same shape."""
    count = dim // BLOCK[kind]

    @define(f"RoundTrip{kind.title()}{dim}", "x", "y", f"Values through {_TITLE[kind]} and back.")
    def made(b: Body, x: str) -> str:
        blocks = b.op("Reshape", x, b.i64([0, 0, count, BLOCK[kind]]))
        codes, scales = b.call(_blocks(kind), blocks)
        values = b.call(DECODE_E4M3 if kind == "window" else DECODE_E2M1, codes)
        scale = b.call(DECODE_E4M3 if kind == "latent" else DECODE_E8M0, scales)
        return b.op("Reshape", b.op("Mul", values, scale), b.i64([0, 0, dim]))

    return made
