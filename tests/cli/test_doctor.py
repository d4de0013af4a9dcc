"""The doctor: everything is there in the environment of the tests, and what is not is told."""

import json

import pytest

from ds41_tvm import cli
from ds41_tvm.cli import doctor, machine
from ds41_tvm.cli.packages import Requirement

WORKS = {"works": True, "llvm": 22, "error": None}


def test_this_environment_is_sound(capsys):
    assert cli.run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["tvm"]["works"] is True
    assert found["tvm"]["llvm"] >= 15
    assert {package["name"] for package in found["required"]} >= {"apache-tvm", "apache-tvm-ffi", "numpy"}
    assert found["cpu"]["threads"] >= 1
    assert found["memory"]["total"] > found["memory"]["available"] > 0
    assert found["extras"]["torch"]["install"] == "pip install 'ds41-tvm[torch]'"


def set_up(monkeypatch, needs, tvm=WORKS):
    monkeypatch.setattr(doctor, "requirements", lambda: needs)
    monkeypatch.setattr(machine, "tvm_works", lambda: tvm)


def test_a_wrong_pin_fails_and_says_what_to_do(monkeypatch, capsys):
    set_up(monkeypatch, [Requirement("numpy", "==1.0.0", None)])
    assert cli.run(["doctor"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "WRONG" in printed
    assert "does not fit; expected numpy==1.0.0: pip install 'numpy==1.0.0'" in printed


def test_a_missing_requirement_fails(monkeypatch):
    set_up(monkeypatch, [Requirement("surely-not-a-package-of-anybody", ">=1", None)])
    found = doctor.examine()
    assert found["ok"] is False
    assert "surely-not-a-package-of-anybody is missing" in found["problems"][0]


def test_a_missing_extra_does_not_fail(monkeypatch, capsys):
    set_up(monkeypatch, [Requirement("surely-not-a-package", ">=1", "plot"), Requirement("numpy", "", "onnx")])
    assert cli.run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "pip install 'ds41-tvm[plot]'" in printed
    assert "ds41-tvm[onnx]" not in printed


def test_a_tvm_that_does_not_load_fails(monkeypatch, capsys):
    set_up(monkeypatch, [], tvm={"works": False, "llvm": None, "error": "libtvm.so: undefined symbol"})
    assert cli.run(["doctor"]) == 1
    assert "libtvm.so: undefined symbol" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('no tvm here')", "ImportError: no tvm here"),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11"),
        ("print(False, 22)", "no LLVM"),
    ],
)
def test_asking_tvm_survives_whatever_happens_there(code, error, monkeypatch):
    monkeypatch.setattr(machine, "_ASK_TVM", code)
    found = machine.tvm_works()
    assert found["works"] is False
    assert error in found["error"]


def test_programs():
    assert machine.program(["surely-no-such-program", ""]) is None
    found = machine.program(["surely-no-such-program", "python3"])
    assert found is not None
    assert found["version"].startswith("Python 3.")


def test_machine_facts_where_the_system_tells_none(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "")
    assert machine.memory() == {"total": None, "available": None, "limit": None}
    assert machine.cpu()["model"]
