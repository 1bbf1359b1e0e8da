"""MATLAB 5 files, read without MATLAB or scipy: SVHN's cropped digits, and the lists of Flowers102."""

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from vitkit.data.sources import Lazy, Source
from vitkit.data.vtab.lists import Row, from_files, need

MATRIX, COMPRESSED = 14, 15  # kinds of elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
ARRAYS = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
COMPLEX = 0x0800
MOST = 2**31  # bytes that a compressed array may come to
SETS = {"train": "trnid", "validation": "valid", "test": "tstid"}


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of a version 5 file by name; other kinds of variables are passed over."""
    data = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if data.startswith(b"MATLAB 7.3") or order is None or len(data) < 128:
        what = "a version 7.3 file, which is HDF5" if data.startswith(b"MATLAB 7.3") else "no MATLAB 5 file"
        raise ValueError(f"{path}: {what}; MATLAB 5 files are read")
    found = {}
    try:
        for kind, body in elements(memoryview(data)[128:], order):
            if kind == COMPRESSED:
                kind, body = next(elements(memoryview(inflated(body)), order))
            if kind == MATRIX and (named := matrix(body, order)):
                found[named[0]] = named[1]
    except (ValueError, zlib.error, struct.error, StopIteration) as error:
        raise ValueError(f"{path}: a MATLAB file that is cut off or damaged ({error})") from None
    return found


def inflated(body: memoryview) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(body, MOST)
    if not stream.eof:
        raise ValueError("compressed data without an end")
    return found


def elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """(kind, content) of the elements one after the other; small ones have their content in their tag."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        start = at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if size > len(data) - start:
            raise ValueError(f"an element of {size} bytes, of which {len(data) - start} are there")
        yield kind, data[start : start + size]
        end = start + size
        at = end if kind == COMPRESSED else end + -end % 8  # all but compressed ones are padded


def matrix(body: memoryview, order: str) -> tuple[str, np.ndarray] | None:
    """A numeric array and its name; None for text, cells and structures."""
    parts = elements(body, order)
    (flags,) = struct.unpack_from(f"{order}I", next(parts)[1])
    if flags & 0xFF not in ARRAYS or flags & COMPLEX:
        return None
    shape = np.frombuffer(next(parts)[1], dtype=f"{order}i4")
    name = bytes(next(parts)[1]).decode("ascii", "replace")
    kind, content = next(parts)
    if kind not in NUMBERS or (shape < 0).any():
        raise ValueError(f"array {name!r} of kind {kind} and shape {tuple(shape)}")
    values = np.frombuffer(content, dtype=f"{order}{NUMBERS[kind]}")  # which may be narrower than its kind
    return name, values.reshape(tuple(map(int, shape)), order="F").astype(ARRAYS[flags & 0xFF], copy=False)


@lru_cache(maxsize=2)
def arrays_of(path: Path, changed: int) -> dict[str, np.ndarray]:
    return read_mat(path)


def svhn(root: Path) -> dict[str, Source]:
    """Digits of 32 pixels; the files call the digit 0 ten."""
    return {split: digits(need(root, f"{split}_32x32.mat"), split) for split in ("train", "test")}


def digits(path: Path, split: str) -> Source:
    found = arrays_of(path, path.stat().st_mtime_ns)
    if not {"X", "y"} <= set(found):
        raise ValueError(f"{path}: needs the arrays X and y, has {', '.join(found) or 'none'}")
    images, labels = found["X"], found["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels):
        shapes = f"X {images.dtype} {images.shape} and y {found['y'].shape}"
        raise ValueError(f"{path}: expected X uint8 (32, 32, 3, N) and y (N, 1), found {shapes}")
    if ((labels < 1) | (labels > 10)).any():
        raise ValueError(f"{path}: labels must be from 1 to 10")
    keys = Lazy(len(labels), lambda i: f"{split}/{i}")
    numbers = (labels % 10).astype(np.int64)
    return Source("svhn", tuple("0123456789"), keys, numbers, lambda i: np.ascontiguousarray(images[..., i]))


def flowers102(root: Path) -> dict[str, Source]:
    """Flowers; one file has every image's class from 1, another the numbers of each split's images."""
    labels = read_mat(need(root, "imagelabels.mat")).get("labels", np.empty(0)).reshape(-1)
    sets, images = read_mat(need(root, "setid.mat")), need(root, "jpg")
    found: dict[str, list[Row]] = {}
    for split, variable in SETS.items():
        numbers = sets.get(variable, np.empty(0)).reshape(-1)
        if ((numbers < 1) | (numbers > len(labels))).any():
            raise ValueError(f"{root}: {variable} in setid.mat names images that imagelabels.mat has not")
        names = [(f"image_{int(n):05d}.jpg", int(labels[int(n) - 1])) for n in numbers]
        found[split] = [(name, images / name, f"{label:03d}") for name, label in names]
    return from_files("flowers102", found)
