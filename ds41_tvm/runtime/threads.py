"""The thread pool of TVM's runtime: as many workers as processors, of which a runner may use fewer."""

from __future__ import annotations

import os
import threading

import tvm_ffi

from ds41_tvm.cpu_features import available_threads
from ds41_tvm.errors import UsageError

_current = threading.local()  # the pool belongs to the calling thread


def check_threads(threads: int | None) -> int:
    """The number of threads to use: `threads`, or all processors. Raises UsageError if there are not that many."""
    most = available_threads()
    if threads is None:
        return most
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise UsageError(
            f"threads is {threads!r}; expected an integer from 1 to {most}, the processors of this process"
        )
    return threads


def use_threads(threads: int) -> None:
    """Let kernels called from this Python thread run on `threads` threads."""
    if getattr(_current, "threads", None) == threads:
        return
    # Read by TVM once, when this thread's pool starts. Its own default is half of the processors, each worker bound to
    # one, so that two processes would share the same few.
    os.environ.setdefault("TVM_NUM_THREADS", str(available_threads()))
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    all_cores = 1  # TVM's AffinityMode kBig
    tvm_ffi.get_global_func("runtime.config_threadpool")(all_cores, threads)
    _current.threads = threads
