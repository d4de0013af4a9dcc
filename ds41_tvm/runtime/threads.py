"""The thread pool of TVM's runtime: as many workers as processors, of which a runner may use fewer."""

from __future__ import annotations

import os
import threading

from ds41_tvm.cpu_features import available_threads
from ds41_tvm.errors import AfterFork, UsageError
from ds41_tvm.runtime.ffi import load_runtime

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
    """Let kernels called from this Python thread run on `threads` threads.

    Raises AfterFork in a forked child whose parent ran kernels from this thread: a fork copies the pool but not its
    workers, and the first kernel would wait for them for ever.
    """
    process = os.getpid()
    if getattr(_current, "process", process) != process:
        raise AfterFork(
            "this process was forked after kernels had run in this thread; the workers of TVM's thread pool stayed "
            "with the parent: fork first and load in the child, start processes with the method 'spawn', or run "
            "kernels in a new threading.Thread of the child"
        )
    if getattr(_current, "threads", None) == threads:
        return
    # Read by TVM once, when this thread's pool starts. Its own default is half of the processors, each worker bound to
    # one, so that two processes would share the same few.
    os.environ.setdefault("TVM_NUM_THREADS", str(available_threads()))
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    all_cores = 1  # TVM's AffinityMode kBig
    load_runtime().get_global_func("runtime.config_threadpool")(all_cores, threads)
    _current.threads, _current.process = threads, process
