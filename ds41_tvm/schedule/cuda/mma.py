"""Tensor-core steps as TensorIR statements: bf16 products of 16 rows x 8 columns x 16 inner indices, f32 sums.

Register fragments of one warp, lane = 4 g + t (PTX ISA, ``mma.m16n8k16``); a register holds two bf16 values:

* A ``[16 rows, 16]``: a0 = row g, inner 2t and 2t + 1; a1 = row g + 8; a2, a3 = the same rows, inner 2t + 8, 2t + 9;
* B ``[16, 8 columns]``: b0 = inner 2t and 2t + 1 of column g; b1 = inner 2t + 8 and 2t + 9;
* C ``[16, 8]``: c0, c1 = row g, columns 2t and 2t + 1; c2, c3 = row g + 8.

Every step exists twice. ``ptx`` is the instruction. ``software`` does the same to the same fragments with shared memory
in between: each lane lays its registers down, then computes its four sums from what the other lanes laid down. A
program runs unchanged on either, so a machine without a GPU executes its index arithmetic and fragment layouts.

In ``software`` form all warps of a block must reach a step together: it holds two barriers.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

WARP = 32
EXCHANGE = 8  # words a lane lays down in the software form

_MMA = """
__forceinline__ __device__ void ds41_mma_bf16(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1,
                                              unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""


_MATRIX = """
__forceinline__ __device__ void ds41_matrix{name}(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3,
                                                  const void* row) {{
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(at) : "memory");
}}
"""
_SWAP = """
__forceinline__ __device__ float ds41_swap(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
"""


_MMA_S8 = """
__forceinline__ __device__ void ds41_mma_s8(int& c0, int& c1, int& c2, int& c3, unsigned a0, unsigned a1, unsigned a2,
                                            unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%10, %10, %10, %10};"
               : "=r"(c0), "=r"(c1), "=r"(c2), "=r"(c3)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
"""


def form_of(kind: str) -> str:
    """The form of these steps for a target kind."""
    return "ptx" if kind == "cuda" else "software"


def exchange_shape(mma: str, warps: int) -> tuple[int, int]:
    """Shape of the shared uint32 buffer that the software form needs; a word for the other."""
    return (warps * WARP, EXCHANGE) if mma == "software" else (1, 1)


def pair(words: Any, lane: Any, register: Any, half: Any) -> Any:
    """f32 value of half `half` of a register that a lane laid down."""
    word = words[lane, register]
    return T.reinterpret("float32", T.shift_left(T.shift_right(word, T.Cast("uint32", half * 16)), T.uint32(16)))


def _half(source: Any, words: Any, lane: Any, column: Any) -> Any:
    """Element `column`, as 16 bits, of the row that a lane named."""
    word = source[T.Cast("int32", words[lane, 6]) + column // 2]
    return T.bitwise_and(T.shift_right(word, T.Cast("uint32", column % 2 * 16)), T.uint32(0xFFFF))


@T.macro
def _software(c, at, a0, a1, a2, a3, b0, b1, words, thread):
    words[thread, 0] = a0
    words[thread, 1] = a1
    words[thread, 2] = a2
    words[thread, 3] = a3
    words[thread, 4] = b0
    words[thread, 5] = b1
    T.tvm_storage_sync("shared")
    for i in range(4):
        for k in range(16):
            c[at + i] = c[at + i] + pair(
                words, thread // 32 * 32 + thread % 32 // 4 * 4 + k % 8 // 2, i // 2 + k // 8 * 2, k % 2
            ) * pair(words, thread // 32 * 32 + (thread % 4 * 2 + i % 2) * 4 + k % 8 // 2, 4 + k // 8, k % 2)
    T.tvm_storage_sync("shared")


@T.macro
def multiply(mma, c, at, a0, a1, a2, a3, b0, b1, words, thread):
    """c[at .. at + 3] += A B of this thread's warp. `words`: see `exchange_shape`."""
    if mma == "ptx":
        T.evaluate(
            T.cuda.func_call(
                "ds41_mma_bf16", c[at], c[at + 1], c[at + 2], c[at + 3], a0, a1, a2, a3, b0, b1, source_code=_MMA
            )
        )
    else:
        _software(c, at, a0, a1, a2, a3, b0, b1, words, thread)


def byte(words: Any, lane: Any, register: Any, index: Any) -> Any:
    """Signed byte `index` of a register that a lane laid down, as int32."""
    word = T.reinterpret("int32", words[lane, register])
    return T.shift_right(T.shift_left(word, (3 - index) * 8), 24)


@T.macro
def multiply_s8(mma, c, a0, a1, a2, a3, b0, b1, words, thread):
    """c[0 .. 3] = A B of this thread's warp, exact: signed bytes, int32 sums, 32 inner indices (``mma.m16n8k32``).

    A register holds four bytes, inner indices 4t .. 4t + 3 (a0, a1, b0) or 4t + 16 .. 4t + 19 (a2, a3, b1); rows and
    columns are those of `multiply`.
    """
    if mma == "ptx":
        T.evaluate(T.cuda.func_call("ds41_mma_s8", c[0], c[1], c[2], c[3], a0, a1, a2, a3, b0, b1, source_code=_MMA_S8))
    else:
        words[thread, 0] = a0
        words[thread, 1] = a1
        words[thread, 2] = a2
        words[thread, 3] = a3
        words[thread, 4] = b0
        words[thread, 5] = b1
        T.tvm_storage_sync("shared")
        for i in range(4):
            c[i] = 0
            for k in range(32):
                c[i] = c[i] + byte(
                    words, thread // 32 * 32 + thread % 32 // 4 * 4 + k % 16 // 4, i // 2 + k // 16 * 2, k % 4
                ) * byte(words, thread // 32 * 32 + (thread % 4 * 2 + i % 2) * 4 + k % 16 // 4, 4 + k // 16, k % 4)
        T.tvm_storage_sync("shared")


@T.macro
def meet(mma):
    """A barrier for the threads of a warp, which share memory of their own."""
    if mma == "ptx":
        T.evaluate(T.cuda.warp_sync())
    else:
        T.tvm_storage_sync("shared")


# ---- fragments out of shared memory; values of other lanes


@T.macro
def load_matrices(mma, registers, at, transposed, source, row, words, thread):
    """registers[at .. at + 3] of this thread's warp = four matrices of 8 x 8 bf16 values (``ldmatrix``).

    Lane l names in `row` where in the shared uint32 buffer `source` row l % 8 of matrix l // 8 begins, four words on a
    16-byte boundary. Register i of lane 4 g + t: row g, columns 2t and 2t + 1 of matrix i; transposed: rows 2t and 2t +
    1 of column g.
    """
    if mma == "ptx":
        T.evaluate(
            T.cuda.func_call(
                "ds41_matrix_t" if transposed else "ds41_matrix",
                registers[at], registers[at + 1], registers[at + 2], registers[at + 3], T.address_of(source[row]),
                source_code=_MATRIX.format(name="_t" if transposed else "", how=".trans" if transposed else ""),
            )
        )  # fmt: skip
    else:
        words[thread, 6] = T.Cast("uint32", row)
        T.tvm_storage_sync("shared")
        for i in range(4):
            if transposed:
                registers[at + i] = T.bitwise_or(
                    _half(source, words, thread // 32 * 32 + i * 8 + thread % 4 * 2, thread % 32 // 4),
                    T.shift_left(
                        _half(source, words, thread // 32 * 32 + i * 8 + thread % 4 * 2 + 1, thread % 32 // 4),
                        T.uint32(16),
                    ),
                )
            else:
                registers[at + i] = source[
                    T.Cast("int32", words[thread // 32 * 32 + i * 8 + thread % 32 // 4, 6]) + thread % 4
                ]
        T.tvm_storage_sync("shared")


@T.macro
def from_lane(mma, target, at, value, mask, words, thread):
    """target[at] = `value` of the lane whose number differs in `mask`, f32."""
    if mma == "ptx":
        target[at] = T.cuda.func_call("ds41_swap", value, mask, source_code=_SWAP, return_type="float32")
    else:
        words[thread, 7] = T.reinterpret("uint32", value)
        T.tvm_storage_sync("shared")
        target[at] = T.reinterpret("float32", words[T.bitwise_xor(thread, mask), 7])
        T.tvm_storage_sync("shared")
