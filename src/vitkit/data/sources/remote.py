"""Shards over HTTP: one range request a sample, retried, and kept in a copy with holes of bounded size.

An order over a whole data set touches every shard in its first batches, so fetching whole shards on first
touch would fetch everything before the first step, and again and again where it does not fit the disk. A
range costs the sample alone. What came is written into a file with holes at the shard's own offsets; the
index's checksum tells a sample from a hole, so there is nothing else to keep, and a torn write is a hole.
"""

import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.data.sources.index import (
    INDEX,
    ReadShard,
    Shard,
    aligned,
    check_columns,
    open_index,
    parse_header,
    parse_line,
)
from vitkit.errors import Error
from vitkit.io.cache import cache_folder, trim
from vitkit.io.files import LOCK, locked, sha256
from vitkit.io.http import download, get_range, join


@dataclass(frozen=True)
class Cache:
    """Where what came over the network is kept, and how many bytes of images; 0: none, only indexes."""

    folder: Path = field(default_factory=lambda: cache_folder() / "shards")
    limit: int = 64 * 2**30


def open_remote(address: str, cache: Cache) -> tuple[Path, ReadShard]:
    """The index of shards at an address, as a local file, and how to read a shard there."""
    path = fetch_index(address, cache.folder)
    return path, remote_shards(address, path.parent, cache)


def fetch_index(address: str, folder: Path) -> Path:
    """The index, from the cache if it is still the one at the address; known by its header's SHA-256."""
    place = join(address, INDEX)
    start, total = get_range(place, 0, 4096)
    length, digest = parse_line(start, place)
    path = folder / digest[:32] / INDEX
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        if not path.exists():
            check_length(place, start, length, digest, total)
            partial = path.with_name(INDEX + ".partial")
            download(place, partial, size=total)
            try:
                check_columns(partial)
            except ValueError as error:
                partial.unlink()
                raise Error(f"{place}: damaged on the way ({error})", code="network.changed") from None
            os.replace(partial, path)
    return path


def check_length(place: str, start: bytes, length: int, digest: str, total: int) -> None:
    """Whether a server's file is as long as its own header says, before more than that header is fetched."""
    line = start.find(b"\n") + 1
    if total >= line + length:
        more = max(0, line + length - len(start))
        text = start + (get_range(place, len(start), more)[0] if more else b"")
        size = parse_header(text[line : line + length], digest, place).get("bytes")
        if type(size) is int and total == aligned(line + length) + size:
            return
    why = f"{place}: {total} bytes, which is not what its header says; damaged or cut off"
    raise Error(why, code="data.corrupt")


def remote_shards(address: str, folder: Path, cache: Cache) -> ReadShard:
    """How to read a sample: from the copy if it is there, else by a range request."""
    written = [cache.limit]  # bytes since the cache was last measured; the first write measures it

    def read(shard: Shard, start: int, size: int, crc: int) -> bytes:
        copy = folder / shard.file
        content = recall(copy, start, size) if cache.limit else b""
        if len(content) == size and zlib.crc32(content) == crc:
            return content
        for _ in range(2):  # what is wrong the first time may have been damaged on the way
            content = get_shard(address, shard, start, size)
            if zlib.crc32(content) == crc:
                break
        else:
            return content  # and the index tells what is wrong with it
        if cache.limit:
            with suppress(OSError):  # a full disk costs the copy, not the run
                keep(copy, start, content)
            written[0] += size
            if written[0] > cache.limit // 64:
                written[0] = 0
                trim(cache.folder, cache.limit, pattern="*/*.tar")
        return content

    return read


def get_shard(address: str, shard: Shard, start: int, size: int) -> bytes:
    content, total = get_range(join(address, shard.file), start, size)
    if total != shard.bytes:
        why = f"{total} bytes, its index says {shard.bytes}: cut off or replaced"
        raise Error(f"{join(address, shard.file)}: {why}", code="network.changed")
    return content


def recall(copy: Path, start: int, size: int) -> bytes:
    try:
        file = os.open(copy, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        os.utime(file)  # the least recently used go first
        return os.pread(file, size, start)
    except OSError:
        return b""
    finally:
        os.close(file)


def keep(copy: Path, start: int, content: bytes) -> None:
    file = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(file, content, start)
    finally:
        os.close(file)


def mirror(address: str, folder: Path, *, advance: Callable[[int], None] = lambda count: None) -> Path:
    """All shards of an address, whole, one after the other, checked by SHA-256; the index comes last."""
    index = fetch_index(address, folder)
    for shard in (shard for split in open_index(index)[1].values() for shard in split.shards):
        path = folder / shard.file
        if not (path.exists() and path.stat().st_size == shard.bytes):
            partial = folder / f"{shard.file}.partial"
            download(join(address, shard.file), partial, size=shard.bytes)
            if (digest := sha256(partial)) != shard.sha256:
                partial.unlink()
                why = f"SHA-256 {digest}, its index says {shard.sha256}"
                raise Error(f"{join(address, shard.file)}: {why}", code="network.changed")
            os.replace(partial, path)
        advance(shard.samples)
    os.replace(index, folder / INDEX)
    (index.parent / LOCK).unlink()
    index.parent.rmdir()
    return folder
