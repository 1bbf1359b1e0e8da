"""A file replaced as a whole: readers see the old one or the new one. Imports no torch."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitkit.data.archives import naming


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside, flush to the disk, rename over the old file, flush the folder."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    temporary = Path(name)
    try:
        with naming(path):
            write(temporary)
            flush(temporary)
            temporary.chmod(0o666 & ~current_umask())
            os.replace(temporary, path)
            flush(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
