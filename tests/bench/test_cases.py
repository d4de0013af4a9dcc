"""The options of the benchmark as cases."""

from __future__ import annotations

import pytest

from ds41_tvm.bench.cases import WHAT, Case, cases, parse_sizes, parse_time, parse_what, size_name
from ds41_tvm.errors import UsageError


def test_sizes():
    assert parse_sizes("--context", "1K,4096, 1m,7") == (1024, 4096, 1 << 20, 7)
    assert [size_name(n) for n in (7, 1024, 131072, 1 << 20, 1500)] == ["7", "1K", "128K", "1M", "1500"]


@pytest.mark.parametrize("text", ["", "0", "-1", "1G", "K", "1.5K", "1K,,2K"])
def test_bad_sizes_name_the_option_and_what_was_expected(text):
    with pytest.raises(UsageError, match="--context .* expected such as 128,4K,1M"):
        parse_sizes("--context", text)


def test_sizes_beyond_the_configuration_are_refused():
    with pytest.raises(UsageError, match="more than max_seq_len 100"):
        parse_sizes("--prefill", "64,101", 100)


def test_times():
    assert [parse_time(t) for t in (None, "90", "1.5s", "10m", "1h")] == [None, 90, 1.5, 600, 3600]
    for text in ("0", "-3", "soon", "1d", "", "m"):
        with pytest.raises(UsageError, match="--time .* expected a positive time"):
            parse_time(text)


def test_kinds_of_work():
    assert parse_what("all") == WHAT
    assert parse_what("topk, prefill") == ("prefill", "topk")
    with pytest.raises(UsageError, match="'speed' is unknown; expected some of prefill, decode"):
        parse_what("prefill,speed")


def test_the_cases_of_all_options():
    made = list(cases(WHAT, (128, 1024, 4096), (1024, 131072, 1 << 20), (1, 16)))
    assert Case("prefill", tokens=4096, context=4096, chunk=512) in made
    assert Case("prefill", tokens=1024, context=1024, chunk=1024) in made
    assert Case("decode", context=1 << 20) in made
    assert Case("batch", context=1024, batch=16) in made
    assert [c for c in made if c.what == "topk"] == [Case("topk", context=131072)]  # not at a million
    assert Case("attention", tokens=1024, context=1024) in made
    assert made[-1] == Case("launch")
    assert len({c.name for c in made}) == len(made)


def test_names():
    names = [
        Case("prefill", tokens=4096, context=4096, chunk=512).name,
        Case("decode", context=131072).name,
        Case("batch", context=1024, batch=16).name,
        Case("attention", tokens=1024, context=1024).name,
    ]
    assert names == ["prefill 4K by 512", "decode 128K", "batch x16 1K", "attention 1K of 1K queries"]
