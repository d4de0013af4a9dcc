"""``ds41-tvm run``: prefill and decode through compiled layers."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ds41_tvm.cli.options import parse_layers
from ds41_tvm.cli.output import byte_size, console, print_json, table
from ds41_tvm.cli.progress import progress

if TYPE_CHECKING:
    from ds41_tvm.cli.run_check import Agreement, Part
    from ds41_tvm.cli.run_input import Work
    from ds41_tvm.cli.run_layers import LayerResult, Opened

SEED = "run"


def run(
    *,
    checkpoint: Path | None = None,
    artifact: Path | None = None,
    layers: str = "all",
    prompt: str | None = None,
    decode: int | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    input: Path | None = None,
    output: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    linear: Literal["bf16", "fp8"] | None = None,
    ties: Literal["lowest-index", "torch-cpu"] = "lowest-index",
    keys: Literal["own", "published"] = "own",
    target: str = "cpu",
    threads: int | None = None,
    check: bool | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Compile layers of a checkpoint, run a prompt and single tokens through them, and report times.

    Without --checkpoint or --artifact a small synthetic checkpoint with layers of every role is made, run, and checked
    against the NumPy reference. Exit code 1 if a check fails.

    Parameters
    ----------
    checkpoint
        Directory with config.json and *.safetensors.
    artifact
        Folder that `ds41-tvm compile` wrote: run its layers without compiling. Its weights are used, or those of
        --checkpoint, which --check needs. It fixes --layers, --linear, --ties and --target.
    layers
        Layers to run, such as 0,2,20-24; with their sources.
    prompt
        Tokens of the prompt (40 if not given), or one length per sequence, such as 100,37.
    decode
        Single tokens after the prompt (8 if not given).
    batch
        Sequences.
    chunk
        Tokens of a prompt that are fed at once (1024 if not given).
    input
        Rows to feed, an .npy file of bf16 bits (uint16), [tokens, dim] or [batch, tokens, dim]: the prompt, then the
        single tokens; the same to every layer. If not given, made by rule.
    output
        Write the outputs, bf16 bits (uint16), shaped as the input: .npy for one layer, or .npz with out.LAYER, and
        out.LAYER.SEQUENCE for prompts of several lengths.
    overwrite
        Replace the file of --output if it is there.
    linear
        Arithmetic of the linear layers; as the checkpoint stores them if not given.
    ties
        Which of equal scores are taken.
    keys
        Index keys that a single token in the middle of a group scores: those of its own source layer, or those
        published last, as the official code does.
    target
        What to compile for: cpu, or cpu:LEVEL+FEATURE such as cpu:x86-64-v3.
    threads
        Threads to run on; by default all processors.
    check
        Compare every layer with the NumPy reference.
    json
        Print the result as JSON.
    """
    from ds41_tvm.cli.limits import check_target
    from ds41_tvm.cli.run_input import Inputs, OutputFile, plan_work, read_input
    from ds41_tvm.cli.run_layers import Options, check_work, feed, open_artifact_runner, open_checkpoint
    from ds41_tvm.config import AttentionConfig, closure
    from ds41_tvm.errors import UsageError
    from ds41_tvm.runtime.threads import check_threads

    # Everything that can be refused is refused before the long work begins.
    chosen = parse_layers(layers)
    options = Options(check_target(target), linear, ties, keys, check_threads(threads))
    ready = None
    if artifact is not None:
        if chosen is not None or linear is not None or ties != "lowest-index" or target != "cpu":
            raise UsageError("--artifact fixes --layers, --linear, --ties and --target; leave them out")
        if check and checkpoint is None:
            raise UsageError("--check needs the unpacked weights; give --checkpoint beside --artifact")
        ready = open_artifact_runner(artifact, checkpoint, options)
        config, chosen = ready.runner.config, ready.runner.layers
    else:
        config = AttentionConfig.preset("tiny") if checkpoint is None else _config_of(checkpoint)
    running = closure(config, chosen)
    config.check_linear(linear or "bf16")
    x, flat = (None, False) if input is None else read_input(input, config.dim)
    work = plan_work(prompt, decode, batch, chunk, x)
    kept = 0 if output is None else sum(work.totals) * config.dim * 2 * len(running)
    checking = check if check is not None else checkpoint is None and artifact is None

    with ExitStack() as stack:
        file = None
        if output is not None:
            count = len(running) * (1 if work.equal else len(work.prompts))
            file = stack.enter_context(OutputFile(output, count, overwrite))
        report = stack.enter_context(progress())
        directory, source = checkpoint, str(artifact or checkpoint)
        if ready is not None:
            check_work(config, work)
            opened = ready
        else:
            if directory is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ds41-tvm-")))
                directory, source = _write_tiny(folder, work), "synthetic checkpoint (tiny)"
            opened = open_checkpoint(directory, chosen, work, kept, options, report)
        part = _part(opened, work) if checking else None
        inputs = Inputs(work, config.dim, x, SEED)
        keep = max(work.totals) if file is not None else part.tokens if part is not None else 0
        results = feed(opened.runner, work, inputs, keep, report)
        agreements: dict[int, Agreement] = {}
        arrays: dict[str, Any] = {}
        if part is not None:
            from ds41_tvm.cli.run_check import check as compare

            agreements = compare(opened, work, inputs, part, results, report)
        if file is not None:
            file.write(arrays := _arrays(results, work, flat))
    told = _told(opened, source, work, results, part, agreements)
    told["output"] = None if output is None else str(output)
    told["output_arrays"] = {name: list(array.shape) for name, array in arrays.items()}
    if json:
        print_json(told)
    else:
        _show(told)
    return 0 if told["ok"] else 1


def _config_of(checkpoint: Path) -> Any:
    from ds41_tvm.config import AttentionConfig
    from ds41_tvm.errors import CheckpointError

    if not checkpoint.is_dir():
        raise CheckpointError(f"--checkpoint {checkpoint}: no such directory; expected one with config.json")
    return AttentionConfig.from_file(checkpoint)


def _write_tiny(folder: Path, work: Work) -> Path:
    """A small checkpoint as released ones are laid out, with room for the work."""
    import msgspec

    from ds41_tvm.checkpoint import write_synthetic
    from ds41_tvm.config import AttentionConfig

    config = AttentionConfig.preset("tiny")
    config = msgspec.structs.replace(config, max_seq_len=max(config.max_seq_len, *work.totals))
    return write_synthetic(config, folder / "checkpoint", linear="bf16", seed=SEED)  # too small for blocks of fp8


def _part(opened: Opened, work: Work) -> Part:
    from ds41_tvm.cli.run_check import part_to_check

    program = opened.runner.program
    linears = [linear for layer in program.layers for linear in program.linears(program.config.role(layer)).values()]
    return part_to_check(sum(linear.n * linear.k for linear in linears), work)


def _arrays(results: dict[int, LayerResult], work: Work, flat: bool) -> dict[str, Any]:
    import numpy as np

    if not work.equal:
        return {f"out.{layer}.{i}": out for layer, result in results.items() for i, out in enumerate(result.out)}
    return {f"out.{layer}": result.out[0] if flat else np.stack(result.out) for layer, result in results.items()}


def _told(
    opened: Opened,
    source: str,
    work: Work,
    results: dict[int, LayerResult],
    part: Part | None,
    agreements: dict[int, Agreement],
) -> dict[str, Any]:
    """Everything that is reported, as ``--json`` prints it; times in seconds, sizes in bytes."""
    runner, program = opened.runner, opened.runner.program
    layers = []
    for layer, result in results.items():
        role, seconds = runner.config.role(layer), result.decode_seconds
        entry: dict[str, Any] = {
            "layer": layer,
            "role": role.kind,
            "ratio": role.ratio,
            "tokens": sum(work.totals),
            "prefill_seconds": sum(result.prefill),
            "prefill_tokens_per_second": sum(work.prompts) / sum(result.prefill),
            "decode_seconds_per_step": seconds,
            "decode_seconds_per_token": None if seconds is None else seconds / len(work.prompts),
            "weight_bytes": runner.weight_bytes(layer),
            "decode_weight_bytes_per_second": None if seconds is None else runner.weight_bytes(layer) / seconds,
            "state_bytes_per_sequence": result.state_bytes,
        }
        if part is not None:
            a = agreements[layer]
            entry["check"] = {
                "ok": a.ok, "rows": a.rows, "selections": a.selections, "selections_that_differ": a.differ,
                "of_these_by_rounding": a.near, "error": a.error if a.error < float("inf") else "infinite",
                "limit": a.limit,
            }  # fmt: skip
        layers.append(entry)
    return {
        "ok": all(a.ok for a in agreements.values()),
        "source": source,
        "config": runner.config.digest(),
        "target": program.target.name,
        "linear": opened.linear,
        "ties": program.ties,
        "keys": opened.keys,
        "threads": runner.threads,
        "prompts": list(work.prompts),
        "decode": work.decode,
        "chunk": work.chunk,
        "build_seconds": opened.build_seconds,
        "checked": None if part is None else {"tokens_of_each_sequence": part.tokens, "all": part.all},
        "layers": layers,
    }


def _show(told: dict[str, Any]) -> None:
    out = console()
    prompts = told["prompts"]
    lengths = str(prompts[0]) if len(set(prompts)) == 1 else ", ".join(map(str, prompts))
    out.print(
        f"{told['source']}: {len(prompts)} sequence(s), prompt {lengths}, then {told['decode']} single token(s); "
        f"linears {told['linear']}, ties {told['ties']}, keys {told['keys']}"
    )
    out.print(f"{told['target']}, {told['threads']} thread(s); ready after {told['build_seconds']:.1f} s")
    columns = ["layer", "role", "ratio", "tokens", "prefill s", "tokens/s", "decode ms", "GB/s", "state"]
    rows: list[list[object]] = []
    for entry in told["layers"]:
        decode, speed = entry["decode_seconds_per_token"], entry["decode_weight_bytes_per_second"]
        rows.append(
            [
                entry["layer"], entry["role"], entry["ratio"], entry["tokens"], entry["prefill_seconds"],
                round(entry["prefill_tokens_per_second"]), None if decode is None else decode * 1e3,
                None if speed is None else speed / 1e9, byte_size(entry["state_bytes_per_sequence"]),
            ]
        )  # fmt: skip
        if told["checked"]:
            rows[-1] += _agrees(entry["check"])
    if told["checked"]:
        columns += ["differ", "error", "agrees"]
    out.print(table(columns, rows))
    out.print("decode ms: of one token; GB/s: weights read by a step of single tokens; state: cache of one sequence.")
    if told["checked"]:
        out.print("differ: selections other than the reference's; error: of the output, relative (Frobenius).")
    if told["checked"]:
        _show_check(out, told)
    if told["output"]:
        out.print(f"written: {told['output']}: " + _shapes(told["output_arrays"]))


def _agrees(check: dict[str, Any]) -> list[str]:
    """Selections that differ, error, and the verdict."""
    error = check["error"] if isinstance(check["error"], str) else f"{check['error']:.1e}"
    selections = ""
    if check["selections"]:
        selections = f"{check['selections_that_differ']} of {check['selections']}"
    return [selections, error, "yes" if check["ok"] else "NO"]


def _shapes(arrays: dict[str, list[int]]) -> str:
    names = [f"{name} {shape}" for name, shape in arrays.items()]
    return "bf16 bits (uint16), " + ", ".join(names[:3] + (["..."] if len(names) > 3 else []))


def _show_check(out: Any, told: dict[str, Any]) -> None:
    if not told["checked"]["all"]:
        out.print(f"Checked: the first {told['checked']['tokens_of_each_sequence']} tokens of each sequence.")
    wrong = [entry for entry in told["layers"] if not entry["check"]["ok"]]
    for entry in wrong:
        check = entry["check"]
        out.print(
            f"Layer {entry['layer']} does not agree with the reference: {check['selections_that_differ']} selections "
            f"differ, {check['of_these_by_rounding']} of them by rounding; error {check['error']}, expected at most "
            f"{check['limit']:.3g}"
        )
    if wrong:
        return
    swapped = sum(entry["check"]["selections_that_differ"] for entry in told["layers"])
    same = f"{swapped} selection(s) differ by rounding" if swapped else "selections are identical"
    out.print(f"Every layer agrees with the reference; {same}.")
