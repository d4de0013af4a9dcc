"""An RPC server for a fleet: TVM's own, which asks for tile registers first, as kernels for AMX need them.

``python -m ds41_tvm.tune.server --tracker HOST:PORT --key KEY``, and whatever else ``tvm.exec.rpc_server`` takes. It
runs native code for whoever reaches it: start it in a network that you trust.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys

from ds41_tvm.cpu_features import available_threads, request_tiles


def main() -> None:
    """Run the server until it is stopped."""
    os.environ.setdefault("TVM_NUM_THREADS", str(available_threads()))
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    request_tiles()
    arguments = sys.argv[1:]
    if not any(a.startswith("--port-end") for a in arguments):
        # TVM's default for the end of the range lies below most choices of its beginning, and no port is found then.
        given = next((b for a, b in itertools.pairwise(arguments) if a == "--port"), "9090")
        arguments += ["--port-end", str(int(given) + 100)]
    sys.argv = ["rpc_server", *arguments]
    runpy.run_module("tvm.exec.rpc_server", run_name="__main__")


if __name__ == "__main__":
    main()
