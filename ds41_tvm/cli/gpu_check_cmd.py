"""``ds41-tvm gpu-check``: packs the check that one command runs on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ds41_tvm.cli.output import byte_size, print_json


def gpu_check(
    *,
    target: str,
    out: Path,
    golden: Path = Path("tests/golden"),
    config: str = "flash",
    prompt: int = 1024,
    wheels: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Compile and pack a check of the kernels: recorded cases, invariance, times; at most 64 MiB, no weights.

    On the machine with the GPU it needs Python, NumPy and apache-tvm-ffi: tools/gpu_check.sh BUNDLE, or unpack it and
    run gpu_check.py. The report is one Markdown file.

    Parameters
    ----------
    target
        What to compile for: cuda:sm_90 and so on; cpu rehearses it.
    out
        Tar file to write.
    golden
        Folder of recorded cases.
    config
        What is measured: a preset, or a config.json.
    prompt
        Tokens of the measured prompt.
    wheels
        Add the wheels of NumPy and apache-tvm-ffi.
    json
        Print the result as JSON.
    """
    from ds41_tvm.config import AttentionConfig
    from ds41_tvm.gpu_check.pack import RELEASED_LAYERS, pack

    sizes = AttentionConfig.from_file(config) if Path(config).is_file() else AttentionConfig.preset(config)
    layers = RELEASED_LAYERS if sizes.n_layers > max(RELEASED_LAYERS) else tuple(range(sizes.n_layers))
    copied = (1 << 30) if target.startswith("cuda") else 1 << 26
    size = pack(out, target, golden, sizes, layers, prompt, copy_bytes=copied, wheels=wheels)
    if json:
        print_json({"path": str(out), "bytes": size, "target": target})
    else:
        print(f"{out}: {byte_size(size)}; on the machine with the GPU: tools/gpu_check.sh {out}")
    return 0
