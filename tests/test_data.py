"""Where the tuning records are found: in a wheel, in a source folder, nowhere."""

from pathlib import Path

import pytest

from ds41_tvm import data


def test_the_repository_has_them():
    assert (data.schedules_dir() / "README.md").is_file()


@pytest.mark.parametrize("inside", [True, False])
def test_wheel_and_source_folder(inside, tmp_path, monkeypatch):
    package = tmp_path / "ds41_tvm"
    records = package / "schedules" if inside else tmp_path / "schedules"
    records.mkdir(parents=True)
    package.mkdir(exist_ok=True)
    monkeypatch.setattr(data, "__file__", str(package / "data.py"))
    assert data.schedules_dir() == records


def test_absent_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "__file__", str(tmp_path / "ds41_tvm" / "data.py"))
    assert not Path(data.schedules_dir()).exists()
