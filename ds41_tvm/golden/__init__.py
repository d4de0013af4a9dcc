"""Recorded outputs of the official arithmetic: reading, replaying, judging an implementation by them."""

from ds41_tvm.golden.case import GoldenCase, load_case
from ds41_tvm.golden.judge import Finding, judge
from ds41_tvm.golden.play import Forward, play, reference_forward

__all__ = ["Finding", "Forward", "GoldenCase", "judge", "load_case", "play", "reference_forward"]
