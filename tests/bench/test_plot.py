"""The pictures of a result."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds41_tvm.bench.plot import plot
from ds41_tvm.bench.result import spread
from ds41_tvm.errors import UsageError

from .test_result import result, row


def test_roofline_and_times(tmp_path):
    made = result(row("a", 1.0, 0.5, torch=2.0), row("b", 0.1, 0.2))
    made.limits.update(fma=spread([1e12]), amx=spread([4e12]))
    plot(made, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.png").stat().st_size > 20_000
    plot(made, tmp_path / "r.svg")
    svg = (tmp_path / "r.svg").read_text()
    assert "<svg" in svg


def test_endings_that_are_no_pictures_are_refused(tmp_path):
    with pytest.raises(UsageError, match="expected a path ending in .png"):
        plot(result(row("a", 1.0, 0.5)), tmp_path / "r.txt7")


def test_without_matplotlib_the_extra_is_named():
    code = """
import sys
sys.modules["matplotlib"] = None  # as if it were not installed
from ds41_tvm.bench.plot import check_plot
from ds41_tvm.errors import UsageError
try:
    check_plot()
except UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ds41-tvm[plot]" in done.stdout, done.stderr
