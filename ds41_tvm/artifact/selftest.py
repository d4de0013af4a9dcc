"""Run an artefact once on made-up input: what a bundle does when it is started.

    python -m ds41_tvm.artifact.selftest PATH [--tokens N] [--decode N] [--threads N] [--checkpoint DIR]

Prints one JSON object: times, memory, and a digest of all outputs, equal wherever the same code runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from typing import Any

SEED = "self-test"


def selftest(
    path: str, tokens: int = 16, decode: int = 4, threads: int | None = None, checkpoint: str | None = None
) -> dict[str, Any]:
    """Load, feed `tokens` tokens at once and `decode` single ones, all layers; see the module."""
    start = time.perf_counter()
    from ds41_tvm.artifact.load import load
    from ds41_tvm.checkpoint.values import random_input

    runner = load(path, weights=checkpoint, threads=threads)
    loaded, digest, first = time.perf_counter(), hashlib.sha256(), None
    sequence = runner.new_sequence()
    for number, count in enumerate([tokens] + [1] * decode):
        step = runner.step([(sequence, count)])
        for layer in runner.layers:
            x = random_input(SEED, layer, number, 1, count, runner.config.dim)[0]
            out = runner.forward(layer, x, step)
            first = first or time.perf_counter()
            assert not isinstance(out, tuple)  # no trace was asked for
            digest.update(out.tobytes())
        runner.commit(step)
    end = time.perf_counter()
    return {
        "layers": list(runner.layers),
        "threads": runner.threads,
        "load_seconds": loaded - start,
        "first_output_seconds": (first or end) - start,
        "all_seconds": end - start,
        "peak_bytes": _peak(),
        "torch_imported": "torch" in sys.modules,
        "compiler_mapped": _mapped("libtvm_compiler"),
        "digest": "sha256:" + digest.hexdigest(),
    }


def _peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mapped(name: str) -> bool | None:
    try:
        with open("/proc/self/maps") as file:
            return any(name in line for line in file)
    except OSError:
        return None


def main(arguments: list[str] | None = None, path: str | None = None) -> int:
    """The command line; `path`: of a bundle, which knows its artefact."""
    parser = argparse.ArgumentParser(description="Load an artefact and run it once.")
    if path is None:
        parser.add_argument("path")
    for name, kind in (("tokens", int), ("decode", int), ("threads", int), ("checkpoint", str)):
        parser.add_argument(f"--{name}", type=kind)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    from ds41_tvm.errors import Ds41Error

    try:
        print(json.dumps(selftest(**{"path": path, **given}), indent=1))
    except Ds41Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
