"""doctor --machine: what each kind of want is told as, and that this machine can be looked at."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import run

from vitkit.commands import doctor
from vitkit.commands.doctor import AHEAD, BATCH, LEAST, Machine, find_problems

GOOD = Machine(
    out="runs", writable=True, disk_free=10**12, disk_needed=10**10, memory_free=10**11, memory_needed=10**10,
    shared_memory=10**11, data_processes=8, open_files=4096, processors=8,
    gpus=(("H200", 140 * 10**9, 150 * 10**9),), driver=True, clock_late=-100.0, versions=dict(LEAST),
)  # fmt: skip


def test_a_good_machine_has_nothing_wrong():
    assert find_problems(GOOD) == []


@pytest.mark.parametrize("change, severity, words", [
    ({"writable": False}, "error", ("runs is not writable", "--out")),
    ({"disk_free": 10**9}, "error", ("1.0 GB are free at runs", "10.0 GB", "--out")),
    ({"open_files": 256}, "warning", ("256 files", "ulimit -n 4096")),
    ({"shared_memory": 64 * 2**20}, "warning", ("0.1 GB of shared memory", "--shm-size", "--workers 0")),
    ({"shared_memory": 3 * AHEAD * BATCH}, "warning", ("--workers 3",)),
    ({"gpus": ()}, "error", ("NVIDIA GPU", "nvidia-smi")),
    ({"gpus": (), "driver": False}, "note", ("8 processors",)),
    ({"gpus": (), "driver": False, "memory_free": 10**9}, "error", ("1.0 GB of memory", "smaller --model")),
    ({"gpus": (("H200", 10**10, 15 * 10**10),)}, "warning", ("only 10.0 GB of 150.0 GB", "--device")),
    ({"clock_late": 3600.0}, "warning", ("3,600 s", "timedatectl")),
    ({"versions": LEAST | {"torch": "2.9.1+cu130"}}, "error", ("torch 2.9.1+cu130", "2.10", "pip install")),
])  # fmt: skip
def test_each_want_is_told_with_its_remedy(change, severity, words):
    first = find_problems(replace(GOOD, **change))[0]
    assert first.severity == severity
    assert all(word in f"{first.text} {first.remedy}" for word in words)


def test_errors_come_first():
    result = find_problems(replace(GOOD, open_files=1, writable=False, gpus=(), driver=False))
    assert [one.severity for one in result] == ["error", "warning", "note"]


def test_the_least_versions_are_those_that_are_installed_by():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for name, least in LEAST.items():
        assert re.search(rf'"{name}>={re.escape(least)}"', text)


def test_this_machine_is_looked_at_and_nothing_is_left_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("doctor", "--machine", "--model", "ViT-Ti/16", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["ok"] and output["machine"]["disk_needed"] == 40 * 5_717_416
    assert not any(tmp_path.iterdir())
    assert run("doctor", "--machine") == 0 and "no problems" in capsys.readouterr().out


def test_a_disk_without_room_ends_with_an_error(tmp_path, monkeypatch, capsys):
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage._replace(free=10**6))
    assert run("doctor", "--machine", "--out", tmp_path / "a" / "b") == 1
    assert "fix the errors" in capsys.readouterr().out and not (tmp_path / "a").exists()


def test_data_and_machine_are_asked_for_one_at_a_time(capsys):
    assert run("doctor") == 2 and run("doctor", "digits", "--machine") == 2
    assert "--machine" in capsys.readouterr().err
