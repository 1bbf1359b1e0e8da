"""Shards over HTTP: one range request per sample, retried, and cached in sparse files of bounded total size.

Shuffled training touches every shard in its first batches, so downloading whole shards on first use would
download everything before the first step, and repeatedly if it does not fit on the disk. A range request
transfers only the sample. Samples are written to a sparse local file at the offsets of the shard; the CRC in
the index tells a cached sample from a hole, so no other bookkeeping is needed and a torn write is harmless.
"""

import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitkit.data.sources.index import (
    INDEX,
    Shard,
    aligned,
    check_columns,
    open_index,
    parse_header,
    parse_line,
)
from vitkit.data.sources.openers import Cache, Opener
from vitkit.data.sources.shard_folders import open_shards
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.io.cache import trim
from vitkit.io.files import LOCK, locked, sha256
from vitkit.io.http import download, get_range, join
from vitkit.io.system import NO_LINK, READ, UPDATE, pread, pwrite


def open_remote(address: str, cache: Cache) -> dict[str, Source]:
    """The splits of the shards at an address."""
    path = fetch_index(address, cache.folder)
    return open_shards(address, path, RemoteShards(address, path.parent, cache, cache.limit))


def fetch_index(address: str, folder: Path) -> Path:
    """The local copy of the index; downloaded if the SHA-256 of its header is not in the cache yet."""
    url = join(address, INDEX)
    start, total = get_range(url, 0, 4096)
    length, digest = parse_line(start, url)
    path = folder / digest[:32] / INDEX
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        if not path.exists():
            check_length(url, start, length, digest, total)
            partial = path.with_name(INDEX + ".partial")
            download(url, partial, size=total)
            try:
                check_columns(partial)
            except ValueError as error:
                partial.unlink()
                raise Error(f"{url}: damaged in transfer ({error})", code="network.changed") from None
            os.replace(partial, path)
    return path


def check_length(url: str, start: bytes, length: int, digest: str, total: int) -> None:
    """Compare the size of the remote file with its header, before more than the header is downloaded."""
    line = start.find(b"\n") + 1
    if total >= line + length:
        more = max(0, line + length - len(start))
        text = start + (get_range(url, len(start), more)[0] if more else b"")
        size = parse_header(text[line : line + length], digest, url).get("bytes")
        if type(size) is int and total == aligned(line + length) + size:
            return
    raise Error(
        f"{url}: {total} bytes, which does not match its header; damaged or truncated", code="data.corrupt"
    )


@dataclass
class RemoteShards:
    """Reads a sample from the cache or, if it is not there, by a range request."""

    address: str
    folder: Path
    cache: Cache
    written: int  # bytes since the cache was last measured; the first write measures it

    def __call__(self, shard: Shard, start: int, size: int, crc: int) -> bytes:
        copy, limit = self.folder / shard.file, self.cache.limit
        content = read_cached(copy, start, size) if limit else b""
        if len(content) == size and zlib.crc32(content) == crc:
            return content
        for _ in range(2):  # a wrong checksum may be a transfer error, so try once more
            content = get_shard(self.address, shard, start, size)
            if zlib.crc32(content) == crc:
                break
        else:
            return content  # Index.fetch reports the mismatch
        if limit:
            with suppress(OSError):  # a full disk must not end the run
                write_cached(copy, start, content)
            self.written += size
            if self.written > limit // 64:
                self.written = 0
                trim(self.cache.folder, limit, pattern="*/*.tar")
        return content


def get_shard(address: str, shard: Shard, start: int, size: int) -> bytes:
    content, total = get_range(join(address, shard.file), start, size)
    if total != shard.bytes:
        raise Error(
            f"{join(address, shard.file)}: {total} bytes, but its index says {shard.bytes}; truncated or "
            "replaced",
            code="network.changed",
        )
    return content


def read_cached(copy: Path, start: int, size: int) -> bytes:
    try:
        file = os.open(copy, READ | NO_LINK)
    except OSError:
        return b""
    try:
        os.utime(file if os.utime in os.supports_fd else copy)  # the cache evicts the least recently used
        return pread(file, size, start)
    except OSError:
        return b""
    finally:
        os.close(file)


def write_cached(copy: Path, start: int, content: bytes) -> None:
    file = os.open(copy, UPDATE | os.O_CREAT | NO_LINK, 0o644)
    try:
        pwrite(file, content, start)
    finally:
        os.close(file)


def mirror(address: str, folder: Path, *, advance: Callable[[int], None] = lambda count: None) -> Path:
    """Download all shards of an address one by one and check their SHA-256; the index is moved in last."""
    index = fetch_index(address, folder)
    for shard in (shard for split in open_index(index)[1].values() for shard in split.shards):
        path = folder / shard.file
        if not (path.exists() and path.stat().st_size == shard.bytes):
            partial = folder / f"{shard.file}.partial"
            download(join(address, shard.file), partial, size=shard.bytes)
            if (digest := sha256(partial)) != shard.sha256:
                partial.unlink()
                raise Error(
                    f"{join(address, shard.file)}: SHA-256 {digest}, but its index says {shard.sha256}",
                    code="network.changed",
                )
            os.replace(partial, path)
        advance(shard.samples)
    os.replace(index, folder / INDEX)
    (index.parent / LOCK).unlink()
    index.parent.rmdir()
    return folder


OPENER = Opener(
    description="an http(s) address of shards",
    matches=lambda place: re.match(r"https?://", place) is not None,
    open=lambda place, cache: open_remote(place, cache or Cache()),
    order=10,
)
