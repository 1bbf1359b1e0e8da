"""The index of tar shards: the location of every sample, memory-mapped so that any number of them fits.

The file is a line with the version, the length and the SHA-256 of the header; the header, in JSON; and the
columns, one after the other. The header has the offset and the checksum of each column.
"""

import hashlib
import json
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
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
VERSION = 2  # stores multi-label data sparsely; single-label data is still written as version 1
MAX_HEADER = 2**28
ALIGN = 64
HANDLES = 128  # shards that a process keeps open
PROBES = 64  # samples that are read when shards are opened
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # no path that leaves the folder
COLUMNS = {  # per sample; `names` is the concatenation of all names, `name` the end of each
    "shard": "<u4", "offset": "<u8", "length": "<u4", "crc": "<u4",
    "digest": "V16", "content": "V16",  # the two halves of a content hash; older indexes have only the first
    "name": "<u8", "names": "u1",
}  # fmt: skip
ROW: Any = np.dtype(  # the location of a sample; `number` is its index in the source
    [("number", "<i8"), *((name, kind) for name, kind in COLUMNS.items() if not name.startswith("name"))]
)


class Shard(NamedTuple):
    """A tar file of samples."""

    file: str
    bytes: int
    sha256: str
    samples: int


ReadShard = Callable[[Shard, int, int, int], bytes]  # shard, offset, size, CRC-32


@dataclass(frozen=True)
class Index:
    """The samples of one split, in the order of the original data set."""

    shards: tuple[Shard, ...]
    columns: dict[str, np.ndarray]  # COLUMNS, label and, for multi-label data, label_end
    identity: str = ""  # digest of names, labels and contents, from the checksums in the header
    file: tuple[Path, str] | None = None  # the index file and the split, from which another process opens it

    def __reduce__(self) -> tuple[Any, ...]:
        return (reopen, self.file) if self.file else (Index, (self.shards, self.columns, self.identity))

    def __len__(self) -> int:
        return len(self.columns["shard"])

    def labels(self, classes: int) -> Labels:
        """Class numbers; multi-label data is sparse, even if an older index stores it as a dense table."""
        labels = self.columns["label"]
        if "label_end" in self.columns:
            return SparseLabels(self.columns["label_end"], labels, classes)
        return SparseLabels.from_dense(labels) if labels.ndim == 2 else labels

    def key(self, index: int) -> str:
        ends = self.columns["name"]
        name = self.columns["names"][int(ends[index - 1]) if index else 0 : int(ends[index])]
        return name.tobytes().decode("utf-8", "surrogateescape")

    def digest(self, index: int) -> bytes:
        """The content hash of an image."""
        return self.digests(np.array([index])).tobytes()

    def digests(self, indices: np.ndarray) -> np.ndarray:
        """The content hashes of some images, (N,); older indexes have a CRC-32 as the second half."""
        rows = np.zeros((len(indices), SIZE), np.uint8)
        second = self.columns["content"] if "content" in self.columns else self.columns["crc"]
        for column, start in ((self.columns["digest"], 0), (second, SIZE // 2)):
            width = column.dtype.itemsize
            rows[:, start : start + width] = column[indices].view(np.uint8).reshape(-1, width)
        return rows.view(f"S{SIZE}")[:, 0]

    def fetch(self, index: int, read: ReadShard) -> bytes:
        """The bytes of an image, checked against its CRC-32."""
        shard = self.shards[self.columns["shard"][index]]
        start, size, expected = (int(self.columns[name][index]) for name in ("offset", "length", "crc"))
        if size > MAX_MEMBER or start + size > shard.bytes:
            where = f"{shard.file}!{self.key(index)}"
            raise Error(
                f"{where}: {size} bytes at offset {start} of {shard.bytes}: its index is damaged",
                code="data.corrupt",
            )
        content = read(shard, start, size, expected)
        crc = zlib.crc32(content)
        if len(content) != size or crc != expected:
            raise BadImage(
                "changed",
                f"{shard.file}!{self.key(index)}: {len(content)} bytes with CRC {crc:08x}, its index "
                f"says {size} with {expected:08x}; the shard is damaged or from another data set",
            )
        return content


def open_index(path: Path) -> tuple[tuple[str, ...], dict[str, Index]]:
    """The classes and splits of an index; only labels and shard numbers of the samples are read."""
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
                spans = facts["columns"]
                kinds = column_types(facts["count"], len(classes), header["several"], "label_end" in spans)
                if "content" not in spans:
                    del kinds["content"]
                columns = {n: mapped_column(mapped, base, spans[n], *kinds[n]) for n in kinds}
                check_shards(shards, scan(file, base, spans["shard"], "<u4"))
                check_labels(scan(file, base, spans["label"], kinds["label"][0]), len(classes))
                if "label_end" in kinds:
                    check_ends(scan(file, base, spans["label_end"], "<i8"), len(columns["label"]))
                splits[str(split)] = Index(shards, columns, identity(spans), (path, str(split)))
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise Error(
            f"{path}: the index is damaged ({type(error).__name__}: {error})", code="data.corrupt"
        ) from None
    except ValueError as error:
        raise Error(f"{path}: the index is damaged: {error}", code=code_of(error, "data.corrupt")) from None
    return classes, splits


def reopen(path: Path, split: str) -> Index:
    """A split of an index, in a worker process."""
    return open_index(path)[1][split]


def identity(columns: Mapping[str, list[int]]) -> str:
    """A digest that depends on the samples and their order but not on the shards; nothing is read."""
    used = [name for name in ("name", "names", "length", "crc", "label", "label_end") if name in columns]
    return hashlib.sha256(json.dumps([columns[name][1:] for name in used]).encode()).hexdigest()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of an index, and the offset of its columns."""
    with path.open("rb") as file:
        line = file.readline(256)
        length, expected = parse_line(line, str(path))
        size = os.fstat(file.fileno()).st_size
        if len(line) + length > size:
            raise Error(
                f"{path}: truncated or damaged: {size} bytes, its header alone claims {length}",
                code="data.corrupt",
            )
        text = file.read(length)
    return parse_header(text, expected, str(path)), aligned(len(line) + length)


def parse_line(line: bytes, path: str) -> tuple[int, str]:
    """The length of the header and its SHA-256, from the first line."""
    words = line.split(b"\n")[0].split(b" ")
    if len(words) != 4 or words[0] != MAGIC or not words[1].isdigit() or not words[2].isdigit():
        raise Error(f"{path}: not an index of shards, or damaged", code="data.corrupt")
    if int(words[1]) > VERSION:
        raise Error(
            f"{path}: an index of version {int(words[1])}; this vitkit reads up to version {VERSION}",
            code="data.layout",
        )
    if int(words[2]) > MAX_HEADER:
        raise Error(
            f"{path}: claims a header of {int(words[2])} bytes; the limit is {MAX_HEADER}",
            code="data.too-large",
        )
    if not re.fullmatch(rb"[0-9a-f]{64}", words[3]):
        raise Error(f"{path}: the index is damaged: its first line has no SHA-256", code="data.corrupt")
    return int(words[2]), words[3].decode()


def parse_header(text: bytes, expected: str, path: str) -> dict[str, Any]:
    if hashlib.sha256(text).hexdigest() != expected:
        raise Error(
            f"{path}: the index is damaged: its header does not match its SHA-256", code="data.corrupt"
        )
    header = json.loads(text)
    if not isinstance(header, dict):
        raise Error(f"{path}: the index is damaged: its header is not a JSON object", code="data.corrupt")
    return header


def column_types(
    count: int, classes: int, several: bool, sparse: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every column; -1 for a length that follows from its size."""
    kinds = {name: (kind, (-1,) if name == "names" else (count,)) for name, kind in COLUMNS.items()}
    label: dict[str, tuple[str, tuple[int, ...]]] = {"label": ("<i8", (count,))}
    if sparse:
        label = {"label": ("<i4", (-1,)), "label_end": ("<i8", (count,))}
    elif several:
        label = {"label": ("<f4", (count, classes))}
    return kinds | label


def mapped_column(
    mapped: mmap.mmap, base: int, span: list[int], kind: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A column as a view of the mapped file; its offset and size must fit both the file and the shape."""
    start, size, _ = span
    width = np.dtype(kind).itemsize
    fits = size % width == 0 if shape == (-1,) else size == width * int(np.prod(shape))
    if start < 0 or start % ALIGN or size < 0 or base + start + size > len(mapped) or not fits:
        raise Error(
            f"a column of {size} bytes at {start} does not fit into {len(mapped)} bytes", code="data.corrupt"
        )
    return np.frombuffer(mapped, kind, size // width, base + start).reshape(shape)


def scan(file: BinaryIO, base: int, span: list[int], kind: str) -> Iterator[np.ndarray]:
    """A column in chunks, checked against its CRC; read, not mapped, so that it does not stay in memory."""
    start, size, expected = span
    if min(start, size) < 0 or base + start + size > (file_size := os.fstat(file.fileno()).st_size):
        raise Error(f"a column claims {size} bytes at {start} of {file_size}", code="data.corrupt")
    file.seek(base + start)
    crc = 0
    for offset in range(0, size, 2**20):
        chunk = file.read(min(2**20, size - offset))
        crc = zlib.crc32(chunk, crc)
        yield np.frombuffer(chunk, kind)
    if crc != expected:
        raise Error(f"a column has the checksum {crc:08x}, not {expected:08x}", code="data.corrupt")


def check_columns(path: Path) -> None:
    """Check every column against its checksum."""
    open_index(path)
    header, base = read_header(path)
    with path.open("rb") as file:
        for span in (span for split in header["splits"].values() for span in split["columns"].values()):
            for _ in scan(file, base, span, "u1"):
                pass


def check_shards(shards: tuple[Shard, ...], numbers: Iterable[np.ndarray]) -> None:
    for shard in shards:
        if not SHARD_NAME.fullmatch(shard.file):
            raise Error(f"{shard.file!r} is not a valid shard name", code="data.unsafe")
    counts = np.zeros(len(shards), np.int64)
    for part in numbers:
        if int(part.max(initial=0)) >= max(len(shards), 1):
            raise Error(f"shard {part.max()} of {len(shards)}", code="data.corrupt")
        counts += np.bincount(part, minlength=len(shards))
    for shard, count in zip(shards, counts.tolist(), strict=True):
        if shard.samples != count:
            raise Error(
                f"{shard.file} has {shard.samples} samples, but {count} are listed", code="data.corrupt"
            )


def check_labels(labels: Iterable[np.ndarray], classes: int) -> None:
    """Labels must be class numbers or, in a dense table, between 0 and 1."""
    for part in labels:
        top = 1 if part.dtype.kind == "f" else classes - 1
        wrong = part[~((part >= 0) & (part <= top))]  # true for NaN
        if len(wrong):
            raise Error(f"label {wrong[0]} is not in 0..{top} ({classes} classes)", code="data.labels")


def check_ends(ends: Iterable[np.ndarray], total: int) -> None:
    """The end offsets of the images' labels must not decrease, and the last must be the total."""
    last = 0
    for part in ends:
        if np.diff(part, prepend=last).min(initial=0) < 0:
            raise Error("the labels of an image end before they begin", code="data.corrupt")
        last = int(part[-1]) if len(part) else last
    if last != total:
        raise Error(f"only {last} of {total} labels belong to an image", code="data.corrupt")


def write_index(
    file: BinaryIO,
    classes: Iterable[str],
    splits: Mapping[str, tuple[list[Shard], dict[str, np.ndarray]]],
    facts: Mapping[str, Any],
) -> None:
    """Write the index of splits, each given by its shards and columns; `facts` are added to the header."""
    offset, tables, several = 0, {}, False
    for split, (shards, columns) in splits.items():
        spans = {}
        for name, values in columns.items():
            spans[name] = [offset, values.nbytes, zlib.crc32(raw(values))]
            offset = aligned(offset + values.nbytes)
        several |= "label_end" in columns
        tables[split] = {"count": len(columns["shard"]), "shards": shards, "columns": spans}
    header = {"classes": list(classes), "several": several, "bytes": offset, "splits": tables, **facts}
    text = json.dumps(header).encode()
    version = VERSION if several else 1
    line = b"%b %d %d %b\n" % (MAGIC, version, len(text), hashlib.sha256(text).hexdigest().encode())
    file.write((line + text).ljust(aligned(len(line) + len(text)), b" "))
    for _, columns in splits.values():
        for values in columns.values():
            file.write(raw(values))
            file.write(bytes(aligned(values.nbytes) - values.nbytes))


def make_columns(rows: np.ndarray, keys: Iterable[str], labels: Labels) -> dict[str, np.ndarray]:
    """The columns of an index from rows and their names and labels."""
    names = [key.encode("utf-8", "surrogateescape") for key in keys]
    columns = {name: rows[name] for name in COLUMNS if name in ROW.fields}
    columns["name"] = np.cumsum([len(name) for name in names], dtype="<u8")
    columns["names"] = np.frombuffer(b"".join(names), "u1")
    if isinstance(labels, SparseLabels):
        return columns | {"label": labels.numbers.astype("<i4"), "label_end": labels.ends.astype("<i8")}
    return columns | {"label": labels.astype("<i8")}


def raw(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


class LocalShards:
    """Reads the shards of a folder, and keeps some of them open."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.handle = lru_cache(maxsize=HANDLES)(partial(open_shard, folder))

    def __reduce__(self) -> tuple[type["LocalShards"], tuple[Path]]:
        return LocalShards, (self.folder,)

    def __call__(self, shard: Shard, start: int, size: int, crc: int) -> bytes:
        return self.handle(shard).read_at(start, size)


def open_shard(folder: Path, shard: Shard) -> Positioned:
    check_file(folder, shard)
    return Positioned(folder / shard.file)  # closed by garbage collection after eviction


def local_shards(folder: Path, splits: Mapping[str, Index]) -> ReadShard:
    """A function that reads shards on disk; all must exist with the size and content that the index says."""
    for shard in (shard for index in splits.values() for shard in index.shards):
        check_file(folder, shard)

    read = LocalShards(folder)
    for index in splits.values():
        probe(index, read)
    return read


def probe(index: Index, read: ReadShard) -> None:
    """Read some samples of each shard, since a shard of another data set may have the same size."""
    good: set[int] = set()
    errors: dict[int, str] = {}
    for row in np.unique(np.linspace(0, len(index) - 1, min(PROBES, len(index))).astype(int)).tolist():
        shard = int(index.columns["shard"][row])
        try:
            index.fetch(row, read)
            good.add(shard)
        except BadImage as error:
            errors[shard] = str(error)
    for shard in errors.keys() - good:
        raise Error(errors[shard], code="data.corrupt")


def check_file(folder: Path, shard: Shard) -> None:
    try:
        size = os.stat(folder / shard.file).st_size
    except FileNotFoundError:
        raise Error(
            f"{folder / shard.file}: listed in the index, but missing", code="file.not-found"
        ) from None
    if size != shard.bytes:
        change = "truncated" if size < shard.bytes else "replaced"
        raise Error(
            f"{folder / shard.file}: {size} bytes, but its index says {shard.bytes}: it was {change}",
            code="data.corrupt",
        )
