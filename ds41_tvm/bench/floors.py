"""The least time of every kernel of an artefact in typical steps, at the rates of a GPU: read without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from ds41_tvm.artifact.manifest import Entry, Manifest
from ds41_tvm.artifact.occupancy import occupancy
from ds41_tvm.bench import work
from ds41_tvm.bench.cases import Case
from ds41_tvm.bench.kernel_work import Call, calls
from ds41_tvm.bench.work import Work
from ds41_tvm.errors import UsageError

CONTEXTS, PROMPT = (1 << 10, 128 << 10), 1 << 10  # tokens


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`read`: bytes a second; `products`: bf16 FLOP a second, of int8 twice as many; `parallel`: multiprocessors.

    The defaults are those of an H200: what it reaches, not what its data sheet says.
    """

    read: float = 4.3e12
    products: float = 790e12
    parallel: int = 132

    @property
    def limits(self) -> dict[str, float]:
        """As `work.floor` takes them."""
        return {"read": self.read, "fma": self.products, "vnni": 2 * self.products}


def floors(manifest: Manifest, rates: Rates) -> dict[str, Any]:
    """JSON-ready: by case, every kernel that the artefact's layers call, and every layer.

    A kernel's ``seconds`` is the sum of the floors of its calls in all layers; a layer's that of its kernels; ``least``
    is the floor of the layer in one piece, if rows between kernels were never in memory. Contexts are cut to the
    configuration's. Raises UsageError for an artefact of the processor.
    """
    if manifest.target.kind != "cuda":
        raise UsageError(f"the artefact is compiled for {manifest.target.name}; floors are of artefacts for cuda:sm_NN")
    return {
        "rates": msgspec.structs.asdict(rates),
        "cases": [_case(manifest, rates, case) for case in _cases(manifest)],
    }


def _cases(manifest: Manifest) -> Iterator[Case]:
    most = manifest.config.max_seq_len
    for context in sorted({min(context, most) for context in CONTEXTS}):
        yield Case("decode", context=context)
    yield Case("prefill", tokens=min(PROMPT, most), context=min(PROMPT, most), chunk=min(PROMPT, most))


def _case(manifest: Manifest, rates: Rates, case: Case) -> dict[str, Any]:
    program, start = manifest.program(), case.context - case.tokens
    by_kernel: dict[str, list[Call]] = defaultdict(list)
    layers = []
    for layer in program.layers:
        made = list(calls(program, layer, start, case.tokens, rates.parallel))
        for call in made:
            by_kernel[call.kernel].append(call)
        role = program.config.role(layer)
        whole = work.layer(program.config, role, program.linear, [(start, case.tokens)])
        layers.append(
            {
                "layer": layer,
                "kind": role.kind,
                "ratio": role.ratio,
                **_sum(made, rates),
                "least": work.floor(whole, rates.limits).seconds,
            }
        )
    kernels = [
        {"name": entry.name, "label": label(entry), **_code(entry, manifest.target.level), **_sum(found, rates)}
        for entry in manifest.kernels
        if (found := by_kernel.get(entry.name))
    ]
    kernels.sort(key=lambda row: -row["seconds"])
    return {"case": case.name, "tokens": case.tokens, "context": case.context, "kernels": kernels, "layers": layers}


def _sum(made: list[Call], rates: Rates) -> dict[str, Any]:
    total = sum((call.work for call in made), Work())
    return {
        "calls": len(made),
        "bytes": total.bytes,
        "flops": total.flops,
        "dots": total.dots,
        "seconds": sum(work.floor(call.work, rates.limits).seconds for call in made),
        "limit": work.floor(total, rates.limits).limit,
    }


def _code(entry: Entry, level: str) -> dict[str, Any]:
    """Of the kernel's functions on the GPU, the largest numbers and the least occupancy."""
    filled = [occupancy(code, level)["occupancy"] for code in entry.gpu]
    return {
        "registers": max((code.registers for code in entry.gpu), default=0),
        "shared": max((code.shared_bytes + code.dynamic_shared_bytes for code in entry.gpu), default=0),
        "occupancy": min((part for part in filled if part is not None), default=None),
    }


_SHOWN = ("kind", "heads", "dim", "k", "size", "candidate_block", "split", "inverse", "ratio")


def label(entry: Entry) -> str:
    """A kernel's name for people: the sizes that tell it from others."""
    p = dict(entry.params)
    if entry.op == "linear":
        groups = f" x {p['groups']}" if p["groups"] != 1 else ""
        rows = "1 row" if p["rows"] == 1 else f"{p['rows']} rows"
        return f"linear {p['n']} x {p['k']}{groups} {p['weight']} to {p['out']} by {p['total']}, {rows}"
    if entry.op == "sparse_attention":
        return f"sparse_attention {p['heads']} x {p['dim']} k={p['k']} split={p['split']}"
    return " ".join([entry.op, *(f"{name}={p[name]}" for name in _SHOWN if name in p)])
