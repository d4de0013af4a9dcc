"""Measuring on a fleet: a tracker and two servers on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds41_tvm.errors import TuneError
from ds41_tvm.tune import records
from ds41_tvm.tune.measure import Fleet
from ds41_tvm.tune.session import Options, tune

SOURCE = str(Path(__file__).parents[2])
KEY = "alike"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """A tracker with two servers."""
    pytest.importorskip("tornado")
    path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    port = free_port()
    tracker = ["tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
    server = ["ds41_tvm.tune.server", "--host", "127.0.0.1", "--tracker", f"127.0.0.1:{port}", "--key", KEY]
    commands = [tracker, *([*server, "--port", str(free_port())] for _ in range(2))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip
    found = Fleet("127.0.0.1", port, KEY)
    try:
        end = time.monotonic() + 90
        while True:
            try:
                if found.servers() == 2:
                    break
            except TuneError:
                assert time.monotonic() < end
            time.sleep(0.2)
        yield found
    finally:
        for process in processes:
            os.killpg(process.pid, 9)  # a server has a process of its own for every session
            process.wait()


@pytest.mark.slow
def test_two_servers(fleet: Fleet, program: Any, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="no free server with the key 'other'"):
        Fleet(fleet.host, fleet.port, "other").servers()
    options = Options(
        trials=5, kernels=("pack_rows*",), out=tmp_path / "out", work=tmp_path / "work", fleet=fleet, threads=1
    )
    outcome = tune(program(), options)
    assert outcome.refused == []
    (made,) = outcome.saved
    assert made.trials == 5
    assert made.checked
    assert records.read(tmp_path / "out" / "x86-64-v3").records == {made.kernel: made}
    assert '"fleet": "rpc:alike"' in (tmp_path / "out" / "x86-64-v3" / "environment.json").read_text()
