"""Words between memory and registers, and fp8 codes in registers: an instruction on CUDA, elements otherwise.

As in `mma`, ``ptx`` and ``software`` do the same to the same addresses.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ds41_tvm.numerics.tir import e2m1_to_twice, e4m3_to_f32

_LOAD = """
__forceinline__ __device__ void ds41_load_{n}(const void* from{args}) {{
  asm volatile("ld.global.L1::no_allocate{vector}.u32 {outs}, [%{n}];" : {registers} : "l"(from) : "memory");
}}
"""


def _load_source(count: int) -> str:
    names = [f"w{i}" for i in range(count)]
    outs = ", ".join(f"%{i}" for i in range(count))
    return _LOAD.format(
        n=count,
        args="".join(f", unsigned& {w}" for w in names),
        vector=f".v{count}" if count > 1 else "",
        outs=f"{{{outs}}}" if count > 1 else outs,
        registers=", ".join(f'"=r"({w})' for w in names),
    )


def _load(count: int, address: Any, words: Any, at: Any) -> Any:
    """words[at .. at + count - 1] = the words at `address`, in one access."""
    registers = (words[at + i] for i in range(count))
    return T.cuda.func_call(f"ds41_load_{count}", address, *registers, source_code=_load_source(count))


def _word(source: Any, row: Any, column: Any, i: Any) -> Any:
    """uint32 word i from ``source[*row, column ..]`` of uint8, uint16 or uint32 elements."""
    per = {"uint8": 4, "uint16": 2, "uint32": 1}[str(source.dtype)]
    out = T.Cast("uint32", source[(*row, column + i * per)])
    for b in range(1, per):
        part = T.Cast("uint32", source[(*row, column + i * per + b)])
        out = T.bitwise_or(out, T.shift_left(part, T.uint32(b * 32 // per)))
    return out


@T.macro
def issue(mma):
    """Keep the loads before this point before it.

    ptxas moves loads to their first use to save registers, which leaves too few of them in flight; it moves none
    across a point where the threads of a warp wait for each other.
    """
    if mma == "ptx":
        T.evaluate(T.cuda.warp_sync())


@T.macro
def load_words(mma, words, at, count, source, row, column):
    """words[at ..] = `count` (1, 2 or 4) uint32 words from ``source[*row, column ..]``, of uint16 or uint32 elements,
    in one access of count * 4 bytes, to which the address must be aligned.
    """
    if mma == "ptx":
        T.evaluate(_load(count, T.address_of(source[(*row, column)]), words, at))
    else:
        for i in range(count):
            words[at + i] = _word(source, row, column, i)


_STORE = """
__forceinline__ __device__ void ds41_store_{n}(void* to{args}) {{
  *reinterpret_cast<{type}*>(to) = {make};
}}
"""
_MAKE = {1: ("unsigned", "w0"), 2: ("uint2", "make_uint2(w0, w1)"), 4: ("uint4", "make_uint4(w0, w1, w2, w3)")}


def _store(count: int, address: Any, words: Any, at: Any) -> Any:
    kind, make = _MAKE[count]
    source = _STORE.format(n=count, args="".join(f", unsigned w{i}" for i in range(count)), type=kind, make=make)
    return T.cuda.func_call(f"ds41_store_{count}", address, *(words[at + i] for i in range(count)), source_code=source)


@T.macro
def store_words(mma, words, at, count, target, row, column):
    """``target[*row, column ..]`` of uint16, uint32 or float32 elements = `count` words, as `load_words`."""
    if mma == "ptx":
        T.evaluate(_store(count, T.address_of(target[(*row, column)]), words, at))
    elif target.dtype == "uint16":
        for i in range(count):
            target[(*row, column + i * 2)] = T.Cast("uint16", T.bitwise_and(words[at + i], T.uint32(0xFFFF)))
            target[(*row, column + i * 2 + 1)] = T.Cast("uint16", T.shift_right(words[at + i], T.uint32(16)))
    else:
        for i in range(count):
            target[(*row, column + i)] = T.reinterpret(target.dtype, words[at + i])


# ---- copies into shared memory that do not wait

_COPY = """
__forceinline__ __device__ void ds41_copy_{n}(void* to, const void* from) {{
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {n};" : : "r"(at), "l"(from) : "memory");
}}
"""
_COMMIT = """
__forceinline__ __device__ void ds41_copy_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
"""
_WAIT = """
__forceinline__ __device__ void ds41_copy_wait_{n}() {{ asm volatile("cp.async.wait_group {n};" : : : "memory"); }}
"""


def _copy(size: int, to: Any, source: Any) -> Any:
    code = _COPY.format(n=size, cache="cg" if size == 16 else "ca")
    return T.cuda.func_call(f"ds41_copy_{size}", to, source, source_code=code)


@T.macro
def copy(mma, to, at, size, source, row, column):
    """Start to copy `size` (4, 8 or 16) bytes from ``source[*row, column ..]`` to shared uint32 words ``to[*at ..]``.

    Both lie at multiples of `size` bytes. The software form copies at once. See `commit`.
    """
    if mma == "ptx":
        T.evaluate(_copy(size, T.address_of(to[at]), T.address_of(source[(*row, column)])))
    else:
        for i in range(size // 4):
            to[(*at[:-1], at[-1] + i)] = _word(source, row, column, i)


@T.macro
def commit(mma):
    """The copies that this thread started since the last call are one group."""
    if mma == "ptx":
        T.evaluate(T.cuda.func_call("ds41_copy_commit", source_code=_COMMIT))


@T.macro
def wait(mma, groups):
    """Until all but the newest `groups` groups of this thread have arrived; other threads see them after a barrier."""
    if mma == "ptx":
        T.evaluate(T.cuda.func_call(f"ds41_copy_wait_{groups}", source_code=_WAIT.format(n=groups)))


# ---- e4m3 pairs

_SCALE = """
__forceinline__ __device__ unsigned ds41_scale_pair(unsigned pair, unsigned first, unsigned second) {
  unsigned part, out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(part) : "r"(pair), "r"(first), "r"(0x80008000u));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(part), "r"(second), "r"(0x80008000u));
  return out;
}
"""
_PAIR = """
__forceinline__ __device__ unsigned ds41_e4m3_pair(unsigned word, unsigned select) {
  unsigned codes = __byte_perm(word, 0, select);
  return (codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u);
}
"""


def _u(value: int) -> Any:
    return T.uint32(value)


def e4m3_pair(mma: str, word: Any, half: Any) -> Any:
    """Two e4m3 codes, half 0 (low) or 1 of `word`, -> bf16 pair of their values * 2^-120, low code first.

    Sign, exponent and mantissa moved to where bf16 has them. A small exponent field stands for a small power of two,
    and for a subnormal in both formats, so the factor 2^120 is all that is missing. Codes must not be NaN.
    """
    if mma == "ptx":
        select = T.uint32(0x1404) + T.Cast("uint32", half) * T.uint32(0x2020)  # a zero byte below each code
        return T.cuda.func_call("ds41_e4m3_pair", word, select, source_code=_PAIR, return_type="uint32")
    two = T.shift_right(word, T.Cast("uint32", half) * T.uint32(16))
    codes = T.bitwise_or(
        T.shift_left(T.bitwise_and(two, _u(0xFF)), _u(8)), T.shift_left(T.bitwise_and(two, _u(0xFF00)), _u(16))
    )
    return T.bitwise_or(
        T.bitwise_and(codes, _u(0x80008000)), T.bitwise_and(T.shift_right(codes, _u(4)), _u(0x07F007F0))
    )


_NIBBLES = """
__forceinline__ __device__ unsigned ds41_e2m1_pair(unsigned word, unsigned select) {
  unsigned codes = __byte_perm(word, 0, select);
  return ((codes & 0x00070007u) << 6) | ((codes & 0x00080008u) << 12);
}
"""


def e2m1_pair(mma: str, word: Any, half: Any) -> Any:
    """Two e2m1 codes, the low nibbles of bytes 0 and 1 (`half` 0) or 2 and 3 (1), -> bf16 pair of values * 2^-126."""
    if mma == "ptx":
        select = T.uint32(0x4140) + T.Cast("uint32", half) * T.uint32(0x0202)
        return T.cuda.func_call("ds41_e2m1_pair", word, select, source_code=_NIBBLES, return_type="uint32")
    two = T.shift_right(word, T.Cast("uint32", half) * T.uint32(16))
    codes = T.bitwise_or(T.bitwise_and(two, _u(0xF)), T.shift_left(T.bitwise_and(two, _u(0xF00)), _u(8)))
    return T.bitwise_or(
        T.shift_left(T.bitwise_and(codes, _u(0x00070007)), _u(6)),
        T.shift_left(T.bitwise_and(codes, _u(0x00080008)), _u(12)),
    )


E2M1_FACTOR = 0x7E807E80  # 2^126, twice


def e4m3_scale_pair(code: Any) -> Any:
    """A latent's e4m3 scale as a bf16 pair, exact; NaN stays NaN."""
    bits = T.shift_right(T.reinterpret("uint32", e4m3_to_f32(code)), _u(16))
    return T.bitwise_or(bits, T.shift_left(bits, _u(16)))


_TWICE = """
__forceinline__ __device__ unsigned ds41_e2m1_twice(unsigned codes) {
  unsigned select = codes & 0x7777u;
  unsigned up = __byte_perm(0x03020100u, 0x0c080604u, select);
  unsigned down = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, select);
  unsigned minus = (__byte_perm(0x80808080u, 0x80808080u, codes & 0x8888u) & 0x01010101u) * 0xffu;
  return (up & ~minus) | (down & minus);
}
"""


def e2m1_twice(mma: str, word: Any, half: Any) -> Any:
    """Four e2m1 codes, the nibbles of the low or high half of `word`, -> signed bytes, twice their values; exact."""
    codes = T.shift_right(word, T.Cast("uint32", half) * T.uint32(16))
    if mma == "ptx":
        return T.cuda.func_call("ds41_e2m1_twice", codes, source_code=_TWICE, return_type="uint32")
    out = T.uint32(0)
    for i in range(4):
        code = T.Cast("uint8", T.bitwise_and(T.shift_right(codes, _u(4 * i)), _u(15)))
        twice = T.bitwise_and(T.reinterpret("uint32", e2m1_to_twice(code)), _u(0xFF))
        out = T.bitwise_or(out, T.shift_left(twice, _u(8 * i)))
    return out


def e8m0_factors(code: Any) -> tuple[Any, Any]:
    """Two bf16 pairs whose product is 2^(code - 127) * 2^120, or NaN for code 255: one bf16 cannot hold all of them."""
    power = T.Cast("int32", code) - T.int32(7)
    first = T.shift_right(power, T.int32(1))  # rounds down
    bad = T.Cast("int32", code) == T.int32(255)

    def pair(exponent: Any) -> Any:
        bits = T.Select(bad, T.uint32(0x7FC0), T.shift_left(T.Cast("uint32", exponent + T.int32(127)), _u(7)))
        return T.bitwise_or(bits, T.shift_left(bits, _u(16)))

    return pair(first), pair(power - first)


def scale_pair(mma: str, pair: Any, first: Any, second: Any) -> Any:
    """Each half of a bf16 pair times both factors; exact where the factors are powers of two and nothing underflows."""
    if mma == "ptx":
        return T.cuda.func_call("ds41_scale_pair", pair, first, second, source_code=_SCALE, return_type="uint32")

    def value(word: Any, high: bool) -> Any:
        moved = T.bitwise_and(word, _u(0xFFFF0000)) if high else T.shift_left(word, _u(16))
        return T.reinterpret("float32", moved)

    low, high = (
        T.reinterpret("uint32", value(pair, half) * value(first, half) * value(second, half)) for half in (False, True)
    )
    return T.bitwise_or(T.shift_right(low, _u(16)), T.bitwise_and(high, _u(0xFFFF0000)))
