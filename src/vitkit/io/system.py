"""What differs between Linux, macOS and Windows: file flags and positions, locks, signals."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

if sys.platform == "win32":
    READ = os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT
    UPDATE = os.O_RDWR | os.O_BINARY | os.O_NOINHERIT
    NO_LINK = 0
    STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
    RELOAD_SIGNALS: tuple[signal.Signals, ...] = ()
    KILLED = signal.SIGTERM  # what the exit code of a killed process says
else:
    READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe does not block
    UPDATE = os.O_RDWR | os.O_CLOEXEC
    NO_LINK = os.O_NOFOLLOW
    STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    RELOAD_SIGNALS = (signal.SIGHUP,)
    KILLED = signal.SIGKILL

LOCKED_BYTE = 2**30  # Windows locks bytes, also past the end; nobody could read a locked owner
LOCK_POLL = 0.1  # seconds
LOCK_TRIES = 3  # on Windows, since `held` takes the lock for a moment
REPLACE_TRIES = 40  # on Windows, where a file that somebody reads cannot be replaced
position = threading.Lock()  # of file positions, where there is no pread


def start_method() -> str:
    """How worker processes start: forked, but not where system libraries do not survive it, or there is none.

    >>> start_method() in ("fork", "spawn")
    True
    """
    return "spawn" if sys.platform in ("win32", "darwin") else "fork"


def pread(number: int, size: int, start: int) -> bytes:
    """Read at an offset; threads may do so at the same time."""
    if sys.platform != "win32":
        return os.pread(number, size, start)
    with position:
        os.lseek(number, start, os.SEEK_SET)
        return os.read(number, size)


def pwrite(number: int, content: Any, start: int) -> int:
    """Write at an offset; threads may do so at the same time."""
    if sys.platform != "win32":
        return os.pwrite(number, content, start)
    with position:
        os.lseek(number, start, os.SEEK_SET)
        return os.write(number, content)


def rename_over(source: Path, target: Path) -> None:
    """Rename a file over another; on Windows wait a little for those who read the old one."""
    for _ in range(REPLACE_TRIES if sys.platform == "win32" else 0):
        with suppress(PermissionError):
            return os.replace(source, target)
        time.sleep(0.05)
    os.replace(source, target)


def acquire(file: IO[Any], *, wait: bool) -> bool:
    """Lock a file; False if another process has it and we do not wait."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
    import msvcrt

    left = LOCK_TRIES
    while not lock_byte(file, msvcrt.LK_NBLCK):
        left -= not wait
        if not left:
            return False
        time.sleep(LOCK_POLL)
    return True


def release(file: IO[Any]) -> None:
    """Unlock a file before it is closed; closing it suffices but on Windows."""
    if sys.platform == "win32":
        import msvcrt

        lock_byte(file, msvcrt.LK_UNLCK)


def held(file: IO[Any]) -> bool:
    """Whether some process has locked a file."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    import msvcrt

    if not lock_byte(file, msvcrt.LK_NBLCK):
        return True
    release(file)
    return False


def lock_byte(file: IO[Any], mode: int) -> bool:
    """Lock or unlock the byte that stands for a file, as Windows can; False if another process has it."""
    if sys.platform == "win32":
        import msvcrt

        number = file.fileno()
        before = os.lseek(number, 0, os.SEEK_CUR)
        os.lseek(number, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(number, mode, 1)
        except OSError:
            return False
        finally:
            os.lseek(number, before, os.SEEK_SET)
    return True


def at_fork(act: Any) -> None:
    """Call a function in every forked process, where there is fork."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=act)


def end_process() -> None:
    """End this process at once, without any cleaning up."""
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def open_file_limit() -> int | None:
    """The files that this process may have open; None where there is no such limit."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
