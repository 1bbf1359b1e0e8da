"""The user's cache folder, and limits on what is in it: the least recently used entries go first."""

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

MAKING = ".making-"  # how the name of a folder begins while its content is being written
GONE = ".gone-"  # how the name of a folder begins that is being removed
HOUR = 3600.0  # seconds for which what is being written is left alone; then its process has died


def cache_folder() -> Path:
    """The user's cache folder of vitkit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit"


@dataclass(frozen=True, order=True)
class Entry:
    """A file or folder of a cache, as it was when it was measured."""

    used: int  # nanoseconds; its own time of change, as times of access are not kept everywhere
    path: Path
    size: int
    making: bool  # it, or something in it, is being written


def touch(path: Path) -> None:
    """An entry is used: it becomes the youngest; where it is missing or another user's, nothing happens."""
    with suppress(OSError):
        os.utime(path)


def trim(folder: Path, keep_bytes: int, using: Path | None = None, pattern: str = "*") -> None:
    """Remove the least recently used entries until at most so many bytes are left; never the one in use.

    Entries are what the pattern matches in the folder. Other processes may use, write and trim the same
    folder meanwhile. Links and their targets stay.
    """
    entries = sorted(measured(folder, pattern))
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total <= keep_bytes:
            return
        in_use = using is not None and entry.path.name == using.name
        if not in_use and not entry.making and remove(entry):
            total -= entry.size


def measured(folder: Path, pattern: str = "*") -> Iterator[Entry]:
    """Every entry; what a process left that died while it removed a folder is removed now."""
    with suppress(OSError):  # the folder, or one in it, is not there or not ours
        for path in list(folder.glob(pattern)):
            if path.name.startswith(GONE):
                shutil.rmtree(path, ignore_errors=True)
            elif entry := measure(path):
                yield entry


def measure(path: Path) -> Entry | None:
    """None for a link, a pipe and the like, and for what has gone meanwhile."""
    try:
        own = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(own.st_mode) and not stat.S_ISDIR(own.st_mode):
        return None
    states = [(path.name, own), *inside(path)]
    size = sum(size_of(state) for _, state in states if stat.S_ISREG(state.st_mode))
    return Entry(own.st_mtime_ns, path, size, any(being_written(name, state) for name, state in states))


def size_of(state: os.stat_result) -> int:
    """Bytes of a file without its holes, where the file system says how many blocks it has."""
    return min(state.st_size, state.st_blocks * 512) if state.st_blocks else state.st_size


def inside(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names and states of all that is in a folder, at any depth; no link is followed."""
    for root, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(OSError):
                yield name, os.lstat(os.path.join(root, name))


def being_written(name: str, state: os.stat_result) -> bool:
    named = name.startswith(MAKING) or name.endswith(PARTIAL)
    return named and abs(time.time() - state.st_mtime) < HOUR  # a file server's clock may be ahead


def remove(entry: Entry) -> bool:
    """Whether its bytes no longer count; they do if it was used since it was measured."""
    try:
        own = entry.path.lstat()
        if own.st_mtime_ns != entry.used:
            return False
        if stat.S_ISDIR(own.st_mode):
            gone = entry.path.with_name(f"{GONE}{uuid4().hex}")
            entry.path.rename(gone)  # first, so that nobody finds half a folder
            shutil.rmtree(gone, ignore_errors=True)
        else:
            entry.path.unlink()
    except OSError:  # another process was quicker; or it cannot be removed, and the others shall not pay
        pass
    return True
