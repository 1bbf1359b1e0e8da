"""TFRecord files of tf.train.Examples, read without TensorFlow and with their checksums: DMLab."""

import mmap
import os
import struct
from collections.abc import Iterator
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
# Protocol buffers: fields of a tag (number << 3 | kind) and a value; kind 0 is a varint, 2 has a length.
MOST = 2**30  # bytes of a record
CLASSES = tuple(map(str, range(6)))


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecords store it: turned and shifted, since a checksum of checksums would be weak."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    try:
        import google_crc32c
    except ImportError:
        why = "reading TFRecords needs google-crc32c (pip install 'vitkit[vtab]')"
        raise Error(why, code="request.extra-missing") from None
    return google_crc32c.value(data)


def records(data: Any) -> Iterator[tuple[int, int]]:
    """(start, length) of the contents; the lengths are checked here, the contents when they are used."""
    at = 0
    while at < len(data):
        if at + 16 > len(data):
            raise ValueError(f"cut off at byte {at}")
        head = data[at : at + 8]
        (length,) = struct.unpack("<Q", head)
        if masked_crc(head) != struct.unpack_from("<I", data, at + 8)[0]:
            raise ValueError(f"no record begins at byte {at}: the checksum of its length is wrong")
        if length > min(MOST, len(data) - at - 16):
            raise ValueError(f"cut off: the record at byte {at} has {length} bytes")
        yield at + 12, length
        at += 16 + length


def varint(data: Any, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number without an end at byte {at}")


def fields(data: Any, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field, first byte, last byte + 1) of the fields with a length, (field, value, -1) of the varints."""
    at = start
    while at < end:
        tag, at = varint(data, at, end)
        value, at = varint(data, at, end)
        if tag & 7 == 0:
            yield tag >> 3, value, -1
        elif tag & 7 == 2 and value <= end - at:
            yield tag >> 3, at, at + value
            at += value
        else:
            raise ValueError(f"a field of kind {tag & 7} and {value} bytes at byte {at}")


def example(data: Any, start: int, end: int) -> dict[str, tuple[int, int]]:
    """Where the first value of each feature of a tf.train.Example stands, or (value, -1) for a number."""
    found = {}
    for one, *features in fields(data, start, end):  # Example.features = 1
        for entry, *pair in fields(data, *features) if one == 1 else ():  # Features.feature = 1, a map
            name, place = "", None
            for part, *inner in fields(data, *pair) if entry == 1 else ():
                if part == 1:
                    name = bytes(data[inner[0] : inner[1]]).decode("utf-8", "replace")
                elif part == 2:
                    place = first_value(data, *inner)
            if place is not None:
                found[name] = place
    return found


def first_value(data: Any, start: int, end: int) -> tuple[int, int] | None:
    """Of a Feature: bytes_list = 1 or int64_list = 3, whose numbers may be packed; floats are left out."""
    for kind, *listed in fields(data, start, end):
        if kind == 3:
            for _, value, stop in fields(data, *listed):
                return (value, -1) if stop < 0 else (varint(data, value, stop)[0], -1)
        elif kind == 1:
            return next(((a, b) for _, a, b in fields(data, *listed)), None)
    return None


class Scanned(NamedTuple):
    """The examples of one file: key, label, image (start, end), record (start, length)."""

    keys: list[str]
    labels: list[int]
    images: list[tuple[int, int]]
    records: list[tuple[int, int]]


@lru_cache(maxsize=64)
def scan(path: Path, changed: int) -> Scanned:
    found = Scanned([], [], [], [])
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start, length in records(data):
                features = example(data, start, start + length)
                (a, b), (label, _) = features["filename"], features["label"]
                found.keys.append(data[a:b].decode("utf-8", "surrogateescape"))
                found.labels.append(label)
                found.images.append(features["image"])
                found.records.append((start, length))
    except KeyError as error:
        raise Error(f"{path}: an example without the feature {error}", code="data.layout") from None
    except Error:
        raise
    except (ValueError, struct.error) as error:
        why = f"{path}: a TFRecord file that is cut off or damaged ({error})"
        raise Error(why, code="data.corrupt") from None
    return found


def dmlab(root: Path) -> dict[str, Source]:
    """Frames of DeepMind Lab: how far objects are that give or take reward, of six classes."""
    return {split: open_records(root, split) for split in ("train", "validation", "test")}


def open_records(root: Path, split: str) -> Source:
    paths = sorted(root.glob(f"dmlab-{split}.tfrecord*"))
    paths = paths or sorted(need(root, "dmlab").glob(f"dmlab-{split}.tfrecord*"))
    if not paths:
        why = f"{root}: has no dmlab-{split}.tfrecord; docs/vtab.md tells what goes there"
        raise Error(why, code="file.not-found")
    parts = [scan(path, path.stat().st_mtime_ns) for path in paths]
    files = [Positioned(path) for path in paths]
    where = [(number, row) for number, part in enumerate(parts) for row in range(len(part.keys))]
    labels = np.array([label for part in parts for label in part.labels], dtype=np.int64)
    if labels.max(initial=0) >= len(CLASSES):
        why = f"{root}, {split}: a label of {labels.max()}, but there are {len(CLASSES)} classes"
        raise Error(why, code="data.labels")

    def fetch(index: int) -> bytes:
        number, row = where[index]
        (start, length), (first, last) = parts[number].records[row], parts[number].images[row]
        content = os.pread(files[number].number, length + 4, start)
        if masked_crc(content[:length]) != int.from_bytes(content[length:], "little"):
            raise BadImage("damaged", f"{paths[number].name}: wrong checksum at byte {start + length}")
        return content[first - start : last - start]

    keys = Lazy(len(where), lambda i: f"{split}/{parts[where[i][0]].keys[where[i][1]]}")
    return Source("dmlab", CLASSES, keys, labels, fetch)
