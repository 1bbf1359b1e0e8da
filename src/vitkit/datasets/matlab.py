"""MATLAB 5 files: the digits of SVHN, and the lists of Flowers102 and Stanford Cars.

scipy.io is not used, since it has no limits: a file of 300 kB with nested cells crashes the process.
"""

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.sources.source import Lazy, Source
from vitkit.datasets.image_files import Row, from_files, need
from vitkit.errors import Error

MATRIX, COMPRESSED = 14, 15  # element types
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
ARRAYS = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
COMPLEX = 0x0800
CELLS, STRUCTS, TEXT = 1, 2, 4  # array classes that are not numeric
TEXTS = {2: "latin-1", 1: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}  # encodings by element type
MOST = 2**31  # the limit of a decompressed array in bytes
CARS = {
    "train": ("devkit/cars_train_annos.mat",),
    "test": ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"),
}
SETS = {"train": "trnid", "validation": "valid", "test": "tstid"}


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of a version 5 file by name; other variables are skipped."""
    return {name: value for name, value in read_variables(path).items() if isinstance(value, np.ndarray)}


def read_variables(path: Path) -> dict[str, Any]:
    """The variables of a version 5 file by name: arrays, text, cells (list), structs (list of dicts)."""
    data = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if data.startswith(b"MATLAB 7.3") or order is None or len(data) < 128:
        hint = "; it is a version 7.3 file, which is HDF5" if data.startswith(b"MATLAB 7.3") else ""
        raise Error(f"{path}: not a MATLAB 5 file{hint}", code="data.layout")
    variables = {}
    try:
        for kind, body in elements(memoryview(data)[128:], order):
            if kind == COMPRESSED:
                kind, body = next(elements(memoryview(inflated(body)), order))
            if kind == MATRIX:
                name, value = matrix(body, order)
                variables[name] = value
    except (ValueError, TypeError, zlib.error, struct.error, StopIteration, RecursionError) as error:
        raise Error(f"{path}: truncated or damaged MATLAB file ({error})", code="data.corrupt") from None
    return variables


def inflated(body: memoryview) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(body, MOST)
    if not stream.eof:
        raise ValueError("compressed data without an end")
    return content


def elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """(type, content) of consecutive elements; small ones have their content inside the tag."""
    offset = 0
    while offset < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, offset)
        start = offset + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, offset + 4
        if size > len(data) - start:
            raise ValueError(f"an element of {size} bytes, of which only {len(data) - start} exist")
        yield kind, data[start : start + size]
        end = start + size
        offset = end if kind == COMPRESSED else end + -end % 8  # all but compressed elements are padded


def matrix(body: memoryview, order: str) -> tuple[str, Any]:
    """The name and value of a variable; None if it is neither numeric, text, cells nor structs."""
    if not len(body):
        return "", np.empty(0)
    parts = elements(body, order)
    (flags,) = struct.unpack_from(f"{order}I", next(parts)[1])
    shape = np.frombuffer(next(parts)[1], dtype=f"{order}i4")
    name = bytes(next(parts)[1]).decode("ascii", "replace")
    array_class = flags & 0xFF
    if (shape < 0).any():
        raise ValueError(f"array {name!r} of shape {tuple(shape)}")
    if array_class == CELLS:
        return name, [matrix(content, order)[1] for _, content in parts]
    if array_class == STRUCTS:
        return name, structures(parts, order)
    if array_class == TEXT:
        kind, content = next(parts)
        codec = TEXTS.get(kind, "latin-1")
        codec += {"<": "-le", ">": "-be"}[order] if codec == "utf-16" else ""
        return name, bytes(content).decode(codec, "replace")
    if array_class not in ARRAYS or flags & COMPLEX:
        return name, None
    kind, content = next(parts)
    if kind not in NUMBERS:
        raise ValueError(f"array {name!r} of type {kind} and shape {tuple(shape)}")
    values = np.frombuffer(content, dtype=f"{order}{NUMBERS[kind]}")  # may be narrower than the array class
    return name, values.reshape(tuple(map(int, shape)), order="F").astype(ARRAYS[array_class], copy=False)


def structures(parts: Iterator[tuple[int, memoryview]], order: str) -> list[dict[str, Any]]:
    """The elements of a struct array, stored as the width of a name, all names, then the fields of each."""
    (width,) = struct.unpack_from(f"{order}i", next(parts)[1])
    names = bytes(next(parts)[1])
    if width < 1 or len(names) % width:
        raise ValueError(f"field names of {width} bytes in {len(names)}")
    fields = [names[start : start + width].split(b"\0")[0].decode("ascii", "replace")
              for start in range(0, len(names), width)]  # fmt: skip
    values = [matrix(content, order)[1] for _, content in parts]
    if not fields or len(values) % len(fields):
        raise ValueError(f"{len(values)} values for structs of {len(fields)} fields")
    return [dict(zip(fields, values[start : start + len(fields)], strict=True))
            for start in range(0, len(values), len(fields))]  # fmt: skip


@lru_cache(maxsize=2)
def arrays_of(path: Path, changed: int) -> dict[str, np.ndarray]:
    return read_mat(path)


def svhn(root: Path) -> dict[str, Source]:
    """Digits of 32 pixels; the files have label 10 for the digit 0."""
    return {split: svhn_split(need(root, f"{split}_32x32.mat"), split) for split in ("train", "test")}


def svhn_split(path: Path, split: str) -> Source:
    arrays = arrays_of(path, path.stat().st_mtime_ns)
    if not {"X", "y"} <= set(arrays):
        raise Error(
            f"{path}: needs the arrays X and y, has {', '.join(arrays) or 'none'}", code="data.layout"
        )
    images, labels = arrays["X"], arrays["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels):
        raise Error(
            f"{path}: expected X uint8 (32, 32, 3, N) and y (N, 1), not X {images.dtype} {images.shape} and "
            f"y {arrays['y'].shape}",
            code="data.layout",
        )
    if ((labels < 1) | (labels > 10)).any():
        raise Error(f"{path}: labels must be from 1 to 10", code="data.labels")
    keys = Lazy(len(labels), partial("{}/{}".format, split))
    numbers = (labels % 10).astype(np.int64)
    return Source("svhn", tuple("0123456789"), keys, numbers, partial(image_of, images))


def image_of(images: np.ndarray, index: int) -> np.ndarray:
    return np.ascontiguousarray(images[..., index])


def flowers102(root: Path) -> dict[str, Source]:
    return from_files("flowers102", flower_rows(root))


def flower_rows(root: Path) -> dict[str, list[Row]]:
    """Flowers; one file has the class of every image, from 1, another the image numbers of each split."""
    labels = read_mat(need(root, "imagelabels.mat")).get("labels", np.empty(0)).reshape(-1)
    sets, images = read_mat(need(root, "setid.mat")), need(root, "jpg")
    rows: dict[str, list[Row]] = {}
    for split, variable in SETS.items():
        numbers = sets.get(variable, np.empty(0)).reshape(-1)
        if ((numbers < 1) | (numbers > len(labels))).any():
            raise Error(
                f"{root}: {variable} in setid.mat lists images that are not in imagelabels.mat",
                code="data.labels",
            )
        names = [(f"image_{int(n):05d}.jpg", int(labels[int(n) - 1])) for n in numbers]
        rows[split] = [(name, images / name, f"{label:03d}") for name, label in names]
    return rows


def car_rows(root: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """Cars; structs of a file name and a class number from 1, and the list of class names."""
    meta = need(root, "devkit/cars_meta.mat")
    names = read_variables(meta).get("class_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Error(f"{meta}: has no list class_names", code="data.layout")
    classes = [name.replace("/", "-") for name in names]  # "Ram C/V Cargo Van" is not a nested folder
    rows: dict[str, list[Row]] = {}
    for split, files in CARS.items():
        path = need(root, *files)
        annotations = read_variables(path).get("annotations")
        try:
            numbers = [(str(row["fname"]), int(row["class"].item())) for row in annotations or ()]
        except (TypeError, KeyError, AttributeError, ValueError):
            raise Error(
                f"{path}: expected a list of annotations with fname and class", code="data.layout"
            ) from None
        wrong = next((pair for pair in numbers if not 1 <= pair[1] <= len(classes)), None)
        if wrong:
            raise Error(
                f"{path}: {wrong[0]!r} has class {wrong[1]}, but there are {len(classes)} classes",
                code="data.labels",
            )
        images = need(root, f"cars_{split}")
        rows[split] = [(name, images / name, classes[label - 1]) for name, label in numbers]
    return rows, classes
