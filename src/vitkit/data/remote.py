"""Shards over HTTP: one range request a sample, retried, and kept in a copy with holes of bounded size.

An order over a whole data set touches every shard in its first batches, so fetching whole shards on first
touch would fetch everything before the first step, and again and again where it does not fit the disk. A
range costs the sample alone. What came is written into a file with holes at the shard's own offsets; the
index's checksum tells a sample from a hole, so there is nothing else to keep, and a torn write is a hole.
"""

import hashlib
import http.client
import os
import random
import re
import ssl
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from vitkit.data.archives import LOCK, locked
from vitkit.data.content import cache_folder
from vitkit.data.index import (
    INDEX,
    ReadShard,
    Shard,
    aligned,
    check_columns,
    open_index,
    parse_header,
    parse_line,
)

TIMEOUT = 30.0  # seconds without a byte
SLOWEST = 16 * 1024  # bytes a second, below which a request is given up
TRIES = 8
PAUSE = 1.0  # seconds, doubled from try to try
LONGEST = 60.0
REDIRECTS = 5
CHUNK = 16 * 2**20
AGAIN = (408, 425, 429, 500, 502, 503, 504)
jitter = random.SystemRandom()  # not the generator that training draws from
kept = threading.local()  # a thread's open connections


class RemoteError(OSError):
    """A server that could not be reached, or did not send, for several tries."""


class Again(Exception):
    """What may go better the next time, and how many seconds the server wants to be left alone."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


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
            download(place, partial, total)
            try:
                check_columns(partial)
            except ValueError as error:
                partial.unlink()
                raise ValueError(f"{place}: damaged on the way ({error})") from None
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
    raise ValueError(f"{place}: {total} bytes, which is not what its header says; damaged or cut off")


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
                sweep(cache)
        return content

    return read


def get_shard(address: str, shard: Shard, start: int, size: int) -> bytes:
    content, total = get_range(join(address, shard.file), start, size)
    if total != shard.bytes:
        raise ValueError(
            f"{join(address, shard.file)}: {total} bytes, its index says {shard.bytes}: cut off or replaced"
        )
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


def sweep(cache: Cache) -> None:
    """Remove the least recently used copies, of any data set, until the rest fits."""
    found = []
    for copy in cache.folder.glob("*/*.tar"):
        with suppress(OSError):
            status = copy.stat()
            found.append((status.st_mtime, status.st_blocks * 512, copy))
    total = sum(size for _, size, _ in found)
    for _, size, copy in sorted(found):
        if total <= cache.limit:
            return
        with suppress(OSError):
            copy.unlink()
        total -= size


def mirror(address: str, folder: Path, *, advance: Callable[[int], None] = lambda count: None) -> Path:
    """All shards of an address, whole, one after the other, checked by SHA-256; the index comes last."""
    index = fetch_index(address, folder)
    for shard in (shard for split in open_index(index)[1].values() for shard in split.shards):
        path = folder / shard.file
        if not (path.exists() and path.stat().st_size == shard.bytes):
            partial = folder / f"{shard.file}.partial"
            download(join(address, shard.file), partial, shard.bytes)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                partial.unlink()
                raise ValueError(
                    f"{join(address, shard.file)}: SHA-256 {found}, its index says {shard.sha256}"
                )
            os.replace(partial, path)
        advance(shard.samples)
    os.replace(index, folder / INDEX)
    (index.parent / LOCK).unlink()
    index.parent.rmdir()
    return folder


def download(address: str, path: Path, total: int) -> None:
    """Append what is still missing of a file, by ranges."""
    with path.open("ab") as file:
        if file.tell() > total:
            file.truncate(0)
        for start in range(file.tell(), total, CHUNK):
            content, found = get_range(address, start, min(CHUNK, total - start))
            if found != total:
                raise ValueError(f"{address}: {found} bytes, not {total}: replaced while it was fetched")
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def join(address: str, name: str) -> str:
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name), fragment=""))


def get_range(address: str, start: int, size: int) -> tuple[bytes, int]:
    """Bytes of a file, and the length of the whole; tried again where that may help."""
    for attempt in range(TRIES):
        after = 0.0
        try:
            return receive(address, start, size)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"{address}: {error.verify_message}: not fetched") from None
        except Again as error:
            reason, after = str(error), error.after
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        getattr(kept, "connections", {}).clear()
        if attempt + 1 < TRIES:
            time.sleep(min(LONGEST, max(after, PAUSE * 2**attempt * jitter.uniform(0.5, 1.5))))
    raise RemoteError(f"cannot fetch {address} after {TRIES} tries: {reason}")


def receive(address: str, start: int, size: int) -> tuple[bytes, int]:
    """One request, and those it is sent on to."""
    here = address
    for _ in range(REDIRECTS + 1):
        connection = connect(here)
        parts = urlsplit(here)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {"Range": f"bytes={start}-{start + size - 1}", "User-Agent": "vitkit"}
        connection.request("GET", target, headers=headers)
        with connection.getresponse() as response:
            if response.status not in (301, 302, 303, 307, 308):
                return body(response, address, start, size)
            there = urljoin(here, response.getheader("Location") or "")
            if response.length is None or response.length > 2**16 or len(response.read()) > 2**16:
                kept.connections.clear()  # else it can be used again, its body having been read
        if urlsplit(there).scheme not in ("https", parts.scheme):
            raise ValueError(f"{address}: sent on to {there!r}, which is not followed")
        here = there
    raise ValueError(f"{address}: sent on more than {REDIRECTS} times")


def connect(address: str) -> http.client.HTTPConnection:
    """This thread's connection to a server; a forked process must not use its parent's."""
    if getattr(kept, "process", None) != os.getpid():
        kept.process, kept.connections = os.getpid(), {}
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address}: only http and https addresses are fetched")
    place = (parts.scheme, parts.hostname, parts.port)
    if place not in kept.connections:
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        kept.connections[place] = kind(parts.hostname, parts.port, timeout=TIMEOUT)
    return kept.connections[place]


def body(response: http.client.HTTPResponse, address: str, start: int, size: int) -> tuple[bytes, int]:
    """The bytes that were asked for, all of them."""
    said = f"the server says {response.status} {response.reason}"
    if response.status in AGAIN:
        after = response.getheader("Retry-After") or ""
        raise Again(said, float(after) if after.isdigit() else 0.0)
    if response.status == 416:
        raise ValueError(f"{address}: has no byte {start}: it is shorter than its index says")
    if response.status not in (200, 206):
        raise ValueError(f"{address}: {said}")
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.getheader("Content-Range") or "")
        first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
    else:  # all of it, which is right for a file that is asked for as a whole
        first, total = 0, -1 if response.length is None else response.length
        last = total - 1
    if first != start or last != min(start + size, total) - 1:
        raise ValueError(f"{address}: asked for {size} bytes from {start}, the server sends {first}-{last}; "
                         "it must know byte ranges")  # fmt: skip
    content, ends = bytearray(), time.monotonic() + TIMEOUT + size / SLOWEST
    while len(content) <= last - first and (
        part := response.read1(min(2**20, last - first + 1 - len(content)))
    ):
        content += part
        if time.monotonic() > ends:
            raise Again(f"{len(content)} of {last - first + 1} bytes after {TIMEOUT + size / SLOWEST:.0f} s")
    if len(content) != last - first + 1:
        raise Again(f"{len(content)} of {last - first + 1} bytes came")
    return bytes(content), total
