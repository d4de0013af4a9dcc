"""Calls of NVIDIA's driver, on a stand-in for it; and what is said where there is none.

Kernels are the processor's, so that whole layers run. What a real driver adds is checked by ``gpu_check``.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds41_tvm.compiler.build import compile_program
from ds41_tvm.compiler.objects import compiler
from ds41_tvm.errors import CaptureError, DeviceError, NoCudaRuntime, NoDriver, UnsupportedGpu, UsageError
from ds41_tvm.runtime import cuda_driver, device_cuda, ffi
from ds41_tvm.runtime.device_cuda import CudaDevice
from ds41_tvm.runtime.device_emulated import hidden
from ds41_tvm.runtime.runner import Runner

ABSENT = "libcuda-that-no-machine-has.so.1"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    source = Path(__file__).with_name("cuda_stub.c")
    flags = ["-x", "c", "-std=gnu11", "-shared", "-fPIC", "-w", "-O1"]
    program = compiler().replace("g++", "gcc").replace("clang++", "clang")
    subprocess.run([program, *flags, str(source), "-o", str(out)], check=True)
    return out


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in: `log()` since the last call, `set(major, minor, count, init, alloc)`."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(library))
    monkeypatch.setattr(device_cuda, "load_cuda_runtime", lambda: None)
    cuda_driver.driver.cache_clear()
    loaded = ctypes.CDLL(str(library))
    loaded.stub_log.restype = ctypes.c_char_p
    loaded.stub_set(9, 0, 1, 0, 0)
    loaded.stub_log()
    yield SimpleNamespace(log=lambda: loaded.stub_log().decode(), set=loaded.stub_set)
    loaded.stub_set(9, 0, 1, 0, 0)
    cuda_driver.driver.cache_clear()


class WithKernels(CudaDevice):
    """Runs the processor's kernels on what is host memory here."""

    def bind(self, functions: Any) -> Any:
        def call(function: Any, *arguments: Any) -> None:
            assert all(array.nbytes for array in arguments), "a driver refuses a launch of 0 blocks"
            function(*map(hidden, arguments))

        return {name: functools.partial(call, function) for name, function in functions.items()}


def test_whole_layers(tiny: Any, same: Any, stub: Any) -> None:
    program = tiny.runner.program
    runner = Runner(program, compile_program(program), tiny.weights, device=WithKernels())
    x, (expected, caches) = tiny.inputs(0, 37), tiny.alone(0, 37)
    sequence = runner.new_sequence()
    same.results(tiny.run(runner, sequence, x[:, :30], chunk=7), expected, slice(0, 30))
    given, out = (
        {layer: runner.device.empty((1, runner.config.dim), np.uint16) for layer in runner.layers} for _ in "io"
    )
    for token in range(30, 37):
        for layer, array in given.items():
            runner.device.scatter(array, np.arange(1), x[layer, token, None])
        stub.log()
        step = runner.step([(sequence, 1)], stream=64)
        planned = stub.log()
        assert len(re.findall("upload .* on 64", planned)) == planned.count("upload") == 1, "one upload a step"
        for layer in runner.layers:
            runner.forward(layer, given[layer], step, out=out[layer], stream=64)
        runner.commit(step, stream=64)
        during = stub.log()
        for word in ("alloc", "pinned", "upload", "download", "synchronize", "host waits"):
            assert word not in during, f"{word} in a decode step:\n{during}"
        for layer, array in out.items():
            np.testing.assert_array_equal(runner.device.download(array), expected[layer]["out"][token, None])
    same.caches(tiny.caches(sequence, runner), caches)


def test_streams_wait_for_each_other(stub: Any) -> None:
    device = CudaDevice()
    array = device.zeros((4,), np.uint8)
    stub.log()
    with device.using(64):
        device.fill(array, 1)
        device.fill(array, 2)
    device.fill(array, 3)
    lines = stub.log().splitlines()
    event = lines[0].split()[1]
    assert lines == [
        f"event {event} on 0", f"64 waits for {event}", "fill 4 on 64", "fill 4 on 64",
        f"event {event} on 64", f"0 waits for {event}", "fill 4 on 0",
    ]  # fmt: skip
    device.join(None)
    device.join(1)
    device.join(-1)
    assert stub.log() == ""
    device.join(32)
    assert stub.log().splitlines() == [f"event {event} on 0", f"32 waits for {event}"]


def test_tvm_launches_on_the_stream_in_use(stub: Any) -> None:
    read = ctypes.CDLL(ffi.import_ffi().libinfo.find_libtvm_ffi()).TVMFFIEnvGetStream
    read.restype = ctypes.c_void_p
    device = CudaDevice()
    with device.using(64):
        assert read(2, 0) == 64
        with device.using(32):
            assert read(2, 0) == 32
        assert read(2, 0) == 64
        with device.capture():
            captured = read(2, 0)
            assert captured not in (0, 32, 64, None)
        assert read(2, 0) == 64
    assert not read(2, 0)


def test_graphs(stub: Any) -> None:
    device = CudaDevice()
    a, b = device.upload(np.arange(5, dtype=np.uint8)), device.zeros((5,), np.uint8)
    with device.capture() as made:
        device.copy(b, a)
        for forbidden in (lambda: device.empty((99,), np.int64), lambda: device.download(a), device.synchronize):
            with pytest.raises(CaptureError, match="while a graph was captured"):
                forbidden()
    log = stub.log()
    assert re.search(r"synchronize 0\ncapture on (\d+)\ncopy 5 on \1\ncaptured on \1", log), log
    assert not device.download(b).any(), "a capture ran something"
    with device.using(64):
        device.launch(made[0])
    assert "graph on 64" in stub.log()
    np.testing.assert_array_equal(device.download(b), np.arange(5))
    with pytest.raises(ZeroDivisionError), device.capture():
        _ = 1 / 0
    with device.capture():
        pass  # the one before ended properly
    assert device.seconds(device.timestamp(), device.timestamp()) == 0.0025


def test_page_locked_buffers_are_used_again_when_their_upload_is_done(stub: Any) -> None:
    device = CudaDevice()
    for i in range(9):
        placed = device.place({"a": np.full(100, i)}, {})
        np.testing.assert_array_equal(device.download(placed["a"]), np.full(100, i))
    log = stub.log()
    assert log.count("pinned") == 4
    assert log.count("host waits") == 5
    device.place({"a": np.zeros(10**5)}, {})
    assert stub.log().count("pinned") == 1


def test_levels(stub: Any) -> None:
    device = CudaDevice()
    assert (device.parallel, device.capability, device.memory, device.model) == (4, (9, 0), 1 << 34, "Stub 0")
    for level in ("sm_90", "sm_90a"):
        device.check_level(level, "x")
    for level in ("sm_80", "sm_100", "sm_120", "sm_89"):
        with pytest.raises(UnsupportedGpu, match=rf"art: compiled for {level}; cuda:0 \(Stub 0\) is sm_90"):
            device.check_level(level, "art")
    stub.set(8, 9, 1, 0, 0)
    device = CudaDevice()
    device.check_level("sm_80", "x")
    device.check_level("sm_86", "x")
    with pytest.raises(UnsupportedGpu):
        device.check_level("sm_80a", "x")


def test_what_can_be_wrong_with_a_driver(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="GPU number 1; expected an integer from 0 to 0"):
        CudaDevice(1)
    stub.set(9, 0, 1, 0, 1)
    with pytest.raises(DeviceError, match=r"cuMemAlloc_v2 gave CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaDevice().empty((5,), np.uint8)
    for settings, message in (
        ((9, 0, 0, 0, 0), "sees no GPU"),
        ((9, 0, 1, 999, 0), r"cuInit gives CUDA_ERROR_STUB \(999\)"),
    ):
        stub.set(*settings)
        cuda_driver.driver.cache_clear()
        with pytest.raises(NoDriver, match=message):
            CudaDevice()
    monkeypatch.setattr(cuda_driver, "LIBRARY", ABSENT)
    cuda_driver.driver.cache_clear()
    with pytest.raises(NoDriver, match="this machine has no NVIDIA driver; expected one"):
        CudaDevice()


def test_a_missing_runtime_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ffi, "cuda_runtime_library", lambda: None)
    monkeypatch.setattr(ffi, "CUDA_RUNTIME", "libcudart-that-no-machine-has.so.13")
    ffi.load_cuda_runtime.cache_clear()
    with pytest.raises(NoCudaRuntime, match="pip install nvidia-cuda-runtime"):
        ffi.load_cuda_runtime()
    ffi.load_cuda_runtime.cache_clear()
