"""The index beside tar shards: where every sample lies, on disk and mapped, for any number of samples.

A line with the version, the length and the SHA-256 of the header; the header, in JSON; the columns, one
after the other. The header says where each column begins and what its checksum is.
"""

import hashlib
import json
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vitkit.data.content import SIZE
from vitkit.data.decode import BadImage
from vitkit.data.sources.archives import MAX_MEMBER, Positioned
from vitkit.data.sources.sparse_labels import Labels, SparseLabels
from vitkit.errors import Error, code_of

INDEX = "index.vitkit"
MAGIC = b"vitkit-shards"
VERSION = 2  # which has several labels an image as numbers; one label is still written as version 1
MAX_HEADER = 2**28
ALIGN = 64
HANDLES = 128  # shards held open by a process
PROBES = 64  # samples looked at when shards are opened
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # the name of a shard: nothing that leads elsewhere
COLUMNS = {  # per sample; `names` is all of them in one, `name` where each ends
    "shard": "<u4", "offset": "<u8", "length": "<u4", "crc": "<u4",
    "digest": "V16", "content": "V16",  # the two halves of a mark; older indexes have only the first
    "name": "<u8", "names": "u1",
}  # fmt: skip
ROW: Any = np.dtype(  # where a sample lies; `number` is its place in the source
    [("number", "<i8"), *((name, kind) for name, kind in COLUMNS.items() if not name.startswith("name"))]
)


class Shard(NamedTuple):
    """A tar file of samples."""

    file: str
    bytes: int
    sha256: str
    samples: int


ReadShard = Callable[[Shard, int, int, int], bytes]  # of a shard, from a byte on, so many, of a checksum


@dataclass(frozen=True)
class Index:
    """The samples of one split, in the order of the data set that they came from."""

    shards: tuple[Shard, ...]
    columns: dict[str, np.ndarray]  # those of COLUMNS, label and, for several an image, label_end
    identity: str = ""  # of names, labels and contents in their order, by the checksums in the header

    def __len__(self) -> int:
        return len(self.columns["shard"])

    def labels(self, classes: int) -> Labels:
        """Class numbers; several an image are sparse, also where an older index has them as a dense table."""
        found = self.columns["label"]
        if "label_end" in self.columns:
            return SparseLabels(self.columns["label_end"], found, classes)
        return SparseLabels.from_dense(found) if found.ndim == 2 else found

    def key(self, index: int) -> str:
        ends = self.columns["name"]
        name = self.columns["names"][int(ends[index - 1]) if index else 0 : int(ends[index])]
        return name.tobytes().decode("utf-8", "surrogateescape")

    def digest(self, index: int) -> bytes:
        """The image's mark; an older index has its checksum in place of the second half."""
        whole = self.columns["content"] if "content" in self.columns else self.columns["crc"]
        return (self.columns["digest"][index].tobytes() + whole[index].tobytes()).ljust(SIZE, b"\0")

    def fetch(self, index: int, read: ReadShard) -> bytes:
        """The bytes of an image, which must be those that were written."""
        shard = self.shards[self.columns["shard"][index]]
        start, size, expected = (int(self.columns[name][index]) for name in ("offset", "length", "crc"))
        if size > MAX_MEMBER or start + size > shard.bytes:
            where = f"{shard.file}!{self.key(index)}"
            raise Error(
                f"{where}: {size} bytes at {start} of {shard.bytes}: its index is damaged",
                code="data.corrupt",
            )
        content = read(shard, start, size, expected)
        found = zlib.crc32(content)
        if len(content) != size or found != expected:
            raise BadImage(
                "changed",
                f"{shard.file}!{self.key(index)}: {len(content)} bytes of checksum {found:08x}, its index "
                f"says {size} of {expected:08x}; the shard is damaged or of another data set",
            )
        return content


def open_index(path: Path) -> tuple[tuple[str, ...], dict[str, Index]]:
    """The classes and the splits of an index; of its samples only labels and shard numbers are looked at."""
    header, base = read_header(path)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(mapped) != base + header["bytes"]:
                raise Error(f"{len(mapped)} bytes, not {base + header['bytes']}", code="data.corrupt")
            classes = tuple(str(name) for name in header["classes"])
            splits = {}
            for split, facts in header["splits"].items():
                shards = tuple(
                    Shard(str(name), int(size), str(digest), int(count))
                    for name, size, digest, count in facts["shards"]
                )
                places = facts["columns"]
                kinds = kinds_of(facts["count"], len(classes), header["several"], "label_end" in places)
                if "content" not in places:
                    del kinds["content"]
                columns = {n: mapped_column(mapped, base, places[n], *kinds[n]) for n in kinds}
                check_shards(shards, scan(file, base, places["shard"], "<u4"))
                check_labels(scan(file, base, places["label"], kinds["label"][0]), len(classes))
                if "label_end" in kinds:
                    check_ends(scan(file, base, places["label_end"], "<i8"), len(columns["label"]))
                splits[str(split)] = Index(shards, columns, identity(places))
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise Error(
            f"{path}: the index is damaged ({type(error).__name__}: {error})", code="data.corrupt"
        ) from None
    except ValueError as error:
        raise Error(f"{path}: the index is damaged: {error}", code=code_of(error, "data.corrupt")) from None
    return classes, splits


def identity(columns: Mapping[str, list[int]]) -> str:
    """Equal for the same samples in the same order, however they are cut into shards; nothing is read."""
    named = [name for name in ("name", "names", "length", "crc", "label", "label_end") if name in columns]
    return hashlib.sha256(json.dumps([columns[name][1:] for name in named]).encode()).hexdigest()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What an index says of itself, and where its columns begin."""
    with path.open("rb") as file:
        line = file.readline(256)
        length, expected = parse_line(line, str(path))
        size = os.fstat(file.fileno()).st_size
        if len(line) + length > size:
            raise Error(
                f"{path}: cut off or damaged: {size} bytes, its header alone claims {length}",
                code="data.corrupt",
            )
        text = file.read(length)
    return parse_header(text, expected, str(path)), aligned(len(line) + length)


def parse_line(line: bytes, path: str) -> tuple[int, str]:
    """The length of the header and its SHA-256, out of the first line."""
    words = line.split(b"\n")[0].split(b" ")
    if len(words) != 4 or words[0] != MAGIC or not words[1].isdigit() or not words[2].isdigit():
        raise Error(f"{path}: not an index of shards, or a damaged one", code="data.corrupt")
    if int(words[1]) > VERSION:
        raise Error(
            f"{path}: an index of version {int(words[1])}; this vitkit reads up to {VERSION}",
            code="data.layout",
        )
    if int(words[2]) > MAX_HEADER:
        raise Error(
            f"{path}: claims a header of {int(words[2])} bytes; at most {MAX_HEADER} are read",
            code="data.too-large",
        )
    if not re.fullmatch(rb"[0-9a-f]{64}", words[3]):
        raise Error(f"{path}: the index is damaged: its first line has no SHA-256", code="data.corrupt")
    return int(words[2]), words[3].decode()


def parse_header(text: bytes, expected: str, path: str) -> dict[str, Any]:
    if hashlib.sha256(text).hexdigest() != expected:
        raise Error(
            f"{path}: the index is damaged: its header is not the one that was written", code="data.corrupt"
        )
    header = json.loads(text)
    if not isinstance(header, dict):
        raise Error(f"{path}: the index is damaged: its header is no table", code="data.corrupt")
    return header


def kinds_of(count: int, classes: int, several: bool, sparse: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every column; -1 for a length that the column itself tells."""
    kinds = {name: (kind, (-1,) if name == "names" else (count,)) for name, kind in COLUMNS.items()}
    label: dict[str, tuple[str, tuple[int, ...]]] = {"label": ("<i8", (count,))}
    if sparse:
        label = {"label": ("<i4", (-1,)), "label_end": ("<i8", (count,))}
    elif several:
        label = {"label": ("<f4", (count, classes))}
    return kinds | label


def mapped_column(
    mapped: mmap.mmap, base: int, place: list[int], kind: str, shape: tuple[int, ...]
) -> np.ndarray:
    start, size, _ = place
    width = np.dtype(kind).itemsize
    fits = size % width == 0 if shape == (-1,) else size == width * int(np.prod(shape))
    if start < 0 or start % ALIGN or size < 0 or base + start + size > len(mapped) or not fits:
        raise Error(
            f"a column of {size} bytes at {start} does not fit {len(mapped)} bytes", code="data.corrupt"
        )
    return np.frombuffer(mapped, kind, size // width, base + start).reshape(shape)


def scan(file: BinaryIO, base: int, place: list[int], kind: str) -> Iterator[np.ndarray]:
    """A column by parts, read and not mapped so that it does not stay in memory, against its checksum."""
    start, size, expected = place
    if min(start, size) < 0 or base + start + size > (there := os.fstat(file.fileno()).st_size):
        raise Error(f"a column claims {size} bytes at {start} of {there}", code="data.corrupt")
    file.seek(base + start)
    found = 0
    for at in range(0, size, 2**20):
        part = file.read(min(2**20, size - at))
        found = zlib.crc32(part, found)
        yield np.frombuffer(part, kind)
    if found != expected:
        raise Error(f"a column has the checksum {found:08x}, not {expected:08x}", code="data.corrupt")


def check_columns(path: Path) -> None:
    """Every column against its checksum."""
    open_index(path)
    header, base = read_header(path)
    with path.open("rb") as file:
        for place in (place for split in header["splits"].values() for place in split["columns"].values()):
            for _ in scan(file, base, place, "u1"):
                pass


def check_shards(shards: tuple[Shard, ...], numbers: Iterable[np.ndarray]) -> None:
    for shard in shards:
        if not PLAIN.fullmatch(shard.file):
            raise Error(f"{shard.file!r} is no name for a shard", code="data.unsafe")
    found = np.zeros(len(shards), np.int64)
    for part in numbers:
        if int(part.max(initial=0)) >= max(len(shards), 1):
            raise Error(f"shard {part.max()} of {len(shards)}", code="data.corrupt")
        found += np.bincount(part, minlength=len(shards))
    for shard, count in zip(shards, found.tolist(), strict=True):
        if shard.samples != count:
            raise Error(
                f"{shard.file} has {shard.samples} samples, of which {count} are listed", code="data.corrupt"
            )


def check_labels(labels: Iterable[np.ndarray], classes: int) -> None:
    """Class numbers, or 0 and 1."""
    for part in labels:
        top = 1 if part.dtype.kind == "f" else classes - 1
        wrong = part[~((part >= 0) & (part <= top))]  # NaN compares with nothing
        if len(wrong):
            raise Error(f"label {wrong[0]} is not in 0..{top} ({classes} classes)", code="data.labels")


def check_ends(ends: Iterable[np.ndarray], total: int) -> None:
    """Where the labels of each image end: never before those of the one before it, the last at the end."""
    last = 0
    for part in ends:
        if np.diff(part, prepend=last).min(initial=0) < 0:
            raise Error("the labels of an image end before they begin", code="data.corrupt")
        last = int(part[-1]) if len(part) else last
    if last != total:
        raise Error(f"{last} labels of {total} belong to an image", code="data.corrupt")


def write_index(
    file: BinaryIO,
    classes: Iterable[str],
    splits: Mapping[str, tuple[list[Shard], dict[str, np.ndarray]]],
    facts: Mapping[str, Any],
) -> None:
    """An index of splits, each its shards and its columns; `facts` are kept in the header as they are."""
    at, told, several = 0, {}, False
    for split, (shards, columns) in splits.items():
        places = {}
        for name, values in columns.items():
            places[name] = [at, values.nbytes, zlib.crc32(raw(values))]
            at = aligned(at + values.nbytes)
        several |= "label_end" in columns
        told[split] = {"count": len(columns["shard"]), "shards": shards, "columns": places}
    header = {"classes": list(classes), "several": several, "bytes": at, "splits": told, **facts}
    text = json.dumps(header).encode()
    version = VERSION if several else 1
    line = b"%b %d %d %b\n" % (MAGIC, version, len(text), hashlib.sha256(text).hexdigest().encode())
    file.write((line + text).ljust(aligned(len(line) + len(text)), b" "))
    for _, columns in splits.values():
        for values in columns.values():
            file.write(raw(values))
            file.write(bytes(aligned(values.nbytes) - values.nbytes))


def make_columns(rows: np.ndarray, keys: Iterable[str], labels: Labels) -> dict[str, np.ndarray]:
    """Columns out of rows, and of the names and labels that go with them."""
    names = [key.encode("utf-8", "surrogateescape") for key in keys]
    columns = {name: rows[name] for name in COLUMNS if name in ROW.fields}
    columns["name"] = np.cumsum([len(name) for name in names], dtype="<u8")
    columns["names"] = np.frombuffer(b"".join(names), "u1")
    if isinstance(labels, SparseLabels):
        return columns | {"label": labels.numbers.astype("<i4"), "label_end": labels.ends.astype("<i8")}
    return columns | {"label": labels.astype("<i8")}


def raw(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def local_shards(folder: Path, splits: Mapping[str, Index]) -> ReadShard:
    """How to read shards on disk: all must be there, of the size that the index says and of this data set."""
    for shard in (shard for index in splits.values() for shard in index.shards):
        check_file(folder, shard)

    @lru_cache(maxsize=HANDLES)
    def handle(shard: Shard) -> Positioned:
        check_file(folder, shard)
        return Positioned(folder / shard.file)  # closed when it is in no one's hands any more

    def read(shard: Shard, start: int, size: int, crc: int) -> bytes:
        return os.pread(handle(shard).number, size, start)

    for index in splits.values():
        probe(index, read)
    return read


def probe(index: Index, read: ReadShard) -> None:
    """Other shards may have the same size, so some samples are looked at; a right one vouches for a shard."""
    right: set[int] = set()
    wrong: dict[int, str] = {}
    for row in np.unique(np.linspace(0, len(index) - 1, min(PROBES, len(index))).astype(int)).tolist():
        shard = int(index.columns["shard"][row])
        try:
            index.fetch(row, read)
            right.add(shard)
        except BadImage as error:
            wrong[shard] = str(error)
    for shard in wrong.keys() - right:
        raise Error(wrong[shard], code="data.corrupt")


def check_file(folder: Path, shard: Shard) -> None:
    try:
        found = os.stat(folder / shard.file).st_size
    except FileNotFoundError:
        raise Error(
            f"{folder / shard.file}: the shard is missing; its index lists it", code="file.not-found"
        ) from None
    if found != shard.bytes:
        cut = "cut off" if found < shard.bytes else "replaced"
        raise Error(
            f"{folder / shard.file}: {found} bytes, its index says {shard.bytes}: it was {cut}",
            code="data.corrupt",
        )
