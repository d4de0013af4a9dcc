"""Values of options that several verbs share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41_tvm.cli.options import case_files, load_config, parse_layers, step_sizes
from ds41_tvm.config import AttentionConfig
from ds41_tvm.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", None),
        (None, None),
        ("0", (0,)),
        ("0,2,20-24", (0, 2, 20, 21, 22, 23, 24)),
        (" 3 , 1 - 2 ", (1, 2, 3)),
        ("7-7", (7,)),
    ],
)
def test_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no layer"),
        ("0,,2", "no layer"),
        ("0,x", "'x' is no layer"),
        ("-1", "no layer"),
        ("1.5", "no layer"),
        ("5-3", "expected 3-5"),
        ("0-3,2", "layer 2 is given twice"),
    ],
)
def test_layers_refused(text, words):
    with pytest.raises(UsageError, match=words):
        parse_layers(text)


@given(st.sets(st.integers(0, 99), min_size=1))
def test_any_list_of_layers_comes_back_sorted(layers):
    assert parse_layers(",".join(map(str, layers))) == tuple(sorted(layers))


def test_config_by_preset_or_path(tmp_path, monkeypatch):
    assert load_config("tiny") == AttentionConfig.preset("tiny")
    with pytest.raises(UsageError, match="flash, tiny"):
        load_config(str(tmp_path / "absent.json"))
    bad = tmp_path / "config.json"
    bad.write_text("{}")
    with pytest.raises(ConfigError):
        load_config(str(bad))
    # A file that has a preset's name is reached by a path.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("{}")
    assert load_config("tiny") == AttentionConfig.preset("tiny")
    with pytest.raises(ConfigError):
        load_config("./tiny")


def test_step_sizes():
    assert step_sizes(10, 2) == [10, 1, 1]
    assert step_sizes(10, 0, chunk=4) == [4, 4, 2]
    assert step_sizes(0, 3, chunk=4) == [1, 1, 1]


@given(st.integers(0, 300), st.integers(0, 20), st.none() | st.integers(1, 400))
def test_steps_cover_all_tokens(prompt, decode, chunk):
    if prompt + decode == 0:
        with pytest.raises(UsageError, match="nothing to run"):
            step_sizes(prompt, decode, chunk)
        return
    sizes = step_sizes(prompt, decode, chunk)
    assert sum(sizes) == prompt + decode
    assert min(sizes) >= 1
    assert max(sizes) <= max(chunk or prompt, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [((-1, 0, None), "--prompt -1"), ((1, -2, None), "--decode -2"), ((1, 0, 0), "--chunk 0")],
)
def test_step_sizes_refused(values, words):
    with pytest.raises(UsageError, match=words):
        step_sizes(*values)


def test_case_files(tmp_path):
    for name in ("b.npz", "a.npz", "c.txt"):
        (tmp_path / name).touch()
    assert case_files([tmp_path]) == [tmp_path / "a.npz", tmp_path / "b.npz"]
    assert case_files([str(tmp_path / "c.txt")]) == [tmp_path / "c.txt"]
    with pytest.raises(UsageError, match="no such file"):
        case_files([tmp_path / "absent.npz"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no \.npz"):
        case_files([tmp_path / "empty"])
