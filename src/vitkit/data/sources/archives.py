"""Zip and tar files of images, read in place: nothing is ever extracted."""

import io
import os
import re
import stat
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitkit.data.decode import BadImage
from vitkit.data.names import hidden
from vitkit.data.sources.openers import Opener, file_with_suffix
from vitkit.data.sources.source import Source, open_tree
from vitkit.errors import Error, code_of

MAX_MEMBER = 200 * 2**20  # bytes of one image file
# file names, a function that reads one, names of links and other special members, the size of one in bytes
Members = tuple[list[str], Callable[[str], bytes], list[str], Callable[[str], int]]
MEMBER_CHECKS: list[Callable[[Path, Sequence[str]], None]] = []  # each may reject an archive by its names


class Positioned(io.RawIOBase):
    """A file read with pread, so that processes and threads that share it have no common file position."""

    def __init__(self, path: Path):
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self.number)
        self.size, self.position = status.st_size, 0
        if not stat.S_ISREG(status.st_mode):
            raise Error(f"{path}: not a regular file", code="file.unreadable")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        content = os.pread(self.number, len(buffer), self.position)
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)

    def close(self) -> None:
        if self.number >= 0 and not self.closed:
            os.close(self.number)
        super().close()


def open_zip(path: Path) -> Members:
    """The files of a zip; reads are serialised by a lock."""
    try:
        archive = zipfile.ZipFile(io.BufferedReader(Positioned(path)))
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise Error(
            f"{path}: not a readable zip file ({error})", code=code_of(error, "data.corrupt")
        ) from None
    members: dict[str, zipfile.ZipInfo] = {}
    special: list[str] = []
    for member in archive.infolist():
        name = member.filename.replace("\\", "/")  # some Windows programs write backslashes
        if name.endswith("/") or hidden(name):
            continue
        check_name(path, name)
        if stat.S_ISLNK(member.external_attr >> 16):
            special.append(name)
        elif members.setdefault(name, member) is not member:
            raise Error(
                f"{path}!{name}: two files have this name; keep one and write the zip again",
                code="data.layout",
            )
    lock = threading.Lock()

    def fetch(name: str) -> bytes:
        member = members[name]
        if member.file_size > MAX_MEMBER:
            raise BadImage("too-large", f"{name}: claims {member.file_size} bytes")
        try:
            with lock:
                return archive.read(member)
        except (
            zipfile.BadZipFile,
            OSError,
            RuntimeError,
            NotImplementedError,
            EOFError,
            zlib.error,
        ) as error:
            raise BadImage("unreadable", f"{name}: {error}") from None

    return sorted(members), fetch, special, lambda name: members[name].file_size


def open_tar(path: Path) -> Members:
    """The regular files of an uncompressed tar."""
    spans: dict[str, tuple[int, int]] = {}  # offset and size by name
    special: list[str] = []
    try:
        for m in walk_tar(path):
            if hidden(m.name):
                continue
            if m.isreg() and not m.issparse():
                spans[m.name.removeprefix("./")] = (m.offset_data, m.size)
            elif not m.isdir():
                special.append(m.name)
    except tarfile.ReadError as error:
        if not spans:  # otherwise it is truncated, and fetching the last member reports it
            raise Error(
                f"{path}: not an uncompressed tar file ({error}); unpack a compressed one",
                code="data.corrupt",
            ) from None
    file = Positioned(path)

    def fetch(name: str) -> bytes:
        start, size = spans[name]
        if size > MAX_MEMBER:
            raise BadImage("too-large", f"{path.name}!{name}: claims {size} bytes")
        if start + size > file.size:
            raise BadImage("truncated", f"{path.name}!{name}: claims {size} bytes at {start} of {file.size}")
        return os.pread(file.number, size, start)

    return sorted(spans), fetch, special, lambda name: spans[name][1]


def walk_tar(path: Path) -> Iterator[tarfile.TarInfo]:
    """Every member of an uncompressed tar; an unsafe name or a damaged header is an error."""
    with tarfile.open(path, "r:") as archive:
        while True:
            try:
                member = archive.next()
            except tarfile.ReadError:
                raise
            except (tarfile.TarError, ValueError, OverflowError, RecursionError, KeyError) as error:
                raise Error(
                    f"{path}: damaged tar file at byte {archive.offset} ({error})", code="data.corrupt"
                ) from None
            if member is None:
                break
            archive.members.clear()  # type: ignore[attr-defined]  # a million members would fill the memory
            check_name(path, member.name)
            yield member
        archive.fileobj.seek(archive.offset)
        if archive.fileobj.read(512).strip(b"\0"):
            raise Error(
                f"{path}: damaged tar file: no member begins at byte {archive.offset}", code="data.corrupt"
            )


def check_name(path: Path, name: str) -> None:
    """Reject names that would escape the folder into which the archive is unpacked."""
    if name.startswith("/") or re.match(r"[A-Za-z]:/", name) or ".." in name.split("/") or "\0" in name:
        raise Error(
            f"{path}!{name}: this name points outside the archive; the archive is not read",
            code="data.unsafe",
        )


def open_archive(path: Path) -> dict[str, Source]:
    """Images in class folders within a zip or tar."""
    names, fetch, special, size = open_zip(path) if path.suffix.lower() == ".zip" else open_tar(path)
    for check in MEMBER_CHECKS:
        check(path, names)
    return open_tree(path.name, names, fetch, skipped=special, size=size)


OPENER = Opener(
    description=".zip, .tar",
    matches=file_with_suffix(".zip", ".tar"),
    open=lambda place, cache: open_archive(Path(place)),
)
