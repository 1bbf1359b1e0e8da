"""Data at addresses that fsspec knows, such as s3://bucket/photos: folders, archives, shards and tables."""

import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from vitkit.data.decode import MAX_BYTES, BadImage
from vitkit.data.names import SUFFIXES, hidden
from vitkit.data.sources.index import INDEX, Shard, check_columns, parse_line
from vitkit.data.sources.openers import Cache, Opener
from vitkit.data.sources.shard_folders import open_shards
from vitkit.data.sources.source import Source, open_tree, open_unsorted
from vitkit.data.sources.tables import AnyTable, open_tables
from vitkit.errors import Error
from vitkit.io.files import locked, replace_file
from vitkit.io.http import NetworkError

ADDRESS = re.compile(r"(?!https?://)[a-z][a-z0-9+.-]*(://|::)")
ARCHIVES = {".zip": "zip", ".tar": "tar"}  # opened in place, by chained addresses of fsspec
UNREADABLE = (  # the fault of one file
    FileNotFoundError, PermissionError, IsADirectoryError, EOFError, zlib.error, zipfile.BadZipFile,
    tarfile.TarError, NotImplementedError,
)  # fmt: skip


def is_address(place: str) -> bool:
    return ADDRESS.match(place) is not None and not os.path.exists(place)


@lru_cache(maxsize=4)
def connect(address: str, process: int) -> tuple[Any, str]:
    """The filesystem of an address and the path there; each process connects once, also after a fork."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise Error(
            f"{address}: reading from such an address needs fsspec (pip install 'vitkit[remote]')",
            code="request.extra-missing",
        ) from None
    suffix = os.path.splitext(address)[1].lower()
    chained = f"{ARCHIVES[suffix]}://::{address}" if suffix in ARCHIVES else address
    try:
        system, path = url_to_fs(chained)
    except ImportError as error:  # fsspec names the package of the protocol
        raise Error(f"{address}: {error}", code="request.extra-missing") from None
    except FileNotFoundError:
        raise Error(f"{address}: there is no such file", code="data.not-found") from None
    except ValueError as error:
        raise Error(f"{address}: {error}; expected an address such as s3://bucket/photos") from None
    except (zipfile.BadZipFile, tarfile.TarError) as error:
        raise Error(f"{address}: not a readable archive ({error})", code="data.corrupt") from None
    except Exception as error:  # every service has exceptions of its own
        raise NetworkError(f"{address}: {one_line(error)}") from error
    return system, path.rstrip("/")


@dataclass(frozen=True)
class Remote:
    """The files below an address, by relative name; a worker process connects on its own."""

    address: str
    alone: str = ""  # the name of the file, if the address is that of a single file
    lead: str = ""  # before every name: archives of "." have ./cat/1.jpg

    def path(self, name: str) -> tuple[Any, str]:
        system, root = connect(self.address, os.getpid())
        if name == self.alone:
            return system, root
        return system, f"{root}/{name}" if root else self.lead + name

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        system, path = self.path(name)
        try:
            return system.cat_file(path, start=start, end=end)
        except UNREADABLE as error:
            raise BadImage("unreadable", f"cannot be read: {one_line(error)}") from None
        except Exception as error:  # every service has exceptions of its own
            raise NetworkError(f"{self.address}, {name}: {one_line(error)}") from error


@dataclass(frozen=True)
class RemoteImages:
    """Image files below an address, with their sizes from its listing."""

    files: Remote
    sizes: dict[str, int]

    def read(self, name: str) -> bytes:
        if self.sizes[name] > MAX_BYTES:
            raise BadImage("too-large", f"{self.sizes[name]} bytes; the limit is {MAX_BYTES}")
        return self.files.read(name)

    def size(self, name: str) -> int:
        return self.sizes[name]


@dataclass(frozen=True)
class RemoteFile:
    """A .parquet file below an address."""

    files: Remote
    name: str

    def open_binary(self) -> Any:
        system, path = self.files.path(self.name)
        return system.open(path, "rb")

    def __str__(self) -> str:
        return f"{self.files.address}/{self.name}"


@dataclass(frozen=True)
class RemoteShards:
    """Reads samples of shards by range requests."""

    files: Remote

    def __call__(self, shard: Shard, start: int, size: int, crc: int) -> bytes:
        return self.files.read(shard.file, start, start + size)


def one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:200] or type(error).__name__


def open_address(address: str, cache: Cache, *, labelled: bool = True) -> dict[str, Source]:
    """The splits of the data at an address."""
    connect.cache_clear()  # the data may have changed since it was opened before
    system, root = connect(address, os.getpid())
    try:
        system.invalidate_cache()
        listed = system.find(root, detail=True)
    except FileNotFoundError:
        listed = {}
    except Exception as error:  # every service has exceptions of its own
        raise NetworkError(f"{address}: {one_line(error)}") from error
    if not listed:
        raise Error(f"{address}: no files there", code="data.not-found")
    lead = f"{root}/" if root else "./" if all(path.startswith("./") for path in listed) else ""
    sizes = {path.removeprefix(lead): facts.get("size") or 0 for path, facts in listed.items()}
    files = Remote(address, lead=lead)
    if list(listed) == [root]:  # a file, not a folder
        name = root.rpartition("/")[2]
        files, sizes = Remote(address, alone=name), {name: sizes[root]}
    sizes = {name: size for name, size in sorted(sizes.items()) if not hidden(name)}
    if INDEX in sizes:
        return open_shards(address, fetch_index(files, cache), RemoteShards(files))
    tables: dict[str, AnyTable] = {
        name: RemoteFile(files, name) for name in sizes if name.lower().endswith(".parquet")
    }
    if tables and not any(name.lower().endswith(SUFFIXES) for name in sizes):
        return open_tables(address, address, tables, labelled=labelled)
    images = RemoteImages(files, sizes)
    read: Callable[..., dict[str, Source]] = open_tree if labelled else open_unsorted
    return read(address, list(sizes), images.read, size=images.size)


def fetch_index(files: Remote, cache: Cache) -> Path:
    """The local copy of an index; downloaded if the SHA-256 of its header is not in the cache yet."""
    _, digest = parse_line(files.read(INDEX, 0, 4096), f"{files.address}/{INDEX}")
    path = cache.folder / digest[:32] / INDEX
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        if not path.exists():
            system, remote = files.path(INDEX)
            replace_file(path, partial(download_checked, system, remote))
    return path


def download_checked(system: Any, remote: str, path: Path) -> None:
    system.get_file(remote, str(path))
    check_columns(path)


OPENER = Opener(
    description="an address of fsspec (s3://bucket/photos)",
    matches=is_address,
    open=lambda place, cache: open_address(place, cache or Cache()),
    open_all=lambda place, cache: open_address(place, cache or Cache(), labelled=False),
    order=20,
)
