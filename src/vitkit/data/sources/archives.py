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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.data.decode import BadImage
from vitkit.data.names import hidden
from vitkit.data.sources.openers import Opener, file_with_suffix
from vitkit.data.sources.source import Source, open_tree, open_unsorted
from vitkit.errors import Error, code_of
from vitkit.io.system import READ, pread

MAX_MEMBER = 200 * 2**20  # bytes of one image file
ENCRYPTED = 1  # the bit of a zip member's flags
# file names, a function that reads one, names of links and other special members, the size of one in bytes
Members = tuple[list[str], Callable[[str], bytes], list[str], Callable[[str], int]]
MEMBER_CHECKS: list[Callable[[Path, Sequence[str]], None]] = []  # each may reject an archive by its names
ARCHIVE_READERS: list[Callable[[Path, Members], dict[str, Source] | None]] = []  # each may open it instead


class Positioned(io.RawIOBase):
    """A file read with pread, so that processes and threads that share it have no common file position."""

    def __init__(self, path: Path):
        self.number, self.path = -1, path
        self.number = os.open(path, READ)
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
        content = self.read_at(self.position, len(buffer))
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)

    def read_at(self, start: int, size: int) -> bytes:
        return pread(self.number, size, start)

    def __reduce__(self) -> tuple[type["Positioned"], tuple[Path]]:
        return Positioned, (self.path,)

    def close(self) -> None:
        if self.number >= 0 and not self.closed:
            os.close(self.number)
        super().close()


class Zip:
    """The members of a zip by name; reads are serialised by a lock. A worker process opens its own."""

    def __init__(self, path: Path, members: dict[str, zipfile.ZipInfo]):
        self.path, self.members, self.lock = path, members, threading.Lock()
        self.archive = zipfile.ZipFile(io.BufferedReader(Positioned(path)))

    def __reduce__(self) -> tuple[type["Zip"], tuple[Path, dict[str, zipfile.ZipInfo]]]:
        return Zip, (self.path, self.members)

    def size(self, name: str) -> int:
        return self.members[name].file_size

    def fetch(self, name: str) -> bytes:
        member = self.members[name]
        if member.file_size > MAX_MEMBER:
            raise BadImage("too-large", f"{name}: claims {member.file_size} bytes")
        try:
            with self.lock:
                return self.archive.read(member)
        except (zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise BadImage("damaged", f"{name}: {error}") from None
        except (OSError, RuntimeError, NotImplementedError) as error:
            raise BadImage("unreadable", f"{name}: {error}") from None


@dataclass(frozen=True)
class Tar:
    """The members of a tar by name: offset and size."""

    file: Positioned
    spans: dict[str, tuple[int, int]]

    def size(self, name: str) -> int:
        return self.spans[name][1]

    def fetch(self, name: str) -> bytes:
        (start, size), where = self.spans[name], f"{self.file.path.name}!{name}"
        if size > MAX_MEMBER:
            raise BadImage("too-large", f"{where}: claims {size} bytes")
        if start + size > self.file.size:
            raise BadImage("truncated", f"{where}: claims {size} bytes at {start} of {self.file.size}")
        return self.file.read_at(start, size)


def open_zip(path: Path) -> Members:
    """The files of a zip."""
    try:
        zipped = Zip(path, {})
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise Error(
            f"{path}: not a readable zip file ({error})", code=code_of(error, "data.corrupt")
        ) from None
    special: list[str] = []
    for member in zipped.archive.infolist():
        name = member.filename.replace("\\", "/")  # some Windows programs write backslashes
        if name.endswith("/") or hidden(name):
            continue
        check_name(path, name)
        if member.flag_bits & ENCRYPTED:
            raise Error(
                f"{path}!{name}: encrypted; unpack the zip with its password and give the folder",
                code="data.layout",
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            special.append(name)
        elif zipped.members.setdefault(name, member) is not member:
            raise Error(
                f"{path}!{name}: two files have this name; keep one and write the zip again",
                code="data.layout",
            )
    return sorted(zipped.members), zipped.fetch, special, zipped.size


def open_tar(path: Path) -> Members:
    """The regular files of an uncompressed tar."""
    spans: dict[str, tuple[int, int]] = {}
    special: list[str] = []
    try:
        for m in walk_tar(path):
            if hidden(m.name):
                continue
            name = m.name.removeprefix("./")
            if m.isreg() and not m.issparse():
                spans[name] = (m.offset_data, m.size)
            elif m.islnk() and (span := spans.get(m.linkname.removeprefix("./"))):
                spans[name] = span  # a second name of a file before it, which tar stores once
            elif not m.isdir():
                special.append(m.name)
    except tarfile.ReadError as error:
        if not spans:  # otherwise it is truncated, and fetching the last member reports it
            raise Error(
                f"{path}: not an uncompressed tar file ({error}); unpack a compressed one",
                code="data.corrupt",
            ) from None
    tar = Tar(Positioned(path), spans)
    return sorted(spans), tar.fetch, special, tar.size


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


def open_archive(path: Path, *, labelled: bool = True) -> dict[str, Source]:
    """Images in class folders within a zip or tar; if they need no labels, in any folders."""
    members = open_zip(path) if path.suffix.lower() == ".zip" else open_tar(path)
    names, fetch, special, size = members
    for check in MEMBER_CHECKS if labelled else ():
        check(path, names)
    for reader in ARCHIVE_READERS if labelled else ():
        if (splits := reader(path, members)) is not None:
            return splits
    read = open_tree if labelled else open_unsorted
    return read(path.name, names, fetch, skipped=special, size=size)


OPENER = Opener(
    description=".zip, .tar",
    matches=file_with_suffix(".zip", ".tar"),
    open=lambda place, cache: open_archive(Path(place)),
    open_all=lambda place, cache: open_archive(Path(place), labelled=False),
)
