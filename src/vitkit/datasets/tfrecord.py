"""TFRecord files of tf.train.Examples, read and verified without TensorFlow: DMLab."""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.sources.archives import Positioned
from vitkit.data.sources.source import Lazy, Source
from vitkit.datasets.image_files import need
from vitkit.errors import Error

# A record: length (8 bytes), checksum of the length (4), content, checksum of the content (4).
# Protocol buffers: fields of a tag (number << 3 | type) and a value; type 0 is a varint, 2 has a length.
MOST = 2**30  # the limit of a record in bytes
CLASSES = tuple(map(str, range(6)))


def masked_crc(data: bytes) -> int:
    """CRC-32C as stored in TFRecords: rotated and offset, since a CRC over embedded CRCs is weak."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    try:
        import google_crc32c
    except ImportError:
        raise Error(
            "reading TFRecords needs google-crc32c (pip install 'vitkit[vtab]')", code="request.extra-missing"
        ) from None
    return google_crc32c.value(data)


def records(data: Any) -> Iterator[tuple[int, int]]:
    """(start, length) of the contents; lengths are verified here, contents when they are fetched."""
    offset = 0
    while offset < len(data):
        if offset + 16 > len(data):
            raise ValueError(f"truncated at byte {offset}")
        head = data[offset : offset + 8]
        (length,) = struct.unpack("<Q", head)
        if masked_crc(head) != struct.unpack_from("<I", data, offset + 8)[0]:
            raise ValueError(f"no record begins at byte {offset}: the checksum of its length is wrong")
        if length > min(MOST, len(data) - offset - 16):
            raise ValueError(f"truncated: the record at byte {offset} has {length} bytes")
        yield offset + 12, length
        offset += 16 + length


def varint(data: Any, offset: int, end: int) -> tuple[int, int]:
    """A varint and the offset after it."""
    value = shift = 0
    while offset < end and shift < 64:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
    raise ValueError(f"a number without an end at byte {offset}")


def fields(data: Any, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field, start, end) of fields with a length, (field, value, -1) of varints."""
    offset = start
    while offset < end:
        tag, offset = varint(data, offset, end)
        value, offset = varint(data, offset, end)
        if tag & 7 == 0:
            yield tag >> 3, value, -1
        elif tag & 7 == 2 and value <= end - offset:
            yield tag >> 3, offset, offset + value
            offset += value
        else:
            raise ValueError(f"a field of type {tag & 7} and {value} bytes at byte {offset}")


def example(data: Any, start: int, end: int) -> dict[str, tuple[int, int]]:
    """(start, end) of the first value of each feature of a tf.train.Example, or (value, -1) of a number."""
    values = {}
    for number, *features in fields(data, start, end):  # Example.features = 1
        for entry, *pair in fields(data, *features) if number == 1 else ():  # Features.feature = 1, a map
            name, value = "", None
            for part, *inner in fields(data, *pair) if entry == 1 else ():
                if part == 1:
                    name = bytes(data[inner[0] : inner[1]]).decode("utf-8", "replace")
                elif part == 2:
                    value = first_value(data, *inner)
            if value is not None:
                values[name] = value
    return values


def first_value(data: Any, start: int, end: int) -> tuple[int, int] | None:
    """The first value of a Feature: bytes_list = 1 or int64_list = 3, maybe packed; floats are ignored."""
    for kind, *span in fields(data, start, end):
        if kind == 3:
            for _, value, stop in fields(data, *span):
                return (value, -1) if stop < 0 else (varint(data, value, stop)[0], -1)
        elif kind == 1:
            return next(((a, b) for _, a, b in fields(data, *span)), None)
    return None


class Scanned(NamedTuple):
    """The examples of one file: key, label, image (start, end), record (start, length)."""

    keys: list[str]
    labels: list[int]
    images: list[tuple[int, int]]
    records: list[tuple[int, int]]


@lru_cache(maxsize=64)
def scan(path: Path, changed: int) -> Scanned:
    scanned = Scanned([], [], [], [])
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start, length in records(data):
                features = example(data, start, start + length)
                (a, b), (label, _) = features["filename"], features["label"]
                scanned.keys.append(data[a:b].decode("utf-8", "surrogateescape"))
                scanned.labels.append(label)
                scanned.images.append(features["image"])
                scanned.records.append((start, length))
    except KeyError as error:
        raise Error(f"{path}: an example without the feature {error}", code="data.layout") from None
    except Error:
        raise
    except (ValueError, struct.error) as error:
        raise Error(f"{path}: truncated or damaged TFRecord file ({error})", code="data.corrupt") from None
    return scanned


def dmlab(root: Path) -> dict[str, Source]:
    """Frames of DeepMind Lab; six classes of the distance to objects with positive or negative reward."""
    return {split: open_records(root, split) for split in ("train", "validation", "test")}


def open_records(root: Path, split: str) -> Source:
    paths = sorted(root.glob(f"dmlab-{split}.tfrecord*"))
    paths = paths or sorted(need(root, "dmlab").glob(f"dmlab-{split}.tfrecord*"))
    if not paths:
        raise Error(
            f"{root}: has no dmlab-{split}.tfrecord; docs/research/vtab.md lists the expected files",
            code="file.not-found",
        )
    parts = [scan(path, path.stat().st_mtime_ns) for path in paths]
    files = [Positioned(path) for path in paths]
    locations = [(number, row) for number, part in enumerate(parts) for row in range(len(part.keys))]
    labels = np.array([label for part in parts for label in part.labels], dtype=np.int64)
    if labels.max(initial=0) >= len(CLASSES):
        raise Error(
            f"{root}, {split}: label {labels.max()}, but there are {len(CLASSES)} classes", code="data.labels"
        )

    records = Records(split, parts, files, locations)
    return Source("dmlab", CLASSES, Lazy(len(locations), records.key), labels, records.fetch)


@dataclass(frozen=True)
class Records:
    """The images of a split: where each is in its files."""

    split: str
    parts: list[Scanned]
    files: list[Positioned]
    locations: list[tuple[int, int]]  # the file and the row of each image

    def fetch(self, index: int) -> bytes:
        number, row = self.locations[index]
        (start, length), (first, last) = self.parts[number].records[row], self.parts[number].images[row]
        content = self.files[number].read_at(start, length + 4)
        if masked_crc(content[:length]) != int.from_bytes(content[length:], "little"):
            where = f"{self.files[number].path.name}: wrong checksum at byte {start + length}"
            raise BadImage("damaged", where)
        return content[first - start : last - start]

    def key(self, index: int) -> str:
        number, row = self.locations[index]
        return f"{self.split}/{self.parts[number].keys[row]}"
