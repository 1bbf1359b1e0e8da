"""Worker processes: none outlives its parent, and a temporary folder without room for sockets is an error."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from vitkit.data.loader import check_sockets

FORKED = """
    import os, signal, sys, threading, time
    import numpy as np
    from vitkit.data import loader
    from vitkit.data.loader import evaluation_batches
    from vitkit.data.sources.source import from_arrays
    from vitkit.data.views import View

    place, thread, protected = sys.argv[1], sys.argv[2] == "thread", sys.argv[3] == "protected"
    if not protected:
        loader.end_with_parent = lambda *_: None
    me = os.getpid()

    def child():  # at the moment of the fork: the worker is held up until its parent is gone
        with open(place, "w") as file:
            file.write(str(os.getpid()))
        while os.getppid() == me:
            time.sleep(0.01)

    def parent():
        while not os.path.exists(place) or not open(place).read():
            time.sleep(0.01)
        os.kill(me, signal.SIGKILL)

    os.register_at_fork(after_in_child=child, after_in_parent=parent)
    images = np.zeros((64, 8, 8, 3), np.uint8)
    source = from_arrays("some", images, np.arange(64) % 2)
    work = lambda: list(evaluation_batches(source, View(size=(8, 8), crop="squash"), 4, workers=1))
    if thread:
        one = threading.Thread(target=work)
        one.start()
        one.join()
    else:
        work()
"""
BUSY = """
    import os, sys, threading, time
    import numpy as np
    from vitkit.data.loader import STARTED, evaluation_batches
    from vitkit.data.sources.source import from_arrays
    from vitkit.data.views import View

    source = from_arrays("some", np.zeros((64, 8, 8, 3), np.uint8), np.arange(64) % 2)
    made = iter(evaluation_batches(source, View(size=(8, 8), crop="squash"), 4, workers=2))
    first = threading.Thread(target=lambda: next(made))  # the thread that starts the workers ends
    if sys.argv[2] == "thread":
        first.start()
        first.join()
    else:
        next(made)
    time.sleep(1.5)
    for _ in range(3):
        next(made)
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(" ".join(str(worker.pid) for worker in STARTED))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def script(text: str, *words: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *words])


@pytest.mark.parametrize("forker", ["main", "thread"])
def test_a_worker_forked_as_its_parent_is_killed_does_not_stay(forker, tmp_path):
    process = script(FORKED, str(tmp_path / "pid"), forker, "protected")
    assert process.wait(60) == -signal.SIGKILL
    assert gone(int((tmp_path / "pid").read_text()), 10)


@pytest.mark.slow
def test_control_without_the_look_at_its_parent_it_stays(tmp_path):
    process = script(FORKED, str(tmp_path / "pid"), "main", "bare")
    assert process.wait(60) == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid, 6.5), "longer than torch takes to look after a parent"
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("forker", ["main", "thread"])
@pytest.mark.slow
def test_workers_end_with_their_parent_and_not_with_the_thread_that_started_them(forker, tmp_path):
    process = script(BUSY, str(tmp_path / "pids"), forker)
    end = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.1)
    workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    process.kill()
    process.wait()
    assert all(gone(pid, 4) for pid in workers), "sooner than torch takes to look after a parent"


@pytest.fixture
def long_name(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    return folder


def test_a_long_name_of_the_temporary_folder_is_told_at_the_start(long_name, tmp_path):
    with pytest.raises(OSError, match="too long"), socket.socket(socket.AF_UNIX) as one:
        one.bind(str(long_name / "socket"))
    command = [
        sys.executable, "-m", "vitkit", "finetune", "digits", "--model", "ViT-Ti/4", "--image-size", "8",
        "--steps", "1", "--batch", "16", "--out", str(tmp_path / "run"), "--device", "cpu",
    ]  # fmt: skip
    env = os.environ | {"TMPDIR": str(long_name)}
    begun = time.monotonic()
    done = subprocess.run([*command, "--workers", "1"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and time.monotonic() - begun < 60
    assert str(long_name) in done.stderr and "TMPDIR" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists(), "before anything is done"


def test_a_usable_folder_is_left_as_it_was():
    before = set(os.listdir(tempfile.gettempdir()))
    check_sockets()
    assert {name for name in os.listdir(tempfile.gettempdir()) if "listener" in name} <= before
