"""e4m3 codes by byte permutes: every code at every scale that the tables are for."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from ds41_tvm.compiler.targets import tvm_target
from ds41_tvm.numerics.formats import bf16_encode, e4m3_decode, e8m0_decode
from ds41_tvm.packing import aligned
from ds41_tvm.schedule.cpu import e4m3
from ds41_tvm.target import parse_target

TARGETS = [t for t in ("cpu:x86-64-v4+vbmi",) if not parse_target(t).missing_here()]


@T.macro
def _decode(codes, scale, out):
    low0: T.let = e4m3.table(scale)[0]
    low1: T.let = e4m3.table(scale)[1]
    high0: T.let = e4m3.table(scale)[2]
    high1: T.let = e4m3.table(scale)[3]
    for i in range(4):
        out[i, T.ramp(0, 1, 32)] = e4m3.decode(codes[i, T.ramp(0, 1, 64)], low0, low1, high0, high1)


@pytest.mark.parametrize("target", TARGETS)
def test_every_code_at_every_scale(target: str) -> None:
    @T.prim_func(s_tir=True)
    def main(
        codes: T.Buffer((4, 64), "uint8"),
        scale: T.Buffer((1,), "uint8"),
        out: T.Buffer((4, 32), "uint32"),
        good: T.Buffer((1,), "uint8"),
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        with T.sblock("decode"):
            T.reads(codes[0:4, 0:64], scale[0])
            T.writes(out[0:4, 0:32], good[0])
            good[0] = T.Cast("uint8", e4m3.in_range(scale[0]))
            _decode(codes, scale[0], out)

    run = tvm.compile(main, target=tvm_target(parse_target(target)))["main"]
    codes, scale, out, good = (aligned(s, t) for s, t in (((4, 64), "u1"), (1, "u1"), ((4, 32), "u4"), (1, "u1")))
    codes[...] = np.arange(256).reshape(4, 64)
    numbers = (np.arange(256) & 0x7F) != 0x7F
    values = e4m3_decode(np.arange(256, dtype=np.uint8)[numbers])
    in_range = []
    for code in range(256):
        scale[0] = code
        run(codes, scale, out, good)
        if good[0]:
            in_range.append(code)
            expected = bf16_encode(values * e8m0_decode(np.array([code], np.uint8)))
            np.testing.assert_array_equal(out.view(np.uint16).reshape(-1)[numbers], expected, err_msg=str(code))
    assert in_range == list(range(e4m3.LEAST_SCALE, e4m3.GREATEST_SCALE + 1))
