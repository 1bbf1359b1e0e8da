"""Zip and tar files of images, read in place: nothing is ever extracted."""

import io
import os
import re
import stat
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vitkit.data.decode import BadImage
from vitkit.data.names import hidden
from vitkit.errors import Error, code_of

MAX_MEMBER = 200 * 2**20  # bytes of one image file
# names, how to read one, what is left out, the bytes of one
Members = tuple[list[str], Callable[[str], bytes], list[str], Callable[[str], int]]


class Positioned(io.RawIOBase):
    """A file read by place, so that processes and threads that share it do not move each other."""

    def __init__(self, path: Path):
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self.number)
        self.size, self.at = status.st_size, 0
        if not stat.S_ISREG(status.st_mode):
            raise Error(f"{path}: not a regular file", code="file.unreadable")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        found = os.pread(self.number, len(buffer), self.at)
        buffer[: len(found)] = found
        self.at += len(found)
        return len(found)

    def close(self) -> None:
        if self.number >= 0 and not self.closed:
            os.close(self.number)
        super().close()


def open_zip(path: Path) -> Members:
    """The names of a zip's files, and how to read one; threads share the file by turns."""
    try:
        archive = zipfile.ZipFile(io.BufferedReader(Positioned(path)))
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise Error(
            f"{path}: not a readable zip file ({error})", code=code_of(error, "data.corrupt")
        ) from None
    members: dict[str, zipfile.ZipInfo] = {}
    odd: list[str] = []
    for member in archive.infolist():
        name = member.filename.replace("\\", "/")  # as some programs on Windows write it
        if name.endswith("/") or hidden(name):
            continue
        check_name(path, name)
        if stat.S_ISLNK(member.external_attr >> 16):
            odd.append(name)
        elif members.setdefault(name, member) is not member:
            raise Error(
                f"{path}!{name}: two files of this name; keep one and write the zip again", code="data.layout"
            )
    turn = threading.Lock()

    def fetch(name: str) -> bytes:
        member = members[name]
        if member.file_size > MAX_MEMBER:
            raise BadImage("too-large", f"{name}: claims {member.file_size} bytes")
        try:
            with turn:
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

    return sorted(members), fetch, odd, lambda name: members[name].file_size


def open_tar(path: Path) -> Members:
    """The names of a tar's regular files, and how to read one by its place."""
    places: dict[str, tuple[int, int]] = {}
    odd: list[str] = []
    try:
        for m in walk_tar(path):
            if hidden(m.name):
                continue
            if m.isreg() and not m.issparse():
                places[m.name.removeprefix("./")] = (m.offset_data, m.size)
            elif not m.isdir():
                odd.append(m.name)
    except tarfile.ReadError as error:
        if not places:  # else it is cut off: the last member is named when it is read
            raise Error(
                f"{path}: not a plain tar file ({error}); unpack a compressed one", code="data.corrupt"
            ) from None
    file = Positioned(path)

    def fetch(name: str) -> bytes:
        start, size = places[name]
        if size > MAX_MEMBER:
            raise BadImage("too-large", f"{path.name}!{name}: claims {size} bytes")
        if start + size > file.size:
            raise BadImage("truncated", f"{path.name}!{name}: claims {size} bytes at {start} of {file.size}")
        return os.pread(file.number, size, start)

    return sorted(places), fetch, odd, lambda name: places[name][1]


def walk_tar(path: Path) -> Iterator[tarfile.TarInfo]:
    """Every member of a plain tar; a name that leads elsewhere or a damaged header is an error."""
    with tarfile.open(path, "r:") as archive:
        while True:
            try:
                member = archive.next()
            except tarfile.ReadError:
                raise
            except (tarfile.TarError, ValueError, OverflowError, RecursionError, KeyError) as error:
                raise Error(
                    f"{path}: a damaged tar, at byte {archive.offset} ({error})", code="data.corrupt"
                ) from None
            if member is None:
                break
            archive.members.clear()  # type: ignore[attr-defined]  # else a million empty members fill the memory
            check_name(path, member.name)
            yield member
        archive.fileobj.seek(archive.offset)
        if archive.fileobj.read(512).strip(b"\0"):
            raise Error(
                f"{path}: a damaged tar: no member begins at byte {archive.offset}", code="data.corrupt"
            )


def check_name(path: Path, name: str) -> None:
    if name.startswith("/") or re.match(r"[A-Za-z]:/", name) or ".." in name.split("/") or "\0" in name:
        raise Error(
            f"{path}!{name}: a name that leads out of the archive; the file is not used", code="data.unsafe"
        )
