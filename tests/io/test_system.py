"""What other operating systems do: the branches of Windows, with stand-ins for what only it has."""

import os
import sys
import types

import pytest
from refusals import refused

from vitkit.io import files, system
from vitkit.io.files import flush, is_locked, locked, staged


@pytest.fixture
def windows(monkeypatch):
    """Windows, with locks of bytes as msvcrt has them: of an open file, not of a process."""
    owners: dict[tuple[int, int], int] = {}

    def locking(number: int, mode: int, count: int) -> None:
        place = os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR)
        assert count == 1 and place[1] == system.LOCKED_BYTE
        if mode == fake.LK_UNLCK:
            assert owners.pop(place) == number, "only the owner can unlock"
        elif owners.setdefault(place, number) != number:
            raise PermissionError(13, "Permission denied")

    fake = types.ModuleType("msvcrt")
    fake.LK_NBLCK, fake.LK_UNLCK, fake.locking = 2, 0, locking
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(system, "LOCK_POLL", 0.001)
    monkeypatch.setattr(files, "UPDATE", os.O_RDWR)
    return owners


def test_a_folder_is_locked_once_and_says_by_whom(windows, tmp_path):
    assert not is_locked(tmp_path)
    with locked(tmp_path, wait=False):
        assert is_locked(tmp_path)
        with refused("run.locked", str(os.getpid())), locked(tmp_path, wait=False):
            pass
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path) and not windows
    with locked(tmp_path):
        assert len(windows) == 1
    assert not windows


def test_who_waits_for_a_lock_gets_it(windows, tmp_path, monkeypatch):
    held = locked(tmp_path)
    held.__enter__()
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 10:
            held.__exit__(None, None, None)

    monkeypatch.setattr(system.time, "sleep", sleep)
    with locked(tmp_path):
        assert len(naps) == 10 and len(windows) == 1


def test_an_error_releases_the_lock(windows, tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert not windows


def test_files_are_synced_for_writing_and_folders_not_at_all(windows, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    with staged(tmp_path / "x") as beside:
        beside.write_text("new")
    flush(tmp_path)
    assert len(synced) == 1 and synced[0].endswith(".partial") and (tmp_path / "x").read_text() == "new"


def test_a_file_that_somebody_reads_is_replaced_when_they_are_done(windows, tmp_path, monkeypatch):
    tries, replace = [], os.replace

    def refuse(source, target):
        tries.append(target)
        if len(tries) < 3:
            raise PermissionError(13, "Access is denied", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(system.time, "sleep", lambda seconds: None)
    (tmp_path / "new").write_text("new")
    system.rename_over(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new" and len(tries) == 3
    tries.clear()
    monkeypatch.setattr(system, "REPLACE_TRIES", 1)
    with pytest.raises(PermissionError):
        system.rename_over(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_bytes_are_read_and_written_where_they_are_asked_for(platform, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    number = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    assert system.pwrite(number, b"abcdef", 2) == 6
    assert system.pwrite(number, b"XY", 0) == 2
    assert system.pread(number, 3, 4) == b"cde" and system.pread(number, 100, 0) == b"XYabcdef"
    assert system.pread(number, 1, 100) == b""
    os.close(number)


def test_windows_has_no_limit_of_open_files(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert system.open_file_limit() is None


METHODS = [("linux", "fork"), ("freebsd14", "fork"), ("darwin", "spawn"), ("win32", "spawn")]


@pytest.mark.parametrize(("platform", "method"), METHODS)
def test_processes_are_forked_where_that_is_safe(platform, method, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    assert system.start_method() == method
