"""Zip and tar files of images, read in place: nothing is ever extracted."""

import os
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from vitkit.data.decode import BadImage

MAX_MEMBER = 200 * 2**20  # bytes of one image file

Members = tuple[list[str], Callable[[str], bytes]]


def open_zip(path: Path) -> Members:
    """The names of a zip's files, and how to read one; threads share the file by turns."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path}: not a readable zip file ({error})") from None
    members = {m.filename: m for m in archive.infolist() if not m.is_dir() and not hidden(m.filename)}
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

    return sorted(members), fetch


def open_tar(path: Path) -> Members:
    """The names of a tar's regular files, and how to read one by its place."""
    places: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for m in archive:
                if m.isreg() and not m.issparse() and not hidden(m.name):
                    places[m.name.removeprefix("./")] = (m.offset_data, m.size)
    except tarfile.ReadError as error:
        if not places:  # else it is cut off: the last member is named when it is read
            raise ValueError(f"{path}: not a plain tar file ({error}); unpack a compressed one") from None
    handle = os.open(path, os.O_RDONLY)
    length = os.fstat(handle).st_size

    def fetch(name: str) -> bytes:
        start, size = places[name]
        if size > MAX_MEMBER or start + size > length:
            raise BadImage("truncated", f"{name}: claims {size} bytes at {start} of {length}")
        return os.pread(handle, size, start)

    return sorted(places), fetch


def hidden(name: str) -> bool:
    """Files that file managers leave behind, such as .DS_Store and __MACOSX."""
    return any(part.startswith((".", "__MACOSX")) and part != "." for part in name.split("/"))
