"""Content hashes of images, cached for as long as a file is unchanged."""

import hashlib
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import MAX_BYTES, read
from vitkit.data.sources.archives import Positioned
from vitkit.io.cache import cache_folder
from vitkit.io.files import locked, replaced

SIZE = 32  # bytes of a hash
END = 16 * 1024  # bytes at each end of a large file that enter the first half of its hash
IN_MEMORY = 4 * 2**20  # larger files are hashed in chunks
MOST = 2_000_000  # cached files, in 96 MB; the oldest entries are dropped first
FRESH = 2 * 10**9  # nanoseconds: the coarsest file system clock, within which an edit may go unnoticed
CHECKSUM = 32  # bytes
ROW: Any = np.dtype([("key", "V16"), ("hash", f"V{SIZE}")])


def content_hash(content: bytes | np.ndarray) -> bytes:
    """The 32-byte hash of an image: 16 bytes from the size and both ends, then 16 from the whole content.

    The first half sorts images as every version of vitkit has done, so that a split by content stays the
    same across versions; the second half distinguishes files that differ only in the middle.
    """
    if isinstance(content, np.ndarray):
        data, whole = content.tobytes(), hashlib.sha256(repr(content.shape).encode())
        whole.update(data)
        return hashlib.blake2b(data, digest_size=16).digest() + whole.digest()[:16]
    size = len(content)
    ends = content if size <= 2 * END else content[:END] + content[-END:]
    return hash_ends(ends, size) + hashlib.sha256(content).digest()[:16]


def hash_ends(ends: bytes, size: int) -> bytes:
    """The first half of a content hash."""
    return hashlib.blake2b(ends, digest_size=16, key=b"%d" % size if size > 2 * END else b"").digest()


def file_hash(path: Path) -> bytes:
    """The content hash of a file, which is read only if it is not in the cache or has changed."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return HASH_CACHE.get(identity(path, status)) or hash_file(path)
    return content_hash(read(path))  # raises a BadImage with the reason


def hash_file(path: Path) -> bytes:
    """Read and hash a file; the hash is cached unless a later edit could go unnoticed."""
    now = time.time_ns()
    with Positioned(path) as file:
        before = os.fstat(file.number)
        small = file.size <= IN_MEMORY
        digest = content_hash(file.read_at(0, file.size)) if small else large_file_hash(file)
        key, changed = identity(path, before), max(before.st_mtime_ns, before.st_ctime_ns)
        if key == identity(path, os.fstat(file.number)) and changed < now - FRESH:
            HASH_CACHE.add(key, digest)
    return digest


def large_file_hash(file: Positioned) -> bytes:
    """The content hash of a file, read in chunks."""
    ends = file.read_at(0, END) + file.read_at(file.size - END, END)
    if file.size > MAX_BYTES:  # never decoded, so the second half does not matter
        return hash_ends(ends, file.size) + bytes(16)
    return hash_ends(ends, file.size) + hashlib.file_digest(file, "sha256").digest()[:16]


@dataclass(frozen=True)
class Files:
    """The files below a folder, by name."""

    folder: Path

    def read(self, name: str) -> bytes:
        return read(self.folder / name)

    def digest(self, name: str) -> bytes:
        return file_hash(self.folder / name)

    def size(self, name: str) -> int:
        return os.stat(os.path.join(self.folder, name)).st_size  # faster than joining paths by pathlib


def identity(path: Path, status: os.stat_result) -> bytes:
    """A cache key that changes when a file is edited, replaced or moved; ctime catches a restored mtime."""
    facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    name = os.fsencode(os.path.abspath(path))
    return hashlib.blake2b(struct.pack("<qqqQ", *facts) + name, digest_size=16).digest()


class HashCache:
    """Content hashes by file identity, in a file that all processes share; losing it only costs time.

    The file has the rows, then their SHA-256; a truncated or damaged file counts as empty.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: np.ndarray | None = None  # as stored, sorted by `prefixes`; None: not loaded
        self.prefixes = np.empty(0, np.uint64)
        self.new: dict[bytes, bytes] = {}
        self.writes = True

    @property
    def path(self) -> Path:
        return cache_folder() / "hashes" / "files"

    def get(self, key: bytes) -> bytes | None:
        with self.lock:
            if self.rows is None:
                rows = self.stored()
                prefixes = key_prefixes(rows)
                order = np.argsort(prefixes)
                self.rows, self.prefixes = rows[order], prefixes[order]
            rows, prefixes = self.rows, self.prefixes
        row = int(np.searchsorted(prefixes, np.frombuffer(key, "<u8", 1)[0]))
        if row < len(rows) and rows["key"][row].tobytes() == key:
            return rows["hash"][row].tobytes()
        return self.new.get(key)

    def add(self, key: bytes, digest: bytes) -> None:
        if len(self.new) < MOST:
            self.new[key] = digest

    def save(self) -> None:
        """Write new entries, and unload the others."""
        if not self.writes:
            return
        with self.lock:
            new, self.new, self.rows = self.new, {}, None
        if not new:
            return
        with suppress(OSError, RuntimeError):  # a full disk or no home folder only costs time
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent):
                rows = np.concatenate([self.stored(), np.array(list(new.items()), ROW)])
                _, first = np.unique(key_prefixes(rows), return_index=True)  # others may have added them
                content = rows[np.sort(first)][-MOST:].tobytes()
                with replaced(self.path) as file:
                    file.write(content + hashlib.sha256(content).digest())

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """A context in which nothing is written to disk."""
        before, self.writes = self.writes, False
        try:
            yield
        finally:
            self.writes = before

    def stored(self) -> np.ndarray:
        with suppress(OSError, ValueError, RuntimeError):
            with Positioned(self.path) as file:
                content = file.read_at(0, MOST * ROW.itemsize + CHECKSUM)
            rows, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
            if len(rows) % ROW.itemsize == 0 and hashlib.sha256(rows).digest() == checksum:
                return np.frombuffer(rows, ROW)
        return np.empty(0, ROW)


def key_prefixes(rows: np.ndarray) -> np.ndarray:
    """The first 8 bytes of each key as integers, (N,), for binary search."""
    return np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, 2)[:, 0].copy()


HASH_CACHE = HashCache()
