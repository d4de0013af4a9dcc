"""``ds41-tvm inspect``: shows what is in an artefact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ds41_tvm.cli.output import byte_size, console, print_json, table
from ds41_tvm.errors import UsageError


def inspect(
    path: Path,
    /,
    *,
    verify: Annotated[bool, Parameter(negative="")] = False,
    expect: str | None = None,
    ir: str | None = None,
    asm: str | None = None,
    floors: Annotated[bool, Parameter(negative="")] = False,
    read_tbs: float | None = None,
    bf16_tflops: float | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Show what an artefact holds, without running anything in it.

    Parameters
    ----------
    path
        Folder of the artefact.
    verify
        Hash every file whole; weights of more than 64 MiB are hashed nowhere else.
    expect
        Digest that the manifest must have, sha256:...
    ir
        Print the scheduled IR of this kernel: its name, or a part that only one has.
    asm
        Print the machine code of this kernel; needs objdump.
    floors
        Print what each kernel of an artefact for GPUs moves and computes in a decode step and in a prompt, and the
        least time that takes; with --json, beside everything else.
    read_tbs
        Memory rate for --floors in TB/s (default: 4.3, of an H200).
    bf16_tflops
        Rate of bf16 products for --floors in TFLOP/s (default: 790, of an H200).
    json
        Print everything as JSON.
    """
    if sum((ir is not None, asm is not None, json or floors)) > 1:
        raise UsageError("expected at most one of --ir, --asm, and --floors or --json")
    for value, option in ((read_tbs, "--read-tbs"), (bf16_tflops, "--bf16-tflops")):
        if value is not None and (not floors or not value > 0):
            raise UsageError(f"{option} {value:g}: expected a positive rate, with --floors")
    from ds41_tvm.artifact.describe import describe, ir_text
    from ds41_tvm.artifact.disassemble import assembly

    found = describe(path, expect, verify)
    if ir is not None:
        print(ir_text(path, ir))
    elif asm is not None:
        print(assembly(path, asm))
    elif floors:
        from ds41_tvm.artifact.describe import read_manifest
        from ds41_tvm.bench.floors import Rates
        from ds41_tvm.bench.floors import floors as find
        from ds41_tvm.cli.inspect_floors import show_floors

        usual = Rates()
        rates = Rates(
            read=usual.read if read_tbs is None else read_tbs * 1e12,
            products=usual.products if bf16_tflops is None else bf16_tflops * 1e12,
        )
        least = find(read_manifest(path, expect)[0], rates)
        if json:
            print_json({**found, "floors": least})
        else:
            show_floors(least)
    elif json:
        print_json(found)
    else:
        _show(found)
    return 0


def _show(found: dict[str, Any]) -> None:
    out, cache = console(), found["cache"]
    versions = found["versions"]
    rows: list[tuple[object, ...]] = [
        ("manifest", found["digest"]),
        ("verified", found["verified"]),
        ("configuration", found["config_digest"]),
        ("target", found["target"]),
        ("needs", " ".join(found["requires"]) or "nothing beyond the base instruction set"),
        ("linears, ties", f"{found['linear']}, {found['ties']}"),
        ("pooling, wo_a", f"weights in {found['pooling']}, {found['grouped']}"),
        ("cache blocks", f"{found['block_rows']} positions; {found['draft']} tokens can be taken back"),
        ("made by", f"ds41-tvm {versions['ds41_tvm']}, TVM {versions['tvm']}, LLVM {versions['llvm']}"),
        ("runs on", f"TVM runtime {versions['tvm']}, tvm-ffi {versions['tvm_ffi']} (ABI {versions['tvm_ffi_abi']})"),
        ("cache, sequence", f"{byte_size(cache['fixed'])} and {cache['per_token']:g} B a token"),
        *((f"  {int(n) >> 10}K tokens", byte_size(size)) for n, size in cache["at"].items()),
    ]
    out.print(table(("artefact", found["path"]), rows))
    columns = ("layer", "kind", "ratio", "latents of", "selection of", "candidates of", "weights")
    rows = [
        (
            *(x[key] for key in ("layer", "kind", "ratio", "latents_of", "selection_of", "candidates_of")),
            "none" if x["weight_bytes"] is None else byte_size(x["weight_bytes"]),
        )
        for x in found["layers"]
    ]
    out.print(table(columns, rows))
    rows = [
        (
            k["op"],
            " ".join(f"{name}={value}" for name, value in k["params"].items()),
            k["record"] or (f"{k['schedule']} (fallback)" if k["fallback"] else k["schedule"]),
            k["code_bytes"],
        )
        for k in found["kernels"]
    ]
    out.print(table(("kernel", "sizes", "schedule", "code bytes"), rows))
    rows = [
        (
            code["name"], code["registers"], f"{code['spill_stores']} / {code['spill_loads']}",
            code["shared_bytes"] + code["dynamic_shared_bytes"], code["threads"] or "varies",
            "unknown" if code["blocks"] is None else code["blocks"],
            "unknown" if code["occupancy"] is None else f"{code['occupancy']:.0%}",
        )
        for k in found["kernels"] for code in k["gpu"]
    ]  # fmt: skip
    if rows:
        names = (
            "function on the GPU",
            "registers",
            "spilled B (st / ld)",
            "shared B",
            "threads",
            "blocks",
            "occupancy",
        )
        out.print(table(names, rows))
    rows = [(name, file["size"], file["sha256"][7:23] + "…") for name, file in found["files"].items()]
    out.print(table(("file", "bytes", "sha256"), rows))
