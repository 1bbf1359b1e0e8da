"""A lock on a folder, held by one process at a time and free again when that process is gone."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vitkit.errors import Error
from vitkit.io.atomic import naming

LOCK = ".lock"  # the file in the folder; it stays there
HELD: set[IO[str]] = set()  # by this process


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Inside, no other process has the folder; the others wait, or are refused with who has it."""
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise Error(f"{folder} is in use by process {file.read().strip()}", code="run.locked") from None
        HELD.add(file)
        try:
            if not wait:
                sign(file, path)
            yield
        finally:
            HELD.discard(file)


def sign(file: IO[str], path: Path) -> None:
    """Write down who has the lock, for those who are refused."""
    with naming(path):
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()


def is_locked(folder: Path) -> bool:
    """Whether a process has the folder now."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file
        return False
    return False


def let_go() -> None:
    """Give up the locks in a forked process: a data worker that outlives its parent must not keep them."""
    while HELD:
        HELD.pop().close()


os.register_at_fork(after_in_child=let_go)
