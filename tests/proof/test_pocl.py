"""The name of a processor that PoCL's compiler does not know: written over in the record, and nowhere else."""

import ctypes
from types import SimpleNamespace

import pytest

from ds41_tvm.proof.pocl import RECORD, name_processor
from ds41_tvm.target import Target, parse_target

VERSION = "OpenCL 3.0 PoCL HSTR: pthread-x86_64-unknown-linux-gnu-"


class _Record:
    """Memory such as a device's record: pointers to its name, to another string, and words that point nowhere."""

    def __init__(self, name: bytes) -> None:
        self.name, self.other = ctypes.create_string_buffer(name, 8), ctypes.create_string_buffer(b"general")
        self.words = (ctypes.c_uint64 * (RECORD // 8))()
        self.words[3], self.words[80] = ctypes.addressof(self.other), ctypes.addressof(self.name)
        self.words[4], self.words[5] = 16, 2**64 - 1

    def device(self, version: str) -> SimpleNamespace:
        return SimpleNamespace(version=version, int_ptr=ctypes.addressof(self.words))


@pytest.mark.parametrize(
    ("target", "name"),
    [("cpu:x86-64-v4", b"skx"), ("cpu:x86-64-v3", b"haswell"), ("cpu:x86-64-v2", b"x86-64")],
)
def test_an_unknown_processor_gets_the_name_of_its_level(target: str, name: bytes) -> None:
    record = _Record(b"generic")
    name_processor(record.device(VERSION + "generic"), parse_target(target))
    assert record.name.value == name
    assert record.other.value == b"general"


@pytest.mark.parametrize("version", [VERSION + "znver3", "OpenCL 3.0 another", "OpenCL 3.0 PoCL aarch64-generic"])
def test_other_devices_stay_as_they_are(version: str) -> None:
    record = _Record(b"generic")
    name_processor(record.device(version), Target("cpu", "x86-64-v4"))
    assert record.name.value == b"generic"
