"""Candidate blocks: the parts of the context to which later indexers are restricted."""

from __future__ import annotations

from onnx import TensorProto

from ds41_tvm.onnx_export.builder import Body, Function
from ds41_tvm.onnx_export.formats import HIDDEN, LARGEST, define
from ds41_tvm.onnx_export.topk import select_best


def _block_count(b: Body, length: str, block_size: int) -> str:
    return b.op("Div", b.op("Add", length, b.i64([block_size - 1])), b.i64([block_size]))


def candidate_blocks(topk_blocks: int, block_size: int) -> Function:
    """Block numbers kept for each query: int64 [batch, tokens, min(topk_blocks, blocks)], ascending, then -1.

    ranks f32 [batch, tokens, T]; visible int64 [tokens]. A block ranks as the best of its positions (the last
    block may be short); that of the newest visible position as the best number there is.
    """

    @define(
        "CandidateBlocks",
        "ranks visible",
        "blocks",
        f"The best {topk_blocks} blocks of {block_size} positions, that of the newest visible one always.",
    )
    def made(b: Body, ranks: str, visible: str) -> str:
        length = b.size(ranks, 2)
        count = _block_count(b, length, block_size)
        missing = b.op("Sub", b.op("Mul", count, b.i64([block_size])), length)
        padded = b.op("Pad", ranks, b.op("Concat", b.i64([0] * 5), missing, axis=0), b.f32(HIDDEN))
        shape = b.op("Concat", b.op("Shape", ranks, end=2), count, b.i64([block_size]), axis=0)
        best = b.reduce("ReduceMax", b.op("Reshape", padded, shape), 3, keepdims=False)
        column = b.op("Unsqueeze", visible, b.i64([1]))
        newest = b.op("Div", b.op("Sub", column, b.i64(1)), b.i64(block_size))
        # (0 - 1) / block_size is 0 or -1, as engines have it: nothing visible is asked for by itself.
        some = b.op("Greater", column, b.i64(0))
        is_newest = b.op("And", b.op("Equal", b.arange(count), newest), some)
        kept = b.op("Where", is_newest, b.f32(LARGEST), best)
        return b.call(select_best(topk_blocks), kept)  # type: ignore[no-any-return]

    return made


def candidate_positions(block_size: int) -> Function:
    """bool [batch, tokens, T]: which positions lie in the blocks kept; `length` is T, int64 [1]."""

    @define("CandidatePositions", "blocks length", "inside", "Which positions lie in the kept blocks.")
    def made(b: Body, blocks: str, length: str) -> str:
        count = _block_count(b, length, block_size)
        # One more column takes the -1 entries.
        shape = b.op("Concat", b.op("Shape", blocks, end=2), b.op("Add", count, b.i64([1])), axis=0)
        zeros = b.op("Expand", b.f32(0), shape)
        ones = b.op("Expand", b.f32(1), b.op("Shape", blocks))
        places = b.op("Where", b.op("Less", blocks, b.i64(0)), count, blocks)
        kept = b.op("ScatterElements", zeros, places, ones, axis=2)
        block = b.op("Div", b.arange(length), b.i64(block_size))
        return b.cast(b.op("Gather", kept, block, axis=2), TensorProto.BOOL)

    return made
