"""Atomic file writes and folder locks: readers see the old content or the new, never a partial file."""

import hashlib
import io
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from vitkit.errors import Error
from vitkit.io.system import UPDATE, acquire, at_fork, held, release, rename_over

PARTIAL = ".partial"  # suffix of a file that is still being written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that lacks one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def staged(path: Path, *, durable: bool = True, alone: bool = False) -> Iterator[Path]:
    """A temporary path next to the file, which replaces the file at the end unless an error is raised.

    durable: sync the content to disk before the rename and the rename before returning; not needed for
    files that can be made again. alone: no other process writes this file, so the temporary name is fixed
    and what a killed process has left there is overwritten.
    """
    unique = "" if alone else f".{uuid4().hex[:8]}"
    temporary = path.with_name(f".{path.name}{unique}{PARTIAL}")
    try:
        with naming(path):
            yield temporary
            if durable:
                flush(temporary)
            rename_over(temporary, path)
            if durable:
                flush(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def replaced(path: Path) -> Iterator[io.BufferedRandom]:
    """Write a file that gets its name when it is complete; the caller must hold the folder's lock."""
    with staged(path, alone=True) as temporary, temporary.open("w+b") as file:
        yield file


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Replace a file atomically by what `write` writes to the path it is called with."""
    with staged(path) as temporary:
        write(temporary)


def flush(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk; Windows syncs no folders."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, UPDATE if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content as a hex string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LOCK = ".lock"  # name of the lock file, which is never removed
OPEN_LOCKS: set[IO[str]] = set()  # lock files that this process has open


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the folder's lock; where another process has it, wait or raise an error that names the process."""
    path = folder / LOCK
    with path.open("a+", encoding="utf-8") as file:
        if not acquire(file, wait=wait):
            file.seek(0)
            raise Error(f"{folder} is in use by process {file.read().strip()}", code="run.locked")
        OPEN_LOCKS.add(file)
        try:
            if not wait:
                write_owner(file, path)
            yield
        finally:
            OPEN_LOCKS.discard(file)
            release(file)


def write_owner(file: IO[str], path: Path) -> None:
    """Record the process that holds the lock, for the error message of others."""
    with naming(path):
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()


def is_locked(folder: Path) -> bool:
    """Whether some process holds the folder's lock."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as file:
            return held(file)
    except OSError:  # there is no lock file
        return False


def release_after_fork() -> None:
    """Close the parent's locks in a forked process: a data worker that outlives it must not keep them."""
    while OPEN_LOCKS:
        OPEN_LOCKS.pop().close()


at_fork(release_after_fork)
