"""Data sets of raw pixels in few files: CIFAR's binary versions, small NORB, dSprites, PatchCamelyon."""

import gzip
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.sources.source import Lazy, Source
from vitkit.datasets.image_files import lines, need
from vitkit.errors import Error, code_of

PIXELS = 3 * 32 * 32  # bytes of a CIFAR image: red, green, blue
CIFAR10_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
NORB_KINDS = {0x1E3D4C55: "u1", 0x1E3D4C54: "<i4"}  # by the first four bytes
NORB_FILES = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training",
              "test": "smallnorb-5x01235x9x18x6x2x96x96-testing"}  # fmt: skip
NORB_RULES = {"elevation": (1, 1, 9), "azimuth": (2, 2, 18)}  # info column, divisor, classes
SPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
SPRITE_RULES = {"orientation": (3, 40), "location": (4, 32)}  # column of latents_classes, values
GROUPED = 16
CHUNK = 4096  # sprites that are in memory as bytes at a time
MOST = 2**32  # the limit of an array in bytes
DAMAGE = (OSError, EOFError, KeyError, zlib.error, zipfile.BadZipFile, struct.error)


def stored(name: str, split: str, labels: np.ndarray, classes: tuple[str, ...], fetch: Any) -> Source:
    """A source whose keys are the positions of the images in their file."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise Error(
            f"{name}, {split}: labels from {labels.min()} to {labels.max()}, but there are {len(classes)} "
            "classes",
            code="data.labels",
        )
    return Source(
        name, classes, Lazy(len(labels), partial("{}/{}".format, split)), labels.astype(np.int64), fetch
    )


def numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def cifar100(root: Path) -> dict[str, Source]:
    """100 classes; the label is the second byte of a row, after a coarse class; pickles are rejected."""
    if not any((root / place).exists() for place in ("train.bin", "cifar-100-binary")):
        refuse_pickles(root, "cifar-100", ("cifar-100-python", "train"))
    inner = need(root, "train.bin", "cifar-100-binary/train.bin").parent
    files = {split: [f"{split}.bin"] for split in ("train", "test")}
    return cifar("cifar100", inner, files, 2, "fine_label_names.txt", 100)


def cifar10(root: Path) -> dict[str, Source]:
    """10 classes; the label is the first byte of a row, in five training files and one for test."""
    if not any((root / place).exists() for place in ("data_batch_1.bin", "cifar-10-batches-bin")):
        refuse_pickles(root, "cifar-10", ("cifar-10-batches-py", "data_batch_1"))
    inner = need(root, "data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin").parent
    return cifar("cifar10", inner, CIFAR10_FILES, 1, "batches.meta.txt", 10)


def refuse_pickles(root: Path, name: str, places: tuple[str, ...]) -> None:
    if any((root / place).exists() for place in places):
        raise Error(
            f"{root}: the python version of {name} is a pickle, which can run code when it is read; use the "
            f"binary version: https://www.cs.toronto.edu/~kriz/{name}-binary.tar.gz, unpacked with "
            f"'tar -xf {name}-binary.tar.gz'",
            code="data.unsafe",
        )


def cifar(
    name: str, root: Path, files: Mapping[str, list[str]], lead: int, names: str, count: int
) -> dict[str, Source]:
    """Rows of `lead` bytes, the last of them the label, and the pixels; a split is one or several files."""
    classes = numbered(count)
    if (root / names).exists():
        classes = tuple(line for _, line in lines(root / names))
    sources = {}
    for split, file_names in files.items():
        parts = []
        for path in (need(root, file) for file in file_names):
            size, row = path.stat().st_size, lead + PIXELS
            if not size or size % row:
                raise Error(
                    f"{path}: {size} bytes are not a multiple of {row}, the size of an image; truncated?",
                    code="data.corrupt",
                )
            parts.append(np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, row))
        labels = np.concatenate([part[:, lead - 1] for part in parts])
        sources[split] = stored(name, split, labels, classes, CifarRows(parts, lead))
    return sources


class CifarRows:
    """The pixels of the rows of several files."""

    def __init__(self, parts: list[np.ndarray], lead: int):
        self.parts, self.lead, self.ends = parts, lead, np.cumsum([len(part) for part in parts])

    def __call__(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self.ends, index, side="right"))
        row = self.parts[part][index - self.ends[part], self.lead :]  # a negative index, from the file's end
        return np.ascontiguousarray(row.reshape(3, 32, 32).transpose(1, 2, 0))


def gray(image: np.ndarray) -> np.ndarray:
    """Repeat one channel three times."""
    return np.broadcast_to(image[..., None], (*image.shape, 3))


def read_norb(path: Path) -> np.ndarray:
    """A NORB matrix: type, number of dimensions, at least three dimensions, values; gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            kind, ndim = struct.unpack("<Ii", file.read(8))
            if kind not in NORB_KINDS or not 1 <= ndim <= 8:
                raise Error(f"{path}: not a NORB matrix, by its first bytes", code="data.corrupt")
            shape = struct.unpack(f"<{max(3, ndim)}i", file.read(4 * max(3, ndim)))[:ndim]
            dtype = np.dtype(NORB_KINDS[kind])
            size = prod(shape) * dtype.itemsize
            if min(shape) < 1 or size > MOST:
                raise Error(f"{path}: a matrix of shape {shape}", code="data.corrupt")
            if path.suffix != ".gz" and path.stat().st_size >= file.tell() + size:
                return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
            values = file.read(size)
    except DAMAGE as error:
        raise Error(f"{path}: truncated or damaged ({error})", code="data.corrupt") from None
    if len(values) < size:
        raise Error(
            f"{path}: truncated: {len(values)} of {size} bytes for shape {shape}", code="data.corrupt"
        )
    return np.frombuffer(values, dtype=dtype).reshape(shape)


@lru_cache(maxsize=2)
def norb_images(path: Path, changed: int) -> np.ndarray:
    return read_norb(path)


def smallnorb(root: Path, rule: str) -> dict[str, Source]:
    """Toys of 96 pixels from the first of two cameras; the label is a column of info."""
    column, divisor, classes = NORB_RULES[rule]
    sources = {}
    for split, stem in NORB_FILES.items():
        dat, info = (need(root, f"{stem}-{part}.mat", f"{stem}-{part}.mat.gz") for part in ("dat", "info"))
        images, facts = norb_images(dat, dat.stat().st_mtime_ns), read_norb(info)
        fits = images.ndim == 4 and images.shape[1] == 2 and facts.ndim == 2 and facts.shape[1] == 4
        if not fits or images.dtype != np.uint8 or len(images) != len(facts):
            shapes = f"{images.shape} and {facts.shape}"
            raise Error(
                f"{root}, {split}: expected images (N, 2, 96, 96) and info (N, 4), not {shapes}",
                code="data.layout",
            )
        labels = facts[:, column] // divisor  # azimuths are numbered 0, 2, 4, ... 34
        sources[split] = stored("smallnorb", split, labels, numbered(classes), partial(first_camera, images))
    return sources


def first_camera(images: np.ndarray, index: int) -> np.ndarray:
    return gray(np.asarray(images[index, 0]))


def grouped(values: np.ndarray, count: int) -> np.ndarray:
    """`count` values grouped into 16 classes of neighbours."""
    return np.floor_divide(values.astype(np.float32), np.float32(count / GROUPED)).astype(np.int64)


def dsprites(root: Path, rule: str) -> dict[str, Source]:
    """White shapes at every scale, orientation and position; the pickled metadata is not read."""
    column, values = SPRITE_RULES[rule]
    path = need(root, SPRITES)
    if not zipfile.is_zipfile(path):
        raise Error(f"{path}: not an .npz file, or truncated", code="data.corrupt")
    try:
        with np.load(path, allow_pickle=False) as file:
            latents = file["latents_classes"]
        bits, shape = sprites(path, path.stat().st_mtime_ns)
    except (
        *DAMAGE,
        ValueError,
        SyntaxError,
        tokenize.TokenError,
    ) as error:  # numpy parses a header as Python
        raise Error(
            f"{path}: not the published file, or truncated ({error})", code=code_of(error, "data.corrupt")
        ) from None
    if latents.ndim != 2 or latents.shape[1] != 6 or len(latents) != len(bits):
        raise Error(
            f"{path}: {len(bits)} images, but latents_classes of shape {latents.shape}", code="data.layout"
        )
    if latents[:, column].max() >= values:
        raise Error(
            f"{path}: {rule} has values up to {latents[:, column].max()}; expected up to {values - 1}",
            code="data.labels",
        )
    labels = grouped(latents[:, column], values)
    return {"train": stored("dsprites", "train", labels, numbered(GROUPED), partial(sprite, bits, shape))}


def sprite(bits: np.ndarray, shape: tuple[int, int], index: int) -> np.ndarray:
    return gray(np.unpackbits(bits[index], count=prod(shape)).reshape(shape) * np.uint8(255))


@lru_cache(maxsize=1)
def sprites(path: Path, changed: int) -> tuple[np.ndarray, tuple[int, int]]:
    """The binary images packed to bits, an eighth of their 3 GB, and the size of an image."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise Error("imgs must have version 1.0 of numpy's format", code="data.layout")
        (count, *sides), fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if len(sides) != 2 or fortran or dtype != np.uint8 or count * prod(sides) > MOST:
            raise Error(f"imgs must be uint8 (N, H, W), not {dtype} {(count, *sides)}", code="data.layout")
        bits = np.empty((count, -(-prod(sides) // 8)), np.uint8)
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            block = file.read(size * prod(sides))
            if len(block) < size * prod(sides):
                raise Error(f"imgs ends before image {start + size}", code="data.corrupt")
            values = np.frombuffer(block, np.uint8).reshape(size, -1)
            if values.max() > 1:
                raise Error("imgs must contain only 0 and 1", code="data.corrupt")
            bits[start : start + size] = np.packbits(values, axis=1)
    return bits, (sides[0], sides[1])


class Hdf5:
    """One array of an HDF5 file, reopened in each process, since HDF5 handles do not survive a fork."""

    def __init__(self, path: Path, name: str):
        self.path, self.name, self.process, self.array = path, name, -1, None

    def __reduce__(self) -> tuple[type["Hdf5"], tuple[Path, str]]:
        return Hdf5, (self.path, self.name)

    def dataset(self) -> Any:
        if self.process != os.getpid():
            try:
                from h5py import File
            except ModuleNotFoundError:
                remedy = "pip install 'vitkit[vtab]', or use .parquet files"
                raise Error(
                    f"{self.path}: reading HDF5 needs h5py ({remedy})", code="request.extra-missing"
                ) from None
            try:
                self.array, self.process = File(self.path, "r")[self.name], os.getpid()
            except (OSError, KeyError) as error:
                raise Error(
                    f"{self.path}: not an HDF5 file with the array {self.name!r} ({error})",
                    code="data.corrupt",
                ) from None
        return self.array

    def fetch(self, index: int) -> np.ndarray:
        try:
            return np.asarray(self.dataset()[index])
        except OSError as error:
            raise BadImage("unreadable", f"{self.path.name}, image {index}: {error}") from None


def camelyon(root: Path) -> dict[str, Source]:
    """Tissue patches of 96 pixels, with or without a tumour in the centre."""
    sources = {}
    for split, word in {"train": "train", "validation": "valid", "test": "test"}.items():
        paths = (need(root, f"camelyonpatch_level_2_split_{word}_{axis}.h5") for axis in "xy")
        images, labels = (Hdf5(path, axis) for path, axis in zip(paths, "xy", strict=True))
        numbers, shape = np.asarray(labels.dataset()).reshape(-1), images.dataset().shape
        if len(shape) != 4 or shape[3] != 3 or shape[0] != len(numbers):
            raise Error(
                f"{root}, {split}: {len(numbers)} labels and images of shape {shape}", code="data.layout"
            )
        source = stored("camelyon", split, numbers, ("normal", "tumour"), images.fetch)
        keys = Lazy(len(numbers), partial("{}/{}_{}".format, split, word))
        sources[split] = Source(source.name, source.classes, keys, source.labels, source.fetch)
    return sources
