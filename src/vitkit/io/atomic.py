"""Files that appear whole or not at all: readers see the old content or the new one, never a part."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

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
