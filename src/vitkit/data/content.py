"""What tells images apart: a hash of all their bytes, remembered for as long as a file is unchanged."""

import hashlib
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import MAX_BYTES, read
from vitkit.data.sources.archives import Positioned
from vitkit.io.cache import cache_folder
from vitkit.io.files import locked, replaced

SIZE = 32  # bytes of a mark
END = 16 * 1024  # bytes at each end of a large file that order it
AT_ONCE = 4 * 2**20  # bytes of a file that a thread holds in memory
MOST = 2_000_000  # files that are remembered, in 96 MB; those remembered first go first
FRESH = 2 * 10**9  # nanoseconds: the coarsest clock of a file system, within which an edit leaves no trace
SEAL = 32
ROW: Any = np.dtype([("key", "V16"), ("mark", f"V{SIZE}")])


def content_hash(content: bytes | np.ndarray) -> bytes:
    """32 bytes that tell images apart: 16 of a file's size and both ends, then 16 of everything in it.

    The first half orders images as every version of vitkit has done, so that a split by content stays the
    same from version to version; the second half tells files apart that differ only in the middle.
    """
    if isinstance(content, np.ndarray):
        data, whole = content.tobytes(), hashlib.sha256(repr(content.shape).encode())
        whole.update(data)
        return hashlib.blake2b(data, digest_size=16).digest() + whole.digest()[:16]
    size = len(content)
    ends = content if size <= 2 * END else content[:END] + content[-END:]
    return outline(ends, size) + hashlib.sha256(content).digest()[:16]


def outline(ends: bytes, size: int) -> bytes:
    return hashlib.blake2b(ends, digest_size=16, key=b"%d" % size if size > 2 * END else b"").digest()


def file_hash(path: Path) -> bytes:
    """The mark of a file's content, which is read only where the file is not known or has changed."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return REMEMBERED.get(identity(path, status)) or hash_file(path)
    return content_hash(read(path))  # whose error says what is wrong


def hash_file(path: Path) -> bytes:
    """The mark of a file; it is remembered unless the file may change without a trace."""
    now = time.time_ns()
    with Positioned(path) as file:
        before = os.fstat(file.number)
        small = file.size <= AT_ONCE
        found = content_hash(os.pread(file.number, file.size, 0)) if small else large_file_hash(file)
        key, changed = identity(path, before), max(before.st_mtime_ns, before.st_ctime_ns)
        if key == identity(path, os.fstat(file.number)) and changed < now - FRESH:
            REMEMBERED.add(key, found)
    return found


def large_file_hash(file: Positioned) -> bytes:
    """The mark of a file that is not held in memory as a whole."""
    ends = os.pread(file.number, END, 0) + os.pread(file.number, END, file.size - END)
    if file.size > MAX_BYTES:  # which no image may have: it is never used
        return outline(ends, file.size) + bytes(16)
    return outline(ends, file.size) + hashlib.file_digest(file, "sha256").digest()[:16]


def identity(path: Path, status: os.stat_result) -> bytes:
    """What changes when a file is edited, replaced or moved; ctime shows edits whose mtime was put back."""
    facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    name = os.fsencode(os.path.abspath(path))
    return hashlib.blake2b(struct.pack("<qqqQ", *facts) + name, digest_size=16).digest()


class HashCache:
    """Marks by a file's identity, kept in a file that all processes share; to lose it only costs time.

    The file holds rows, then their SHA-256; one that is cut or damaged counts as empty.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.rows: np.ndarray | None = None  # as stored, in the order of `starts`; None: not loaded
        self.starts = np.empty(0, np.uint64)
        self.new: dict[bytes, bytes] = {}
        self.writes = True

    @property
    def path(self) -> Path:
        return cache_folder() / "hashes" / "files"

    def get(self, key: bytes) -> bytes | None:
        with self.turn:
            if self.rows is None:
                rows = self.stored()
                starts = beginnings(rows)
                order = np.argsort(starts)
                self.rows, self.starts = rows[order], starts[order]
            rows, starts = self.rows, self.starts
        at = int(np.searchsorted(starts, np.frombuffer(key, "<u8", 1)[0]))
        if at < len(rows) and rows["key"][at].tobytes() == key:
            return rows["mark"][at].tobytes()
        return self.new.get(key)

    def add(self, key: bytes, found: bytes) -> None:
        if len(self.new) < MOST:
            self.new[key] = found

    def save(self) -> None:
        """Write what is new, and forget what was loaded."""
        if not self.writes:
            return
        with self.turn:
            new, self.new, self.rows = self.new, {}, None
        if not new:
            return
        with suppress(OSError, RuntimeError):  # no room, or no home: it costs the next process time
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent):
                rows = np.concatenate([self.stored(), np.array(list(new.items()), ROW)])
                _, first = np.unique(beginnings(rows), return_index=True)  # another process may have them
                content = rows[np.sort(first)][-MOST:].tobytes()
                with replaced(self.path) as file:
                    file.write(content + hashlib.sha256(content).digest())

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, nothing is written: what is new stays in the memory of this process."""
        before, self.writes = self.writes, False
        try:
            yield
        finally:
            self.writes = before

    def stored(self) -> np.ndarray:
        with suppress(OSError, ValueError, RuntimeError):
            with Positioned(self.path) as file:
                content = os.pread(file.number, MOST * ROW.itemsize + SEAL, 0)
            rows, seal = content[:-SEAL], content[-SEAL:]
            if len(rows) % ROW.itemsize == 0 and hashlib.sha256(rows).digest() == seal:
                return np.frombuffer(rows, ROW)
        return np.empty(0, ROW)


def beginnings(rows: np.ndarray) -> np.ndarray:
    """The first 8 bytes of each key, (N,): enough to look one up."""
    return np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, 2)[:, 0].copy()


REMEMBERED = HashCache()
