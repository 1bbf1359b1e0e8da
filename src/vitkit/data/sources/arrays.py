"""Images and labels in .npz files; declared array sizes are checked before memory is allocated."""

import lzma
import struct
import tokenize
import zipfile
import zlib
from math import prod
from pathlib import Path

import numpy as np

from vitkit.data.names import SPLITS, check_aliases
from vitkit.data.sources.archives import Positioned
from vitkit.data.sources.openers import Opener, file_with_suffix
from vitkit.data.sources.source import Source, from_arrays
from vitkit.errors import Error, code_of
from vitkit.io.free_memory import total_memory

DAMAGE = (  # what numpy and zipfile raise for a malformed file
    OSError, EOFError, KeyError, ValueError, RuntimeError, SyntaxError, OverflowError, MemoryError, TypeError,
    zlib.error, lzma.LZMAError, zipfile.BadZipFile, struct.error, tokenize.TokenError,
)  # fmt: skip
MAX_DEFLATE_RATIO = 1100  # bytes that one byte can inflate to, rounded up
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]  # images and labels by split


def read_npz(path: Path) -> tuple[Pairs, tuple[str, ...] | None]:
    """images and labels, or x_train and y_train, x_test ... for splits; and the class names, if stored."""
    try:
        with Positioned(path) as file, zipfile.ZipFile(file) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise Error("two arrays have the same name", code="data.layout")
            pairs, names = array_pairs(set(members)), members.get("classes")
            check_sizes([members[name] for pair in pairs.values() for name in pair], file.size)
            arrays = {
                split: tuple(read_array(archive, members[name], file.size) for name in pair)
                for split, pair in pairs.items()
            }
            classes = class_names(read_array(archive, names, file.size)) if names else None
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise Error(
            f"{path}: not a usable .npz file: {' '.join(reason.split())[:300]}",
            code=code_of(error, "data.corrupt"),
        ) from None
    for split, (images, _) in arrays.items():
        if not images.size:
            raise Error(
                f"{path}: no images in {pairs[split][0]!r}: its shape is {images.shape}", code="data.empty"
            )
    return {split: (images, labels) for split, (images, labels) in arrays.items()}, classes


def array_pairs(names: set[str]) -> dict[str, tuple[str, str]]:
    """The names of the image and label arrays of each split."""
    parts = sorted(n for n in names if n[:2] == "x_" and (n[2:] in SPLITS or f"y{n[1:]}" in names))
    if {"images", "labels"} <= names:
        if parts:
            raise Error(f"it has both 'images' and {parts[0]!r}; keep one of them", code="data.layout")
        return {"all": ("images", "labels")}
    if not parts:
        raise Error(
            f"needs images and labels, or x_train and y_train ...; has {sorted(names)[:20]}",
            code="data.layout",
        )
    for name in parts:
        if name[2:] not in SPLITS:
            raise Error(
                f"{name!r} is not a split; known: {', '.join('x_' + split for split in SPLITS)}",
                code="data.layout",
            )
        if f"y{name[1:]}" not in names:
            raise Error(f"it has {name!r} but no {'y' + name[1:]!r}", code="data.layout")
    check_aliases("its arrays", [name[2:] for name in parts])
    return {SPLITS[name[2:]]: (name, f"y{name[1:]}") for name in parts}


def check_sizes(members: list[zipfile.ZipInfo], size: int) -> None:
    """Reject arrays that cannot fit in a file of this size, or that do not fit in memory.

    Only the compression methods that numpy writes are allowed, stored and deflated: for these, zipfile never
    inflates more than the declared size.
    """
    for m in members:
        if m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Error(
                f"{m.filename} uses zip method {m.compress_type}, which numpy does not write; "
                "save it again with numpy.savez_compressed",
                code="data.layout",
            )
        if m.compress_size > size or m.file_size > MAX_DEFLATE_RATIO * (m.compress_size + 1):
            raise Error(f"{m.filename} claims {m.file_size} bytes, in a file of {size}", code="data.corrupt")
    needed, memory = sum(m.file_size for m in members), total_memory()
    if needed > memory:
        largest = max(members, key=lambda m: m.file_size).filename
        raise Error(
            f"its arrays need {needed / 1e9:.3g} GB, most of it for {largest}, and this machine has "
            f"{memory / 1e9:.3g} GB; save the images as files, or convert those to shards with "
            "'vitkit shard'",
            code="data.too-large",
        )


def read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, size: int) -> np.ndarray:
    """An array; its header, its zip entry and the file must agree on its size."""
    check_sizes([member], size)
    name = member.filename
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in HEADERS:
            raise Error(
                f"{name} has version {version} of numpy's format; supported: 1.0 and 2.0", code="data.layout"
            )
        shape, _, dtype = HEADERS[version](file)
        if dtype.hasobject:
            raise Error(
                f"{name} contains Python objects, which are not read; save numbers or text",
                code="data.unsafe",
            )
        needed = prod(shape) * dtype.itemsize
        if file.tell() + needed != member.file_size:
            raise Error(
                f"{name} claims {dtype} {shape} but has {member.file_size - file.tell()} bytes",
                code="data.corrupt",
            )
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def class_names(values: np.ndarray) -> tuple[str, ...]:
    if values.ndim != 1 or values.dtype.kind not in "USiu":
        raise Error(f"classes must be a list of names, not {values.dtype} {values.shape}", code="data.labels")
    names = tuple(v.decode() if isinstance(v, bytes) else str(v) for v in values.tolist())
    if len(set(names)) < len(names):
        raise Error(f"classes has {next(n for n in names if names.count(n) > 1)!r} twice", code="data.labels")
    return names


def open_arrays(path: Path) -> dict[str, Source]:
    """An .npz of images (N, H, W[, 1 or 3]) uint8 and labels; x_train and y_train, x_test ... for splits."""
    pairs, classes = read_npz(path)
    return {split: from_arrays(path.name, x, y, classes) for split, (x, y) in pairs.items()}


OPENER = Opener(
    description=".npz",
    matches=file_with_suffix(".npz"),
    open=lambda place, cache: open_arrays(Path(place)),
)
