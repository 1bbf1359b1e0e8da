"""The user's cache folder, and size limits with least-recently-used eviction."""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from vitkit.io.files import PARTIAL

MAKING = ".making-"  # prefix of a folder that is still being written
GONE = ".gone-"  # prefix of a folder that is being removed
HOUR = 3600.0  # seconds after which an unfinished entry belongs to a dead process and may be evicted


def cache_folder() -> Path:
    """vitkit's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit"


@dataclass(frozen=True, order=True)
class Entry:
    """A file or folder of a cache, with its size at the time of measurement."""

    used: int  # modification time in nanoseconds; many file systems do not record access times
    path: Path
    size: int
    making: bool  # the entry, or a file in it, is still being written


def touch(path: Path) -> None:
    """Mark an entry as just used. A missing entry, or one of another user, is ignored."""
    with suppress(OSError):
        os.utime(path)


def trim(folder: Path, keep_bytes: int, using: Path | None = None, pattern: str = "*") -> None:
    """Remove the least recently used entries until at most `keep_bytes` are left, but never `using`.

    Entries are the paths in the folder that match the pattern. Other processes may use, write and trim the
    same folder at the same time. Links and their targets stay.
    """
    entries = sorted(list_entries(folder, pattern))
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total <= keep_bytes:
            return
        in_use = using is not None and entry.path.name == using.name
        if not in_use and not entry.making and remove(entry):
            total -= entry.size


def list_entries(folder: Path, pattern: str = "*") -> Iterator[Entry]:
    """All entries; also finishes the removals that a killed process has left behind."""
    with suppress(OSError):  # a folder is missing, or this user may not read it
        for path in list(folder.glob(pattern)):
            if path.name.startswith(GONE):
                shutil.rmtree(path, ignore_errors=True)
            elif entry := measure(path):
                yield entry


def measure(path: Path) -> Entry | None:
    """The entry at a path, or None if it is a link or special file or no longer exists."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return None
    files = [(path.name, status), *walk(path)]
    size = sum(size_of(file) for _, file in files if stat.S_ISREG(file.st_mode))
    return Entry(status.st_mtime_ns, path, size, any(being_written(name, file) for name, file in files))


def size_of(status: os.stat_result) -> int:
    """The bytes a file takes on disk, without its holes, where the file system reports blocks."""
    blocks = getattr(status, "st_blocks", 0)
    return min(status.st_size, blocks * 512) if blocks else status.st_size


def walk(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The name and status of everything below a folder, without following links."""
    for root, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(OSError):
                yield name, os.lstat(os.path.join(root, name))


def being_written(name: str, status: os.stat_result) -> bool:
    unfinished = name.startswith(MAKING) or name.endswith(PARTIAL)
    return unfinished and abs(time.time() - status.st_mtime) < HOUR  # a file server's clock may be ahead


def remove(entry: Entry) -> bool:
    """Remove an entry; False if it was used since it was measured, and so stays."""
    try:
        status = entry.path.lstat()
        if status.st_mtime_ns != entry.used:
            return False
        if stat.S_ISDIR(status.st_mode):
            renamed = entry.path.with_name(f"{GONE}{uuid4().hex}")
            entry.path.rename(renamed)  # first, so that no other process sees a half-removed folder
            shutil.rmtree(renamed, ignore_errors=True)
        else:
            entry.path.unlink()
    except OSError:  # already removed by another process, or not removable: do not evict others in its place
        pass
    return True
