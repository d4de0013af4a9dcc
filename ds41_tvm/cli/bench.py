"""``ds41-tvm bench``: layers and kernels beside other libraries and the machine's limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ds41_tvm.cli.bench_tables import change_table, limit_lines, profile_tables, row_tables
from ds41_tvm.cli.limits import check_memory, check_target
from ds41_tvm.cli.options import load_config, parse_layers
from ds41_tvm.cli.output import console
from ds41_tvm.cli.progress import progress
from ds41_tvm.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ds41_tvm.config import AttentionConfig, LinearMode

PREFILL, CONTEXT, BATCH = "128,1K,4K", "1K,4K,32K,128K,1M", "1,4,16"


def bench(
    *,
    config: str = "flash",
    layers: str | None = None,
    what: str = "all",
    prefill: str | None = None,
    context: str | None = None,
    batch: str | None = None,
    linear: str | None = None,
    against: str = "torch",
    isa: str = "host",
    target: str = "cpu",
    threads: int | None = None,
    rounds: int | None = None,
    time: str | None = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
    profile: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    plot: Path | None = None,
    baseline: Path | None = None,
    factor: float | None = None,
) -> int:
    """Measure layers and kernels in turn with other libraries and with what the machine can do at most.

    Exit code 1 if a ratio is worse than in the baseline by more than the factor.

    Parameters
    ----------
    config:
        A preset (flash, tiny) or a config.json.
    layers:
        Layer numbers with their sources, or all; by default one layer of every kind.
    what:
        Some of prefill, decode, batch, topk, scores, attention, launch; or all.
    prefill:
        Lengths of prompts, 128,1K,4K by default; K = 1,024. Above 1K they are fed 512 tokens a step.
    context:
        Lengths at which single tokens are decoded, 1K,4K,32K,128K,1M by default. Caches are filled directly, no prompt
        is run.
    batch:
        Numbers of sequences decoded together at 1K tokens each, 1,4,16 by default.
    linear:
        bf16, fp8 or both; by default both, where the sizes allow fp8. The peers' products are in bf16 (torch-f32: in
        f32) beside either.
    against:
        Peers by name, separated by commas: torch (as the official code), torch-mv (a faster form of it, for single
        tokens), torch-f32 (weights widened to f32), onnxruntime (the exported layers); or none.
    isa:
        Instructions that peers may use: host, avx512 (no bf16 instructions, no AMX) or avx2.
    target:
        What to compile for, such as cpu, cpu:x86-64-v4+vnni or cpu:x86-64-v3.
    threads:
        Threads for all; all processors by default.
    rounds:
        Turns of each case, 5 by default.
    time:
        End after about so long (90, 10m): fewer turns, then fewer cases, which are named.
    quick:
        Short sizes and one turn, unless they are given.
    profile:
        Instead of measuring, show what each kernel takes in a decode step at every context.
    json:
        File for the result.
    plot:
        Picture of the result (extra plot).
    baseline:
        An older result: compare ratios, never times.
    factor:
        How much worse a ratio may be than in the baseline; 1.3 by default.
    """
    if "numpy" not in sys.modules:  # its idle workers would go on spinning while ours are measured
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ds41_tvm.bench.cases import Case, cases, parse_time, parse_what
    from ds41_tvm.bench.peer import ISA, peer_names
    from ds41_tvm.bench.plot import check_plot
    from ds41_tvm.bench.plot import plot as draw
    from ds41_tvm.bench.result import FACTOR, changes, read_result, regressions, write_result
    from ds41_tvm.bench.run import Options, check_installed, measure, memory_needed, profiles, typical_layers
    from ds41_tvm.config import closure

    turns = rounds if rounds is not None else (1 if quick else 5)
    if turns < 1:
        raise UsageError(f"--rounds {rounds}: expected at least 1")
    if isa not in ISA:
        raise UsageError(f"--isa {isa!r}: expected one of {', '.join(ISA)}")
    if factor is not None and (factor < 1 or baseline is None):
        raise UsageError(f"--factor {factor}: expected at least 1, together with --baseline FILE")
    if profile and (json or plot or baseline):
        raise UsageError("--profile measures nothing to keep; leave out --json, --plot and --baseline")
    kinds, seconds, peers = parse_what(what), parse_time(time), peer_names(against)
    sizes = load_config(config)
    contexts = _sizes(sizes, "--context", context, "1K,4K" if quick else CONTEXT)
    if profile:
        planned = tuple(Case("decode", context=n) for n in contexts)
    else:
        prompts = _sizes(sizes, "--prefill", prefill, "128" if quick else PREFILL)
        together = _sizes(sizes, "--batch", batch, "1,4" if quick else BATCH, limited=False)
        planned = tuple(cases(kinds, prompts, contexts, together))
    chosen = parse_layers(layers) if layers is not None else typical_layers(sizes)
    kind = check_target(target)
    if kind.kind != "cpu":
        raise UsageError(
            f"--target {target}: limits and peers are measured on the processor; expected cpu or cpu:LEVEL"
        )
    options = Options(
        config=sizes,
        layers=closure(sizes, chosen),
        cases=planned,
        target=kind,
        linear=_modes(sizes, linear),
        peers=() if profile else peers,
        isa=isa,
        threads=threads,
        rounds=turns,
        seconds=seconds,
    )
    before = read_result(baseline) if baseline is not None else None
    if plot is not None:
        check_plot()
    check_installed(options.peers)
    check_memory(memory_needed(options), f"bench of {len(options.layers)} layers")

    out = console()
    if profile:
        with progress() as report:
            found = profiles(options, turns, report)
        for made in profile_tables(found):
            out.print(made)
        return 0
    with progress() as report:
        result = measure(options, report)
    for made in row_tables(result):
        out.print(made)
    for line in limit_lines(result):
        out.print(line)
    if json is not None:
        write_result(result, json)
    if plot is not None:
        draw(result, plot)
    if before is None:
        return 0
    compared = changes(result, before)
    worse = regressions(compared, factor or FACTOR)
    out.print(change_table(compared, worse, factor or FACTOR))
    for change in worse:
        print(
            f"ds41-tvm bench: {change.row}: {change.what} was {change.before:.3g} and is {change.now:.3g}, worse by "
            f"more than the factor {factor or FACTOR:g}",
            file=sys.stderr,
        )
    return 1 if worse else 0


def _modes(config: AttentionConfig, given: str | None) -> tuple[LinearMode, ...]:
    if given is not None:
        return tuple(dict.fromkeys(config.check_linear(mode.strip()) for mode in given.split(",")))
    try:
        return "bf16", config.check_linear("fp8")
    except ConfigError:
        return ("bf16",)


def _sizes(
    config: AttentionConfig, option: str, given: str | None, default: str, limited: bool = True
) -> tuple[int, ...]:
    """The sizes asked for; or those of the default that fit the configuration, at least its longest."""
    from ds41_tvm.bench.cases import parse_sizes

    if not limited:
        return parse_sizes(option, given or default)
    most = config.max_seq_len
    if given is not None:
        return parse_sizes(option, given, most)
    return tuple(n for n in parse_sizes(option, default) if n <= most) or (most // 2,)
