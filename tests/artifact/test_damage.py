"""Everything that can be wrong with an artefact gives its named error before native code is touched."""

import json
import os
import re
import shutil
import sys

import pytest

import ds41_tvm
from ds41_tvm import errors
from ds41_tvm.artifact import files
from ds41_tvm.artifact import manifest as schema
from ds41_tvm.artifact.load import open_artifact
from ds41_tvm.cpu_features import host_features
from ds41_tvm.runtime import ffi

MANIFEST, MODULE, IR = schema.FILE, schema.MODULE, schema.IR
WEIGHTS = "weights.layer-02.safetensors"


# ---- how to spoil files


def flip(path, at):
    """Change one bit; `at` is a fraction of the file or, negative, bytes from its end."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data)) if at >= 0 else at] ^= 0x10
    path.write_bytes(data)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def edit(folder, change, forge=True):
    """Change the manifest's values; `forge`: state the digest of the result, as somebody with intent would."""
    values = json.loads((folder / MANIFEST).read_text())
    change(values)
    if forge:
        values.pop("digest", None)
        values["digest"] = schema._digest(values)
    (folder / MANIFEST).write_text(json.dumps(values))


def restate(folder, name):
    """Have the manifest state a file as it is now."""
    file = files.describe(folder / name, name.startswith("weights"))
    stated = {"size": file.size, "sha256": file.sha256, "sample": file.sample}
    edit(folder, lambda m: m["files"].update({name: stated}))


def replace_value(path, value, at):
    def change(manifest):
        for key in path:
            manifest = manifest[key]
        manifest[at] = value

    return lambda folder: edit(folder, change)


def with_text(old, new):
    """Replace text in the manifest as a text editor would, digest and all."""

    def spoil(folder):
        text = (folder / MANIFEST).read_text()
        assert old in text
        (folder / MANIFEST).write_text(text.replace(old, new, 1))

    return spoil


def rename_file(old, new):
    def change(manifest):
        manifest["files"][new] = manifest["files"].pop(old)
        for layer in manifest["layers"]:
            if layer["weights"] == old:
                layer["weights"] = new

    return lambda folder: edit(folder, change)


def then_restate(name, spoil):
    def both(folder):
        spoil(folder / name)
        restate(folder, name)

    return both


def swap(folder, one, other):
    (folder / one).rename(folder / "x")
    (folder / other).rename(folder / one)
    (folder / "x").rename(folder / other)


def into_pipe(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)


def grow(path, size):
    with open(path, "r+b") as file:
        file.truncate(size)


def strip_symbols(path):
    path.write_bytes(path.read_bytes().replace(b"__tvm_ffi_rope", b"__tvm_ffi_gone"))


def duplicate_key(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"schema": 2,', '"schema": 2, "schema": 2,', 1))


def header(path, change):
    """Edit the header of a weight file in place; same length."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    new = change(data[8 : 8 + size])
    assert len(new) == size
    path.write_bytes(data[:8] + new + data[8 + size :])


def shift_names(folder):
    def change(text):
        assert b"linear.wq_a.0" in text
        return text.replace(b"linear.wq_a.0", b"linear.wq_z.0", 1)

    header(folder / WEIGHTS, change)
    restate(folder, WEIGHTS)


def unsafe(name):
    return rename_file(WEIGHTS, name)


DAMAGE = {
    # whole files
    "no folder": (lambda f: shutil.rmtree(f), errors.MissingFile, "no such folder"),
    "a file in its place": (lambda f: (shutil.rmtree(f), f.write_text("x")), errors.MissingFile, "no such folder"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), errors.MissingFile, MANIFEST),
    "no module": (lambda f: (f / MODULE).unlink(), errors.MissingFile, MODULE),
    "no IR": (lambda f: (f / IR).unlink(), errors.MissingFile, IR),
    "no weights of one layer": (lambda f: (f / WEIGHTS).unlink(), errors.MissingFile, WEIGHTS),
    "module is a folder": (lambda f: ((f / MODULE).unlink(), (f / MODULE).mkdir()), errors.MissingFile, "regular"),
    "module is a pipe": (lambda f: into_pipe(f, MODULE), errors.MissingFile, "regular"),
    "manifest is a pipe": (lambda f: into_pipe(f, MANIFEST), errors.MissingFile, "regular"),
    "module links to nowhere": (
        lambda f: ((f / MODULE).unlink(), (f / MODULE).symlink_to("nowhere")), errors.MissingFile, MODULE,
    ),
    "two weight files swapped": (
        lambda f: swap(f, "weights.layer-00.safetensors", "weights.layer-01.safetensors"),
        errors.DigestMismatch, "layer-00",
    ),
    "weights and module swapped": (lambda f: swap(f, MODULE, WEIGHTS), errors.WrongFileSize, MODULE),
    "module of another artefact": (
        lambda f: (f / MODULE).write_bytes(bytes((f / MODULE).stat().st_size)), errors.DigestMismatch, MODULE,
    ),
    # sizes
    "empty manifest": (lambda f: (f / MANIFEST).write_bytes(b""), errors.BadManifest, "not JSON"),
    "manifest cut": (lambda f: cut(f / MANIFEST, 0.5), errors.BadManifest, "not JSON"),
    "huge manifest": (lambda f: grow(f / MANIFEST, 1 << 40), errors.WrongFileSize, "kilobytes"),
    "module cut": (lambda f: cut(f / MODULE, 0.7), errors.WrongFileSize, "cut short"),
    "module empty": (lambda f: cut(f / MODULE, 0), errors.WrongFileSize, "cut short"),
    "module longer": (lambda f: grow(f / MODULE, 1 << 24), errors.WrongFileSize, "longer"),
    "huge module, and stated so": (
        lambda f: (grow(f / MODULE, 1 << 40), edit(f, lambda m: m["files"][MODULE].update(size=1 << 40))),
        errors.WrongFileSize, "too large",
    ),
    "weights cut": (lambda f: cut(f / WEIGHTS, 0.9), errors.WrongFileSize, "cut short"),
    "huge weights": (lambda f: grow(f / WEIGHTS, 1 << 42), errors.WrongFileSize, "longer"),
    # one bit
    **{f"module, bit at {at}": (lambda f, at=at: flip(f / MODULE, at), errors.DigestMismatch, MODULE)
       for at in (0.0, 0.01, 0.3, 0.6, 0.9, -1)},
    **{f"weights, bit at {at}": (lambda f, at=at: flip(f / WEIGHTS, at), errors.DigestMismatch, WEIGHTS)
       for at in (0.0, 0.02, 0.3, 0.6, 0.9, -1)},
    "IR, one bit": (lambda f: flip(f / IR, 0.5), errors.DigestMismatch, IR),
    # the manifest as text
    "a key twice": (duplicate_key, errors.BadManifest, "twice"),
    "not UTF-8": (
        with_text("config", "c\udcff".encode("utf-8", "surrogateescape").decode("latin-1")),
        errors.BadManifest, "digest",
    ),
    "nested too deep": (lambda f: (f / MANIFEST).write_text("[" * 100000), errors.BadManifest, "deep"),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), errors.BadManifest, "expected a JSON object"),
    "another format": (with_text("ds41-tvm artifact", "ds41-tvm artefact"), errors.BadManifest, "format"),
    "edited without its digest": (with_text('"draft": 64', '"draft": 63'), errors.BadManifest, "changed after"),
    "no digest": (lambda f: edit(f, lambda m: m.pop("digest"), False), errors.BadManifest, "digest"),
    # the manifest's values, forged with a fresh digest
    "newer schema": (replace_value((), 3, "schema"), errors.UnknownSchema, "schema version 3"),
    "older schema": (replace_value((), 0, "schema"), errors.UnknownSchema, "schema version 0"),
    "schema is a text": (replace_value((), "1", "schema"), errors.BadManifest, "schema"),
    "schema is true": (replace_value((), True, "schema"), errors.BadManifest, "schema"),
    "unknown field": (replace_value((), 1, "extra"), errors.BadManifest, "extra"),
    "unknown field inside": (replace_value(("options",), 1, "extra"), errors.BadManifest, r"\$\.options"),
    "field missing": (lambda f: edit(f, lambda m: m.pop("kernels")), errors.BadManifest, "kernels"),
    "wrong type": (replace_value(("options",), "64", "draft"), errors.BadManifest, r"\$\.options\.draft"),
    "bad draft": (replace_value(("options",), -1, "draft"), errors.BadManifest, "draft"),
    "bad size": (replace_value(("files", MODULE), -5, "size"), errors.BadManifest, "size"),
    "bad digest": (replace_value(("files", MODULE), "sha256:0", "sha256"), errors.BadManifest, "64 hexadecimal"),
    "unknown ties": (replace_value(("options",), "random", "ties"), errors.BadManifest, r"\$\.options\.ties"),
    "other ties": (replace_value(("options",), "torch-cpu", "ties"), errors.BadManifest, "kernels"),
    "a size of the configuration": (replace_value(("config",), 128, "dim"), errors.BadManifest, "config_digest"),
    "impossible configuration": (replace_value(("config",), 7, "rope_head_dim"), errors.BadManifest, "rope_head_dim"),
    "another role": (replace_value(("layers", 3, "role"), "window", "kind"), errors.BadManifest, "layers"),
    "a kernel less": (lambda f: edit(f, lambda m: m["kernels"].pop()), errors.BadManifest, "kernels"),
    "a kernel renamed": (replace_value(("kernels", 0), "other", "name"), errors.BadManifest, "names of kernels"),
    "a file less": (lambda f: edit(f, lambda m: m["files"].pop(IR)), errors.BadManifest, "files"),
    "a file more": (lambda f: edit(f, lambda m: m["files"].update(more=m["files"][IR])), errors.BadManifest, "files"),
    "weights of some layers": (replace_value(("layers", 1), None, "weights"), errors.BadManifest, "all or none"),
    "features hidden": (replace_value((), [], "requires"), errors.BadManifest, "requires"),
    "path upwards": (unsafe("../weights.safetensors"), errors.UnsafeFileName, r"\.\./"),
    "absolute path": (unsafe("/etc/passwd"), errors.UnsafeFileName, "passwd"),
    "path with a zero byte": (unsafe("a\0b"), errors.UnsafeFileName, "plain name"),
    "hidden file": (unsafe(".profile"), errors.UnsafeFileName, "plain name"),
    "empty name": (unsafe(""), errors.UnsafeFileName, "plain name"),
    "very long name": (unsafe("w" * 5000), errors.UnsafeFileName, "plain name"),
    # files and manifest changed together
    "module cut, and stated so": (then_restate(MODULE, lambda p: cut(p, 0.5)), errors.BadModule, "cut short"),
    "module to its headers, stated": (
        then_restate(MODULE, lambda p: cut(p, 0.003)),
        errors.BadModule, "cut short|headers",
    ),
    "module empty, and stated so": (
        then_restate(MODULE, lambda p: p.write_bytes(b"")),
        errors.BadModule, "cannot be read",
    ),
    "module is text, and stated so": (
        then_restate(MODULE, lambda p: p.write_text("x" * 999)),
        errors.BadModule, "not a 64",
    ),
    "module lacks kernels, stated": (then_restate(MODULE, strip_symbols), errors.BadModule, "__tvm_ffi_rope"),
    "module for another machine, stated": (
        then_restate(MODULE, lambda p: p.write_bytes(p.read_bytes()[:18] + b"\xf3" + p.read_bytes()[19:])),
        errors.BadModule, "machine type 243",
    ),
    "weights cut, and stated so": (
        then_restate(WEIGHTS, lambda p: cut(p, 0.9)),
        errors.BadWeightFile, "its header describes",
    ),
    "weights of another layer, stated": (
        then_restate(WEIGHTS, lambda p: shutil.copy(p.with_name("weights.layer-00.safetensors"), p)),
        errors.BadWeightFile, "layer is '0'; expected '2'",
    ),
    "weights of a layer of the same shape, stated": (
        then_restate(
            "weights.layer-01.safetensors", lambda p: shutil.copy(p.with_name("weights.layer-00.safetensors"), p)
        ),
        errors.BadWeightFile, "layer is '0'; expected '1'",
    ),
    "weights renamed inside, stated": (shift_names, errors.BadWeightFile, "wq_"),
    "weights are text, and stated so": (
        then_restate(WEIGHTS, lambda p: p.write_text("y" * 99)),
        errors.BadWeightFile, "header",
    ),
    # made elsewhere
    "another TVM": (replace_value(("versions",), "0.28.0", "tvm"), errors.AbiMismatch, "0.28.0.*0.27.0"),
    "another tvm-ffi": (replace_value(("versions",), "0.9.9", "tvm_ffi_abi"), errors.AbiMismatch, r"0\.9\.9"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_native_code(monkeypatch, tiny):
    """Loading the module fails the test: all checks come before."""
    module = ffi.load_runtime()

    def reached(*_):
        pytest.fail("native code was reached")

    monkeypatch.setattr(module, "load_module", reached)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(copy, name):
    spoil, error, words = DAMAGE[name]
    spoil(copy)
    with pytest.raises(errors.ArtifactError) as caught:
        ds41_tvm.load(copy)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(words, str(caught.value)), str(caught.value)
    assert re.search("expected|compile|use |copy|keep", str(caught.value)), f"no way out: {caught.value}"


def test_every_byte_of_the_manifest_counts(copy):
    """A changed byte is refused, or changes nothing but white space."""
    data = (copy / MANIFEST).read_bytes()
    good = schema.decode(data, "here")
    for at in [*range(400), *range(400, len(data), 97)]:
        spoiled = bytearray(data)
        spoiled[at] ^= 0x04
        try:
            assert schema.decode(bytes(spoiled), "here") == good
            assert data[at : at + 1].isspace()
        except errors.ArtifactError as error:
            assert isinstance(error, errors.BadManifest | errors.UnknownSchema)  # noqa: PT017 - either is right


def test_a_pinned_digest(tiny, copy, monkeypatch):
    other = "sha256:" + "0" * 64
    with pytest.raises(errors.PinMismatch, match=f"{tiny.digest}; expected {other}"):
        ds41_tvm.load(copy, expect=other)
    edit(copy, lambda m: m["options"].update(draft=32))
    with pytest.raises(errors.PinMismatch, match=tiny.digest):
        ds41_tvm.load(copy, expect=tiny.digest)
    for bad in ("", "sha256:12", "0" * 64, 5):
        with pytest.raises(errors.UsageError, match="64 hexadecimal"):
            ds41_tvm.load(copy, expect=bad)


def test_a_processor_without_the_features(copy, monkeypatch):
    missing = next(iter(host_features()), None)
    here = tuple(f for f in host_features() if f != missing)
    monkeypatch.setattr("ds41_tvm.artifact.load.host_features", lambda: here)
    with pytest.raises(errors.UnsupportedCpu, match=f"lacks {missing} and has") as caught:
        ds41_tvm.load(copy)
    assert "lower level" in str(caught.value)


def test_an_environment_with_another_tvm(copy, monkeypatch):
    monkeypatch.setattr("ds41_tvm.artifact.load.abi", lambda: {"tvm": "0.99", "tvm_ffi": "0.1.15"})
    with pytest.raises(errors.AbiMismatch, match=r"compiled for version 0\.27.*this process has 0\.99"):
        ds41_tvm.load(copy)


def test_an_environment_without_a_runtime(copy, monkeypatch):
    monkeypatch.setattr(ffi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.AbiMismatch, match=r"libtvm_runtime.so was not found; install it"):
        ffi.runtime_library()
    monkeypatch.delitem(sys.modules, "tvm_ffi")
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(errors.AbiMismatch, match="tvm_ffi cannot be imported.*pip install apache-tvm-ffi"):
        ffi.import_ffi()


def test_large_weights_are_sampled_unless_asked_for_in_full(copy, monkeypatch):
    """What `auto` promises beyond its limit: header, length and pages spread over the file; `full` finds every bit."""
    monkeypatch.setattr(files, "HASHED_WEIGHTS", 0)
    monkeypatch.setattr(files, "SAMPLES", 4)
    monkeypatch.setattr(files, "SAMPLE_BYTES", 512)
    manifest = schema.decode((copy / MANIFEST).read_bytes(), "here")
    for name in [layer.weights for layer in manifest.layers]:
        restate(copy, name)
    manifest = schema.decode((copy / MANIFEST).read_bytes(), "here")
    flip(copy / WEIGHTS, 0.5)  # between two samples
    files.check_files(copy, manifest, "auto")
    with pytest.raises(errors.DigestMismatch, match=WEIGHTS):
        files.check_files(copy, manifest, "full")
    with pytest.raises(errors.DigestMismatch, match=WEIGHTS):
        ds41_tvm.load(copy, verify="full")
    flip(copy / WEIGHTS, 0.5)
    swap(copy, "weights.layer-00.safetensors", "weights.layer-01.safetensors")
    with pytest.raises(errors.DigestMismatch, match="layer-00"):
        files.check_files(copy, manifest, "auto")
    with pytest.raises(errors.UsageError, match="'auto' or 'full'"):
        files.check_files(copy, manifest, "none")


def test_an_artefact_replaced_while_it_is_read_is_read_again(copy, tiny, monkeypatch, tmp_path):
    monkeypatch.undo()
    fresh = tmp_path / "fresh"
    shutil.copytree(copy, fresh)
    (copy / IR).unlink()
    real = files.check_files
    done = []

    def once(folder, *rest):
        if not done:
            done.append(1)
            copy.rename(tmp_path / "old")
            fresh.rename(copy)
            return real(tmp_path / "old", *rest)
        return real(folder, *rest)

    monkeypatch.setattr("ds41_tvm.artifact.load.check_files", once)
    assert open_artifact(copy).digest == tiny.digest
