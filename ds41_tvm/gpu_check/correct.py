"""Whether the kernels are right: recorded cases, and the same bits however tokens are fed, with all else poisoned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ds41_tvm.golden.case import load_case
from ds41_tvm.golden.judge import examine
from ds41_tvm.golden.play import play
from ds41_tvm.golden.runner import runner_caches, runner_forward
from ds41_tvm.gpu_check.devices import open_part
from ds41_tvm.gpu_check.fill import bits, made_up_weights
from ds41_tvm.runtime.runner import Runner

Row = dict[str, Any]


def golden(folder: Path, artifacts: dict[str, str], emulate: bool = False) -> Iterator[Row]:
    """One row per recorded case: `artifacts` names the artefact of each."""
    for name, artifact in artifacts.items():
        begin = time.perf_counter()
        case = load_case(folder / "golden" / name)
        opened, device = open_part(folder, artifact, emulate)
        runner = Runner(opened.program, opened.functions, case.weights, keys="published", device=device)
        forward, sequences = runner_forward(case, runner)
        produced = play(case, forward)
        produced.update(runner_caches(case, runner, sequences))
        verdict = examine(case, produced)
        worst = verdict.worst
        yield {
            "case": case.name, "ties": case.ties, "linear": case.linear, "ok": not verdict.findings,
            "selections": verdict.selections, "other_selections": verdict.mismatches,
            "rounding_ties": verdict.rounding_ties,
            "worst": None if worst is None else [f"{worst.what}.{worst.layer}", worst.error, worst.limit],
            "findings": [str(finding) for finding in verdict.findings[:5]],
            "seconds": time.perf_counter() - begin,
        }  # fmt: skip


def device_runner(folder: Path, artifact: str, emulate: bool = False, functions: Any = None) -> Runner:
    """A runner of an artefact without weights, with made-up ones on its device. `functions`: wraps the kernels."""
    opened, device = open_part(folder, artifact, emulate)
    weights = {layer: made_up_weights(opened.program, layer, device) for layer in opened.program.layers}
    bound = device.bind(opened.functions)
    setattr(device, "bind", lambda _: bound if functions is None else functions(bound))  # noqa: B010 - not a method
    return Runner(opened.program, opened.functions, weights, device=device)


def invariance(folder: Path, artifact: str, tokens: int, emulate: bool = False) -> Iterator[Row]:
    """A prompt at once, in pieces, token by token at its end, and beside another one; outputs and caches must be equal.

    Between the steps scratch memory is filled with NaN patterns.
    """
    runner = device_runner(folder, artifact, emulate)
    shape = (tokens, runner.config.dim)
    inputs = {layer: runner.device.download(bits(runner.device, shape, layer)) for layer in runner.layers}
    whole = _feed(runner, inputs, [tokens])
    for name, cuts, beside in (
        ("pieces", [tokens // 3, 1, tokens - tokens // 3 - 4, 1, 1, 1], 0),
        ("batch", [tokens // 2, tokens - tokens // 2], 7),
    ):
        got = _feed(runner, inputs, cuts, beside)
        wrong = [what for what, array in whole.items() if not np.array_equal(array, got[what])]
        yield {
            "artifact": artifact, "how": name, "tokens": tokens, "ok": not wrong, "compared": len(whole),
            "different": wrong[:10],
        }  # fmt: skip
    bad = [what for what, array in whole.items() if what.startswith("out") and ((array & 0x7F80) == 0x7F80).any()]
    yield {
        "artifact": artifact, "how": "nothing of the poison arrives", "tokens": tokens, "ok": not bad,
        "compared": len(runner.layers), "different": bad,
    }  # fmt: skip


def _feed(runner: Runner, inputs: dict[int, Any], cuts: list[int], beside: int = 0) -> dict[str, Any]:
    """Outputs and caches of a sequence fed in pieces; `beside`: tokens of another one before it in every step."""
    sequence, other = runner.new_sequence(), runner.new_sequence()
    pieces: dict[int, list[Any]] = {layer: [] for layer in runner.layers}
    first = 0
    for count in cuts:
        runner.workspace.fill(0xFF)
        step = runner.step([(other, beside), (sequence, count)])
        for layer in runner.layers:
            x = inputs[layer]
            rows = np.concatenate([x[:beside][::-1], x[first : first + count]])
            pieces[layer].append(runner.forward(layer, rows, step)[beside:])
        runner.commit(step)
        first += count
    found = {f"out.{layer}": np.concatenate(parts) for layer, parts in pieces.items()}
    for layer in runner.layers:
        found[f"window.{layer}"] = sequence.window_cache(layer)
        if runner.config.role(layer).kind == "full":
            found[f"latents.{layer}"] = sequence.compress_kv_cache(layer)
            found[f"keys.{layer}"] = sequence.index_k_cache(layer)
    sequence.close()
    other.close()
    return found
