"""A tar file that runs an artefact on a machine with Python, NumPy and apache-tvm-ffi, or with `wheels` only Python.

    NAME/run.py           python run.py: loads, runs once, prints times and a digest of the outputs
    NAME/artifact/        the artefact
    NAME/ds41_tvm/        the runtime part of this package, with TVM's runtime library in ``lib``
    NAME/msgspec/         the one dependency beside NumPy and tvm-ffi, as installed here
    NAME/wheels/          NumPy, apache-tvm-ffi and what they need (only with `wheels`)

For an artefact for CUDA, ``lib`` also holds TVM's runtime for CUDA and NVIDIA's ``libcudart`` (which its licence allows
to pass on with an application); the machine brings the driver.

msgspec is compiled for one version of Python on one kind of machine, as tvm-ffi is; so is the bundle, and run.py says
so where it is started by another. Equal inputs give equal bytes, except for wheels that the registry has changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.describe import read_manifest
from ds41_tvm.artifact.files import check_files
from ds41_tvm.errors import BundleError
from ds41_tvm.runtime.ffi import CUDA_LIBRARY, CUDA_RUNTIME, LIBRARY, abi, cuda_runtime_library, runtime_library

# Top-level modules and folders of the package that running needs; none of them imports the compiler.
MODULES = (
    "__init__", "config", "config_checks", "config_names", "cpu_features", "errors", "packed_file", "packing",
    "program", "strict_json", "target",
)  # fmt: skip
FOLDERS = ("artifact", "checkpoint", "numerics", "reference", "runtime")
NOT_NEEDED = {"tir.py"}  # of numerics: for kernels
WHEELS = ("numpy", "apache-tvm-ffi", "typing-extensions")

SCRIPT = '''"""Run the artefact of this bundle once, and show how to use it.

In a program:

    import sys
    sys.path.insert(0, "/path/to/this/folder")
    import ds41_tvm
    runner = ds41_tvm.load("/path/to/this/folder/artifact")
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MADE_FOR = {made_for!r}

if sys.implementation.cache_tag != MADE_FOR:
    sys.exit(f"this bundle holds extension modules for {{MADE_FOR}}; this Python is {{sys.implementation.cache_tag}}")
sys.path.insert(0, HERE)
try:
    import numpy
    import importlib.util
    if importlib.util.find_spec("tvm_ffi") is None:
        raise ImportError("apache-tvm-ffi is not installed")
except ImportError as error:
    wheels = os.path.join(HERE, "wheels")
    source = f"--no-index --find-links {{wheels}} " if os.path.isdir(wheels) else ""
    sys.exit(f"{{error}}; install it: {{sys.executable}} -m pip install {{source}}{needs}")

{start}
'''
_SELFTEST = """from ds41_tvm.artifact.selftest import main

sys.exit(main(path=os.path.join(HERE, "artifact")))"""
Entry = tuple[str, Path | bytes]  # name in the tar file, what it holds


def bundle(path: str | os.PathLike[str], out: str | os.PathLike[str], wheels: bool = False) -> int:
    """Pack the artefact at `path` into `out`, whose stem names the folder inside. Returns its size in bytes.

    The artefact is verified whole first. `wheels`: add the wheels that pip downloads for this Python. Raises the errors
    of `load` that damage causes, and BundleError.
    """
    source, target = Path(path), Path(out)
    manifest, _ = read_manifest(source)
    check_files(source, manifest, "full")
    check_library(manifest, source)
    root = target.name.removesuffix(".tar")

    def entries() -> Iterator[Entry]:
        for name in [schema.FILE, *manifest.files]:
            yield f"artifact/{name}", source / name
        yield "run.py", script(manifest.versions.tvm_ffi, _SELFTEST)
        yield from runner_entries(manifest.target.kind == "cuda")
        if wheels:
            yield from wheel_entries(manifest.versions.tvm_ffi)

    return write_tar(target, root, entries())


def check_library(manifest: schema.Manifest, source: Path) -> None:
    """Raises BundleError unless the runtime library here is the one that the artefact needs."""
    if manifest.versions.tvm != abi()["tvm"]:
        raise BundleError(
            f"{source}: needs {LIBRARY} of TVM {manifest.versions.tvm}; here is {abi()['tvm']}; install that version"
        )


def write_tar(target: Path, root: str, entries: Iterable[Entry]) -> int:
    """A tar file of the entries in a folder `root`, complete or not at all. Returns its size.

    Raises BundleError where something other than a file is in its place: a device would be replaced.
    """
    if target.exists() and not target.is_file():
        what = "a directory" if target.is_dir() else "no regular file"
        raise BundleError(f"{target} is {what}; expected the name of a file to write")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in entries:
                _add(tar, f"{root}/{name}", content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target.stat().st_size


def script(tvm_ffi: str, start: str) -> bytes:
    """A program that checks what it needs, finds the bundle's package, and goes on with `start`."""
    needs = f"numpy apache-tvm-ffi=={tvm_ffi}"
    return SCRIPT.format(made_for=sys.implementation.cache_tag, needs=needs, start=start).encode()


def runner_entries(cuda: bool, folders: Iterable[str] = FOLDERS) -> Iterator[Entry]:
    """The package's runtime part, the libraries it loads, msgspec, and their licences."""
    package = Path(__file__).resolve().parents[1]
    for module in MODULES:
        yield f"ds41_tvm/{module}.py", package / f"{module}.py"
    for folder in folders:
        for path in sorted((package / folder).glob("*.py")):
            if path.name not in NOT_NEEDED:
                yield f"ds41_tvm/{folder}/{path.name}", path
    library, version = runtime_library()
    yield f"ds41_tvm/lib/{LIBRARY}", library
    yield "ds41_tvm/lib/VERSION", version.encode()
    if cuda:
        yield f"ds41_tvm/lib/{CUDA_LIBRARY}", library.with_name(CUDA_LIBRARY)
        found = cuda_runtime_library()
        if found is None:
            raise BundleError(f"{CUDA_RUNTIME} was not found; expected CUDA 13's: pip install nvidia-cuda-runtime")
        yield f"ds41_tvm/lib/{CUDA_RUNTIME}", found
    spec = importlib.util.find_spec("msgspec")
    for place in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(place).iterdir()):
            if path.suffix == ".py" or path.name.endswith(sysconfig.get_config_var("EXT_SUFFIX") or ".so"):
                yield f"msgspec/{path.name}", path
    for name in ("msgspec", "apache-tvm"):
        yield from _licences(name)


def wheel_entries(tvm_ffi: str) -> Iterator[Entry]:
    """The wheels that pip downloads for this Python."""
    with tempfile.TemporaryDirectory(prefix="ds41-tvm-") as folder:
        for wheel in _download(tvm_ffi, Path(folder)):
            yield f"wheels/{wheel.name}", wheel


def _licences(distribution: str) -> Iterator[tuple[str, Path]]:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in sorted(files, key=str):
        if ".dist-info" in str(file) and file.name.upper().startswith(("LICENSE", "NOTICE", "COPYING")):
            yield f"licenses/{distribution}/{file.name}", Path(str(file.locate()))


def _download(tvm_ffi: str, folder: Path) -> list[Path]:
    wanted = [f"{name}=={tvm_ffi if name == 'apache-tvm-ffi' else importlib.metadata.version(name)}" for name in WHEELS]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    done = subprocess.run(
        [*pip, *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip()[-500:]
        raise BundleError(f"pip could not download {', '.join(wanted)}: {said}; try without --wheels")
    return sorted(folder.glob("*.whl"))


def _add(tar: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    """One file, with nothing in it that differs from run to run."""
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    if isinstance(content, bytes):
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
        return
    try:
        with open(content, "rb") as file:
            entry.size = os.fstat(file.fileno()).st_size
            tar.addfile(entry, file)
    except OSError as error:
        raise BundleError(f"{content}: cannot be read ({error.strerror}); the installation is incomplete") from None
