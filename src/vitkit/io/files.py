"""Files that appear whole or not at all: readers see the old content or the new one, never a part."""

import fcntl
import hashlib
import io
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from vitkit.errors import Error

PARTIAL = ".partial"  # how the name of a file ends while it is being written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error of writing names the file: the system's own error of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def staged(path: Path, *, durable: bool = True, alone: bool = False) -> Iterator[Path]:
    """A new name beside the file; what is written there replaces it at the end, unless an error comes first.

    durable: the content is on the disk before the rename, and the rename before this returns; not needed
    where losing the file costs only time. alone: no other process writes the file, so the name is always the
    same, and what a killed process has left there is overwritten.
    """
    own = "" if alone else f".{uuid4().hex[:8]}"
    temporary = path.with_name(f".{path.name}{own}{PARTIAL}")
    try:
        with naming(path):
            yield temporary
            if durable:
                flush(temporary)
            os.replace(temporary, path)
            if durable:
                flush(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def replaced(path: Path) -> Iterator[io.BufferedRandom]:
    """A file to write, for whoever holds the lock of its folder; it has its name when it is whole."""
    with staged(path, alone=True) as temporary, temporary.open("w+b") as file:
        yield file


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Replace a file by what a function writes to the name that it is given."""
    with staged(path) as temporary:
        write(temporary)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
