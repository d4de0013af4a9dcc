"""Declared requirements and whether versions fit them."""

from importlib import metadata

import pytest

from ds41_tvm.cli import packages
from ds41_tvm.cli.packages import Requirement, allows, parse_requirement, requirements
from ds41_tvm.errors import UsageError


@pytest.mark.parametrize(
    ("line", "name", "wanted", "extra"),
    [
        ("numpy>=2.0", "numpy", ">=2.0", None),
        ("apache-tvm-ffi==0.1.14.post1", "apache-tvm-ffi", "==0.1.14.post1", None),
        ("cyclopts<6,>=5", "cyclopts", "<6,>=5", None),
        ('xgboost>=3; extra == "tune"', "xgboost", ">=3", "tune"),
        ("pyopencl[pocl]>=2025.1; extra == 'gpu-proof'", "pyopencl", ">=2025.1", "gpu-proof"),
        ("rich", "rich", "", None),
    ],
)
def test_parse(line, name, wanted, extra):
    assert parse_requirement(line) == Requirement(name, wanted, extra)


def test_parse_refuses_what_it_does_not_know():
    with pytest.raises(UsageError, match="not understood"):
        parse_requirement("@@@")
    with pytest.raises(UsageError, match="not understood"):
        allows("~=2.0", "2.0")


@pytest.mark.parametrize(
    ("wanted", "version", "fits"),
    [
        ("", "0.1", True),
        ("==0.1.14.post1", "0.1.14.post1", True),
        ("==0.1.14.post1", "0.1.14.post0", False),
        ("==0.1.14.post1", "0.1.15.post2", False),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13", True),
        (">=2.0", "2.0", True),
        (">=2.0", "1.26.4", False),
        (">=2.9", "2.10.1", True),
        (">=5,<6", "5.5.2", True),
        (">=5,<6", "6.0", False),
        (">=5,<6", "4.9", False),
    ],
)
def test_allows(wanted, version, fits):
    assert allows(wanted, version) is fits


def test_the_pinned_pair_is_declared_and_the_extras_too():
    declared = {(need.extra, need.name): need for need in requirements()}
    assert declared[None, "apache-tvm"].wanted == "==0.27.0.post1"
    assert declared[None, "apache-tvm-ffi"].wanted == "==0.1.14.post1"
    assert {extra for extra, _ in declared} == {
        None, "tune", "xgb", "onnx", "plot", "torch", "gpu-proof", "cuda", "dev",
    }  # fmt: skip


def test_from_the_source_folder_it_is_the_same(monkeypatch):
    installed = set(requirements())

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "requires", absent)
    plain = {(need.extra, need.name, frozenset(filter(None, need.wanted.split(",")))) for need in requirements()}
    assert plain == {(need.extra, need.name, frozenset(filter(None, need.wanted.split(",")))) for need in installed}


def test_an_absent_package_does_not_fit():
    need = Requirement("surely-not-a-package-of-anybody", "", None)
    assert need.version is None
    assert not need.fits
