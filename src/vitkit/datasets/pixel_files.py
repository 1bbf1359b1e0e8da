"""Images as pixels in one file: CIFAR's binary versions, small NORB, dSprites, PatchCamelyon."""

import gzip
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.sources.source import Lazy, Source
from vitkit.datasets.image_files import lines, need
from vitkit.errors import Error, code_of

PIXELS = 3 * 32 * 32  # bytes of an image of CIFAR: red, green, blue
CIFAR10_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
NORB_KINDS = {0x1E3D4C55: "u1", 0x1E3D4C54: "<i4"}  # by the first four bytes
NORB_FILES = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training",
              "test": "smallnorb-5x01235x9x18x6x2x96x96-testing"}  # fmt: skip
NORB_RULES = {"elevation": (1, 1, 9), "azimuth": (2, 2, 18)}  # column of info, divisor, classes
SPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
SPRITE_RULES = {"orientation": (3, 40), "location": (4, 32)}  # column of latents_classes, values
GROUPED = 16
AT_ONCE = 4096  # sprites in memory as bytes
MOST = 2**32  # bytes of one array
DAMAGE = (OSError, EOFError, KeyError, zlib.error, zipfile.BadZipFile, struct.error)


def stored(name: str, split: str, labels: np.ndarray, classes: tuple[str, ...], fetch: Any) -> Source:
    """A source whose keys are the images' numbers in their file."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        found = f"labels from {labels.min()} to {labels.max()}"
        raise Error(f"{name}, {split}: {found}, but there are {len(classes)} classes", code="data.labels")
    return Source(name, classes, Lazy(len(labels), lambda i: f"{split}/{i}"), labels.astype(np.int64), fetch)


def numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def cifar100(root: Path) -> dict[str, Source]:
    """100 classes, the second byte of each image, the first being a coarse class; the pickle is refused."""
    if not any((root / place).exists() for place in ("train.bin", "cifar-100-binary")):
        refuse_pickles(root, "cifar-100", ("cifar-100-python", "train"))
    inner = need(root, "train.bin", "cifar-100-binary/train.bin").parent
    files = {split: [f"{split}.bin"] for split in ("train", "test")}
    return cifar("cifar100", inner, files, 2, "fine_label_names.txt", 100)


def cifar10(root: Path) -> dict[str, Source]:
    """10 classes, the first byte of each image, in five files and one; the pickle is refused."""
    if not any((root / place).exists() for place in ("data_batch_1.bin", "cifar-10-batches-bin")):
        refuse_pickles(root, "cifar-10", ("cifar-10-batches-py", "data_batch_1"))
    inner = need(root, "data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin").parent
    return cifar("cifar10", inner, CIFAR10_FILES, 1, "batches.meta.txt", 10)


def refuse_pickles(root: Path, name: str, places: tuple[str, ...]) -> None:
    if any((root / place).exists() for place in places):
        raise Error(
            f"{root}: {name}'s python version is a pickle, which can run code when it is read; get the "
            f"binary version instead: https://www.cs.toronto.edu/~kriz/{name}-binary.tar.gz, unpacked by "
            f"'tar -xf {name}-binary.tar.gz'",
            code="data.unsafe",
        )


def cifar(
    name: str, root: Path, files: Mapping[str, list[str]], lead: int, names: str, count: int
) -> dict[str, Source]:
    """Rows of `lead` bytes, the last of them the class, and the pixels; a split is one or several files."""
    classes = numbered(count)
    if (root / names).exists():
        classes = tuple(line for _, line in lines(root / names))
    found = {}
    for split, listed in files.items():
        parts = []
        for path in (need(root, file) for file in listed):
            size, row = path.stat().st_size, lead + PIXELS
            if not size or size % row:
                raise Error(
                    f"{path}: {size} bytes are no whole number of images ({row} each): cut off?",
                    code="data.corrupt",
                )
            parts.append(np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, row))
        labels = np.concatenate([part[:, lead - 1] for part in parts])
        found[split] = stored(name, split, labels, classes, pixels_of(parts, lead))
    return found


def pixels_of(parts: list[np.ndarray], lead: int) -> Any:
    ends = np.cumsum([len(part) for part in parts])

    def fetch(i: int) -> np.ndarray:
        part = int(np.searchsorted(ends, i, side="right"))
        row = parts[part][i - ends[part], lead:]  # counted from the end of its file
        return np.ascontiguousarray(row.reshape(3, 32, 32).transpose(1, 2, 0))

    return fetch


def gray(image: np.ndarray) -> np.ndarray:
    """One channel as three."""
    return np.broadcast_to(image[..., None], (*image.shape, 3))


def read_norb(path: Path) -> np.ndarray:
    """A matrix in NORB's own format: kind, number of sides, at least three sides, values; gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            kind, sides = struct.unpack("<Ii", file.read(8))
            if kind not in NORB_KINDS or not 1 <= sides <= 8:
                raise Error(f"{path}: not a matrix of NORB's, which begins otherwise", code="data.corrupt")
            shape = struct.unpack(f"<{max(3, sides)}i", file.read(4 * max(3, sides)))[:sides]
            dtype = np.dtype(NORB_KINDS[kind])
            size = prod(shape) * dtype.itemsize
            if min(shape) < 1 or size > MOST:
                raise Error(f"{path}: a matrix of shape {shape}", code="data.corrupt")
            if path.suffix != ".gz" and path.stat().st_size >= file.tell() + size:
                return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
            values = file.read(size)
    except DAMAGE as error:
        raise Error(f"{path}: cut off or damaged ({error})", code="data.corrupt") from None
    if len(values) < size:
        raise Error(f"{path}: cut off: {len(values)} bytes of {size} for shape {shape}", code="data.corrupt")
    return np.frombuffer(values, dtype=dtype).reshape(shape)


@lru_cache(maxsize=2)
def norb_images(path: Path, changed: int) -> np.ndarray:
    return read_norb(path)


def smallnorb(root: Path, rule: str) -> dict[str, Source]:
    """Toys of 96 pixels by the first of two cameras; the label is a column of info."""
    column, divisor, classes = NORB_RULES[rule]
    found = {}
    for split, start in NORB_FILES.items():
        dat, info = (need(root, f"{start}-{part}.mat", f"{start}-{part}.mat.gz") for part in ("dat", "info"))
        images, facts = norb_images(dat, dat.stat().st_mtime_ns), read_norb(info)
        fits = images.ndim == 4 and images.shape[1] == 2 and facts.ndim == 2 and facts.shape[1] == 4
        if not fits or images.dtype != np.uint8 or len(images) != len(facts):
            shapes = f"{images.shape} and {facts.shape}"
            raise Error(
                f"{root}, {split}: images (N, 2, 96, 96) and info (N, 4) expected, not {shapes}",
                code="data.layout",
            )
        labels = facts[:, column] // divisor  # azimuths are counted 0, 2, 4, ... 34
        found[split] = stored("smallnorb", split, labels, numbered(classes), camera(images))
    return found


def camera(images: np.ndarray) -> Any:
    return lambda i: gray(np.asarray(images[i, 0]))


def grouped(values: np.ndarray, count: int) -> np.ndarray:
    """Neighbouring ones of `count` values as one of 16 classes."""
    return np.floor_divide(values.astype(np.float32), np.float32(count / GROUPED)).astype(np.int64)


def dsprites(root: Path, rule: str) -> dict[str, Source]:
    """Every white shape at every scale, turn and place; the file's pickled metadata is not read."""
    column, values = SPRITE_RULES[rule]
    path = need(root, SPRITES)
    if not zipfile.is_zipfile(path):
        raise Error(f"{path}: not an .npz file, or cut off", code="data.corrupt")
    try:
        with np.load(path, allow_pickle=False) as file:
            latents = file["latents_classes"]
        bits, shape = sprites(path, path.stat().st_mtime_ns)
    except (*DAMAGE, ValueError, SyntaxError, tokenize.TokenError) as error:  # numpy reads a header as Python
        raise Error(
            f"{path}: not as published, or cut off ({error})", code=code_of(error, "data.corrupt")
        ) from None
    if latents.ndim != 2 or latents.shape[1] != 6 or len(latents) != len(bits):
        raise Error(
            f"{path}: {len(bits)} images and latents_classes of shape {latents.shape}", code="data.layout"
        )
    if latents[:, column].max() >= values:
        raise Error(
            f"{path}: {rule} has values up to {latents[:, column].max()}, not {values - 1}",
            code="data.labels",
        )

    def fetch(i: int) -> np.ndarray:
        return gray(np.unpackbits(bits[i], count=prod(shape)).reshape(shape) * np.uint8(255))

    labels = grouped(latents[:, column], values)
    return {"train": stored("dsprites", "train", labels, numbered(GROUPED), fetch)}


@lru_cache(maxsize=1)
def sprites(path: Path, changed: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Images of 0 and 1 as bits, an eighth of their 3 GB, and the size of one."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise Error("imgs is not in the first version of numpy's format", code="data.layout")
        (count, *sides), fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if len(sides) != 2 or fortran or dtype != np.uint8 or count * prod(sides) > MOST:
            raise Error(f"imgs must be uint8 (N, H, W), not {dtype} {(count, *sides)}", code="data.layout")
        bits = np.empty((count, -(-prod(sides) // 8)), np.uint8)
        for at in range(0, count, AT_ONCE):
            wanted = min(AT_ONCE, count - at)
            block = file.read(wanted * prod(sides))
            if len(block) < wanted * prod(sides):
                raise Error(f"imgs ends before image {at + wanted}", code="data.corrupt")
            values = np.frombuffer(block, np.uint8).reshape(wanted, -1)
            if values.max() > 1:
                raise Error("imgs must be 0 and 1", code="data.corrupt")
            bits[at : at + wanted] = np.packbits(values, axis=1)
    return bits, (sides[0], sides[1])


class Hdf5:
    """One array of an HDF5 file, opened anew in each process: such a file does not survive a fork."""

    def __init__(self, path: Path, name: str):
        self.path, self.name, self.process, self.array = path, name, -1, None

    def open(self) -> Any:
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
                    f"{self.path}: no HDF5 file with {self.name!r} in it ({error})", code="data.corrupt"
                ) from None
        return self.array

    def fetch(self, index: int) -> np.ndarray:
        try:
            return np.asarray(self.open()[index])
        except OSError as error:
            raise BadImage("unreadable", f"{self.path.name}, image {index}: {error}") from None


def camelyon(root: Path) -> dict[str, Source]:
    """Tissue of 96 pixels, with or without a tumour in its middle."""
    found = {}
    for split, word in {"train": "train", "validation": "valid", "test": "test"}.items():
        paths = (need(root, f"camelyonpatch_level_2_split_{word}_{axis}.h5") for axis in "xy")
        images, labels = (Hdf5(path, axis) for path, axis in zip(paths, "xy", strict=True))
        numbers, shape = np.asarray(labels.open()).reshape(-1), images.open().shape
        if len(shape) != 4 or shape[3] != 3 or shape[0] != len(numbers):
            raise Error(
                f"{root}, {split}: {len(numbers)} labels and images of shape {shape}", code="data.layout"
            )
        source = stored("camelyon", split, numbers, ("normal", "tumour"), images.fetch)
        keys = Lazy(len(numbers), lambda i, split=split, word=word: f"{split}/{word}_{i}")  # type: ignore[misc]
        found[split] = Source(source.name, source.classes, keys, source.labels, source.fetch)
    return found
