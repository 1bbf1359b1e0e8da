"""Files that appear whole, and folders that one process has at a time."""

import errno
import multiprocessing
import os
import threading
import time

import pytest
from refusals import refused

from vitkit.io.files import is_locked, locked, naming, replace_file, replaced, staged


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with replaced(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path, durable):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(KeyError), staged(path, durable=durable) as beside:
        beside.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_overwritten_by_whoever_is_alone(tmp_path):
    (tmp_path / ".x.partial").write_bytes(bytes(1000))
    with replaced(tmp_path / "x") as file:
        file.write(b"1")
    assert (tmp_path / "x").read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1


def test_writers_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "x"

    def write(number: int) -> None:
        for _ in range(20):
            replace_file(path, lambda beside: beside.write_bytes(bytes([number]) * 10_000))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(path.read_bytes())) == 1 and path.stat().st_size == 10_000
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_rights_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "x", lambda beside: beside.write_text("x"))
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_told_with_the_file(tmp_path):
    with pytest.raises(OSError) as caught, naming(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "x") and caught.value.errno == errno.ENOSPC


def hold(folder, ready, go) -> None:
    with locked(folder, wait=False):
        ready.set()
        go.wait(20)


def test_a_folder_is_one_process_at_a_time(tmp_path):
    fork = multiprocessing.get_context("fork")
    ready, go = fork.Event(), fork.Event()
    assert not is_locked(tmp_path)
    holder = fork.Process(target=hold, args=(tmp_path, ready, go))
    holder.start()
    assert ready.wait(20) and is_locked(tmp_path)
    with refused("run.locked", tmp_path, f"process {holder.pid} on"), locked(tmp_path, wait=False):
        pass
    start = time.monotonic()
    threading.Timer(0.3, go.set).start()
    with locked(tmp_path):  # waits
        assert time.monotonic() - start > 0.25
    holder.join()
    assert holder.exitcode == 0 and not is_locked(tmp_path)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    fork = multiprocessing.get_context("fork")
    ready, go = fork.Event(), fork.Event()
    holder = fork.Process(target=hold, args=(tmp_path, ready, go))
    holder.start()
    assert ready.wait(20)
    holder.kill()
    holder.join()
    with locked(tmp_path, wait=False):
        assert is_locked(tmp_path)
