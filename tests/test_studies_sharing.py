"""Sharing a GPU's time: asked for only where several processes are for one, and given up where it fails."""

import os
import signal
from contextlib import ExitStack

import pytest

from vitkit.studies import executor
from vitkit.studies.conduct import Execution, Executors
from vitkit.studies.executor import LOG, PIPE, VISIBLE, Job, run_jobs, share_gpus

BOTH = ["cuda:0", "cuda:0"]
ENDED = ["-d", "quit -t 5"]
STARTED = ["-d", "get_server_list", "quit -t 5"]


class Control:
    """A stand-in for the program that starts and ends it; it writes down how it was called."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / executor.CONTROL
        self.says('[ -n "$1" ] || echo 4711')

    def says(self, lines: str) -> None:
        self.path.write_text(f'#!/bin/sh\necho "$1$(cat)" >> {self.folder}/calls\n{lines}\n')
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture
def control(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(executor, "PROBE", "")
    for name in (PIPE, LOG, VISIBLE):
        monkeypatch.delenv(name, raising=False)
    yield Control(tmp_path)
    assert PIPE not in os.environ and LOG not in os.environ


@pytest.mark.parametrize(
    "devices",
    [[], ["cpu", "cpu"], ["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0"] * 49],
    ids=["none", "cpu", "alone", "one each", "too many"],
)
def test_nothing_is_started_where_nothing_is_shared(control, devices):
    with share_gpus(devices) as shared:
        assert not shared
    assert not control.calls


@pytest.mark.parametrize("seen", ["", " ", "-1"])
def test_nothing_is_started_where_gpus_are_hidden(control, monkeypatch, seen):
    monkeypatch.setenv(VISIBLE, seen)
    with share_gpus(BOTH) as shared:
        assert not shared
    assert not control.calls


def test_nothing_happens_without_the_program(control, monkeypatch):
    control.path.unlink()
    monkeypatch.setattr(executor, "CONTROL_PATHS", str(control.folder))
    before = dict(os.environ)
    with share_gpus(BOTH) as shared:
        assert not shared and os.environ == before


def test_it_is_started_tried_and_ended(control):
    with share_gpus(BOTH) as shared:
        assert shared and os.path.isdir(os.environ[PIPE])
        folder = os.environ[PIPE]
    assert control.calls == STARTED and not os.path.exists(folder)


def test_every_gpu_is_tried_by_its_number(control, monkeypatch):
    monkeypatch.setattr(executor, "PROBE", "import sys; raise SystemExit(sys.argv[1:] != ['0', '1'])")
    with share_gpus(["cuda:0", "cuda:1"] * 2) as shared:
        assert shared


@pytest.mark.parametrize(
    ("program", "trial", "calls"),
    [("exit 1", "", ENDED), ("exit 0", "raise SystemExit(1)", ENDED), ("exit 0", "", STARTED)],
    ids=["not started", "no process can use it", "processes pass it by"],
)
def test_nobody_is_sent_there_where_it_does_not_work(control, monkeypatch, program, trial, calls):
    control.says(program)
    monkeypatch.setattr(executor, "PROBE", trial)
    with share_gpus(BOTH) as shared:
        assert not shared and PIPE not in os.environ
    assert control.calls == calls


def test_it_sees_all_gpus_and_the_processes_theirs(control, monkeypatch):
    control.says(f'echo "${VISIBLE}" >> {control.folder}/calls; echo 4711')
    monkeypatch.setenv(VISIBLE, "2,3")
    monkeypatch.setattr(executor, "PROBE", f"import os; raise SystemExit(os.environ['{VISIBLE}'] != '2,3')")
    with share_gpus(BOTH) as shared:
        assert shared and os.environ[VISIBLE] == "2,3"
    assert control.calls[:2] == ["-d", ""]


def test_it_is_ended_whatever_ends_the_study(control):
    with pytest.raises(KeyboardInterrupt), share_gpus(BOTH):
        raise KeyboardInterrupt
    assert control.calls == STARTED


def test_it_is_ended_when_its_trial_is_interrupted(control, monkeypatch):
    interrupt = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGINT)}); time.sleep(20)"
    monkeypatch.setattr(executor, "PROBE", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in parallel are deaf to it
    try:
        with pytest.raises(KeyboardInterrupt), share_gpus(BOTH):
            raise AssertionError("not reached")
    finally:
        signal.signal(signal.SIGINT, before)
    assert control.calls == ENDED


@pytest.mark.parametrize("name", [PIPE, LOG])
def test_an_own_one_is_kept(control, monkeypatch, name):
    with monkeypatch.context() as theirs:
        theirs.setenv(name, str(control.folder))
        with share_gpus(BOTH) as shared:
            assert not shared and os.environ[name] == str(control.folder)
        assert os.environ[name] == str(control.folder)
    assert not control.calls


@pytest.mark.slow
def test_the_processes_of_a_study_find_it_and_it_outlives_them(control, tmp_path):
    output: list[str] = []
    with ExitStack() as stack:
        executors = Executors(Execution(out=tmp_path, device="cuda:0", processes=2), stack, output.append)
        result = run_jobs([Job("asked", os.getenv, (PIPE,))], executors.local())["asked"].value
        assert result == os.environ[PIPE]
        process = executors.local().workers[0].process
        control.says(f"kill -0 {process.pid} && echo while it runs >> {control.folder}/calls")
        assert process.is_alive() and control.calls == STARTED[:2]
    assert control.calls == STARTED
    assert len(output) == 1 and "MPS" in output[0]
