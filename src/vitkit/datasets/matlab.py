"""MATLAB 5 files: SVHN's digits, the lists of Flowers102 and Stanford Cars.

scipy.io is not used: it has no limits, and a file of 300 kB with cells in cells ends the process.
"""

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.sources.source import Lazy, Source
from vitkit.datasets.image_files import Row, from_files, need
from vitkit.errors import Error

MATRIX, COMPRESSED = 14, 15  # kinds of elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
ARRAYS = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
COMPLEX = 0x0800
CELLS, STRUCTS, TEXT = 1, 2, 4  # classes of arrays that are not numeric
TEXTS = {2: "latin-1", 1: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}  # encodings by kind of element
MOST = 2**31  # bytes that a compressed array may come to
CARS = {
    "train": ("devkit/cars_train_annos.mat",),
    "test": ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"),
}
SETS = {"train": "trnid", "validation": "valid", "test": "tstid"}


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of a version 5 file by name; other kinds of variables are passed over."""
    return {name: value for name, value in read_variables(path).items() if isinstance(value, np.ndarray)}


def read_variables(path: Path) -> dict[str, Any]:
    """The variables of a version 5 file by name: arrays, text, cells (list), structures (list of dicts)."""
    data = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if data.startswith(b"MATLAB 7.3") or order is None or len(data) < 128:
        what = "a version 7.3 file, which is HDF5" if data.startswith(b"MATLAB 7.3") else "no MATLAB 5 file"
        raise Error(f"{path}: {what}; MATLAB 5 files are read", code="data.layout")
    found = {}
    try:
        for kind, body in elements(memoryview(data)[128:], order):
            if kind == COMPRESSED:
                kind, body = next(elements(memoryview(inflated(body)), order))
            if kind == MATRIX:
                name, value = matrix(body, order)
                found[name] = value
    except (ValueError, TypeError, zlib.error, struct.error, StopIteration, RecursionError) as error:
        why = f"{path}: a MATLAB file that is cut off or damaged ({error})"
        raise Error(why, code="data.corrupt") from None
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


def matrix(body: memoryview, order: str) -> tuple[str, Any]:
    """A variable and its name; None for what is neither numbers, text, cells nor structures."""
    if not len(body):
        return "", np.empty(0)
    parts = elements(body, order)
    (flags,) = struct.unpack_from(f"{order}I", next(parts)[1])
    shape = np.frombuffer(next(parts)[1], dtype=f"{order}i4")
    name = bytes(next(parts)[1]).decode("ascii", "replace")
    kind_of = flags & 0xFF
    if (shape < 0).any():
        raise ValueError(f"array {name!r} of shape {tuple(shape)}")
    if kind_of == CELLS:
        return name, [matrix(content, order)[1] for _, content in parts]
    if kind_of == STRUCTS:
        return name, structures(parts, order)
    if kind_of == TEXT:
        kind, content = next(parts)
        codec = TEXTS.get(kind, "latin-1")
        codec += {"<": "-le", ">": "-be"}[order] if codec == "utf-16" else ""
        return name, bytes(content).decode(codec, "replace")
    if kind_of not in ARRAYS or flags & COMPLEX:
        return name, None
    kind, content = next(parts)
    if kind not in NUMBERS:
        raise ValueError(f"array {name!r} of kind {kind} and shape {tuple(shape)}")
    values = np.frombuffer(content, dtype=f"{order}{NUMBERS[kind]}")  # which may be narrower than its kind
    return name, values.reshape(tuple(map(int, shape)), order="F").astype(ARRAYS[kind_of], copy=False)


def structures(parts: Iterator[tuple[int, memoryview]], order: str) -> list[dict[str, Any]]:
    """The elements of an array of structures: the width of a name, all names, then the fields of each."""
    (width,) = struct.unpack_from(f"{order}i", next(parts)[1])
    names = bytes(next(parts)[1])
    if width < 1 or len(names) % width:
        raise ValueError(f"names of fields of {width} bytes in {len(names)}")
    cells = [names[at : at + width].split(b"\0")[0].decode("ascii", "replace")
             for at in range(0, len(names), width)]  # fmt: skip
    values = [matrix(content, order)[1] for _, content in parts]
    if not cells or len(values) % len(cells):
        raise ValueError(f"{len(values)} values for structures of {len(cells)} fields")
    return [dict(zip(cells, values[at : at + len(cells)], strict=True))
            for at in range(0, len(values), len(cells))]  # fmt: skip


@lru_cache(maxsize=2)
def arrays_of(path: Path, changed: int) -> dict[str, np.ndarray]:
    return read_mat(path)


def svhn(root: Path) -> dict[str, Source]:
    """Digits of 32 pixels; the files call the digit 0 ten."""
    return {split: digits(need(root, f"{split}_32x32.mat"), split) for split in ("train", "test")}


def digits(path: Path, split: str) -> Source:
    found = arrays_of(path, path.stat().st_mtime_ns)
    if not {"X", "y"} <= set(found):
        why = f"{path}: needs the arrays X and y, has {', '.join(found) or 'none'}"
        raise Error(why, code="data.layout")
    images, labels = found["X"], found["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels):
        shapes = f"X {images.dtype} {images.shape} and y {found['y'].shape}"
        why = f"{path}: expected X uint8 (32, 32, 3, N) and y (N, 1), found {shapes}"
        raise Error(why, code="data.layout")
    if ((labels < 1) | (labels > 10)).any():
        raise Error(f"{path}: labels must be from 1 to 10", code="data.labels")
    keys = Lazy(len(labels), lambda i: f"{split}/{i}")
    numbers = (labels % 10).astype(np.int64)
    return Source("svhn", tuple("0123456789"), keys, numbers, lambda i: np.ascontiguousarray(images[..., i]))


def flowers102(root: Path) -> dict[str, Source]:
    return from_files("flowers102", flower_rows(root))


def flower_rows(root: Path) -> dict[str, list[Row]]:
    """Flowers; one file has every image's class from 1, another the numbers of each split's images."""
    labels = read_mat(need(root, "imagelabels.mat")).get("labels", np.empty(0)).reshape(-1)
    sets, images = read_mat(need(root, "setid.mat")), need(root, "jpg")
    found: dict[str, list[Row]] = {}
    for split, variable in SETS.items():
        numbers = sets.get(variable, np.empty(0)).reshape(-1)
        if ((numbers < 1) | (numbers > len(labels))).any():
            why = f"{root}: {variable} in setid.mat names images that imagelabels.mat has not"
            raise Error(why, code="data.labels")
        names = [(f"image_{int(n):05d}.jpg", int(labels[int(n) - 1])) for n in numbers]
        found[split] = [(name, images / name, f"{label:03d}") for name, label in names]
    return found


def car_rows(root: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """Cars: structures of a file's name and class from 1, and the names of the classes in order."""
    meta = need(root, "devkit/cars_meta.mat")
    listed = read_variables(meta).get("class_names")
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise Error(f"{meta}: has no list class_names", code="data.layout")
    classes = [name.replace("/", "-") for name in listed]  # as in Ram C/V Cargo Van: no folder
    found: dict[str, list[Row]] = {}
    for split, listing in CARS.items():
        path = need(root, *listing)
        rows = read_variables(path).get("annotations")
        try:
            numbers = [(str(row["fname"]), int(row["class"].item())) for row in rows or ()]
        except (TypeError, KeyError, AttributeError, ValueError):
            why = f"{path}: not a list of annotations with fname and class"
            raise Error(why, code="data.layout") from None
        wrong = next((pair for pair in numbers if not 1 <= pair[1] <= len(classes)), None)
        if wrong:
            why = f"{path}: {wrong[0]!r} is of class {wrong[1]}, not one of {len(classes)}"
            raise Error(why, code="data.labels")
        images = need(root, f"cars_{split}")
        found[split] = [(name, images / name, classes[label - 1]) for name, label in numbers]
    return found, classes
