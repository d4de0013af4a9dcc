"""The frame around the verbs: help without weight, exit codes, messages, interruption, closed pipes."""

import subprocess
import sys

import pytest

import ds41_tvm
from ds41_tvm import cli, errors

HEAVY = {"tvm", "torch", "numpy", "onnx", "matplotlib"}


def python(code, **more):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize("arguments", [["--help"], ["synth", "--help"], ["doctor", "-h"], ["--version"], ["nonsense"]])
def test_help_and_mistakes_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom ds41_tvm import cli\n"
        f"cli.run({arguments!r})\nprint('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = python(code)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr


def test_module_form_is_the_same_program():
    done = subprocess.run([sys.executable, "-m", "ds41_tvm", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for word in ("ds41-tvm", "doctor", "synth", "--debug", "Exit codes"):
        assert word in done.stdout
    assert done.stderr == ""


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"{ds41_tvm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense", "ds41-tvm --help"]),
        (["synth"], ["OUT", "ds41-tvm synth --help"]),
        (["doctor", "--verbose"], ["--verbose", "ds41-tvm doctor --help"]),
        (["synth", "x", "--linear", "fp4"], ["fp4", "bf16", "fp8"]),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, words, capsys):
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ds41-tvm: ")
    for word in words:
        assert word in err


def with_verb(error):
    """Makes `doctor` raise `error` for the length of a test."""

    def raising(monkeypatch):
        def examine():
            raise error

        monkeypatch.setattr(cli.doctor, "examine", examine)

    return raising


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.ConfigError, 2),
        (errors.MissingTensor, 2),
        (errors.InputError, 2),
        (errors.TargetError, 2),
        (errors.CompileError, 1),
        (errors.StateError, 1),
    ],
)
def test_errors_of_the_package_become_one_message(kind, code, monkeypatch, capsys):
    with_verb(kind("it is so"))(monkeypatch)
    assert cli.run(["doctor"]) == code
    assert capsys.readouterr().err == "ds41-tvm: it is so\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied", "a"), "a: Permission denied"),
        (OSError(21, "Is a directory", "a", None, "b"), "b: Is a directory"),
    ],
)
def test_what_the_system_refuses_is_no_defect(error, message, monkeypatch, capsys):
    with_verb(error)(monkeypatch)
    assert cli.run(["doctor"]) == 1
    assert capsys.readouterr().err == f"ds41-tvm: {message}\n"


def test_an_unexpected_error_says_how_to_report_it(monkeypatch, capsys):
    with_verb(ZeroDivisionError("by nothing\nsecond line"))(monkeypatch)
    assert cli.run(["doctor"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("ds41-tvm: internal error: ZeroDivisionError: by nothing\n")
    assert "report" in err
    assert "--debug" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(arguments, monkeypatch, capsys):
    with_verb(ZeroDivisionError("by nothing"))(monkeypatch)
    assert cli.run(arguments) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_interruption(monkeypatch, capsys):
    with_verb(KeyboardInterrupt())(monkeypatch)
    assert cli.run(["doctor"]) == 130
    assert capsys.readouterr().err == "ds41-tvm: interrupted\n"


@pytest.mark.parametrize("how", ["print(1)", "console().print('1')"])
def test_a_reader_that_goes_away_is_no_error(how):
    code = (
        "import sys, time\nfrom ds41_tvm import cli\nfrom ds41_tvm.cli.output import console\n"
        "def examine():\n"
        f"    for _ in range(100_000): {how}\n"
        "cli.doctor.examine = examine\ncli.main.__globals__['sys'].argv = ['ds41-tvm', 'doctor']\ncli.main()"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline() == b"1\n"
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait() == 141
    running.stderr.close()


def test_main_ends_with_the_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ds41-tvm", "nonsense"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
