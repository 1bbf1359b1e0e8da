"""Source: labelled images of any origin, and how to build one from file names, rows or arrays."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.names import MOST_CLASSES, SPLITS, SUFFIXES, hidden, split_folders
from vitkit.data.sources.sparse_labels import Labels, SparseLabels
from vitkit.data.targets import Targets
from vitkit.errors import Error

RUN_FILES = ("recipe.json", "environment.json")  # every run folder has them before its first picture
LABEL_SEPARATOR = ";"  # between several labels in one cell of a manifest


class Lazy(Sequence[str]):
    """Names computed on access, since a list of ten million takes a gigabyte."""

    def __init__(self, length: int, name: Callable[[int], str]):
        self.numbers, self.name = range(length), name

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        selected = self.numbers[index]
        return [self.name(i) for i in selected] if isinstance(selected, range) else self.name(selected)


def call_at(call: Callable[[int], Any], numbers: np.ndarray, index: int) -> Any:
    """Call a function with the number at an index."""
    return call(int(numbers[index]))


def call_at_indices(
    call: Callable[[np.ndarray], np.ndarray], numbers: np.ndarray, indices: np.ndarray
) -> np.ndarray:
    """Call a function of many numbers with those at the indices."""
    return call(numbers[indices])


def call_item(call: Callable[[Any], Any], items: Sequence[Any], index: int) -> Any:
    """Call a function with the item at an index."""
    return call(items[index])


def targets_at(targets: Targets, numbers: np.ndarray) -> Targets:
    """The annotations of the images with these numbers, in this order."""
    digest = targets.digest and partial(call_at, targets.digest, numbers)
    return replace(targets, read=partial(call_at, targets.read, numbers), digest=digest)


class Pixels:
    """Images in memory, (N, H, W, 1 or 3), with three channels."""

    def __init__(self, images: np.ndarray):
        self.images = images
        self.colour = np.broadcast_to(images, (*images.shape[:3], 3))

    def __call__(self, index: int) -> np.ndarray:
        return self.colour[index]

    def __reduce__(self) -> tuple[type["Pixels"], tuple[np.ndarray]]:
        return Pixels, (self.images,)  # pickled, its view would be three times as large


@dataclass(frozen=True)
class Source:
    """Images with names and labels; nothing is read until it is fetched.

    A source must be picklable, for worker processes that are not forked: no lambdas, and what holds an open
    file opens it again.
    """

    name: str
    classes: tuple[str, ...]
    keys: Sequence[str]
    labels: Any  # (N,) class numbers, -1 without a label; or SparseLabels for multi-label data
    fetch: Callable[[int], bytes | np.ndarray]  # encoded bytes, or pixels (H, W, 3)
    skipped: tuple[str, ...] = ()  # names of files that are not images
    digest: Callable[[int], bytes] | None = None  # content hash of an image, if cheaper than reading it
    size: Callable[[int], int] | None = None  # file size of an image in bytes, without reading it
    identity: str = ""  # digest of all names, labels and contents, if an index holds their checksums
    hashes: np.ndarray | None = None  # (N,) content hashes of all images, once they are computed
    empty: tuple[str, ...] = ()  # folders without images, which become no class
    targets: Targets | None = None  # masks or boxes of the images, whose class numbers index `classes`
    target_hashes: np.ndarray | None = None  # (N,) digests of the masks or boxes, once they are computed
    digests: Callable[[np.ndarray], np.ndarray] | None = None  # `digest` of many images at once

    def __post_init__(self) -> None:
        if isinstance(self.labels, np.ndarray) and self.labels.ndim == 2:  # multi-hot
            object.__setattr__(self, "labels", SparseLabels.from_dense(self.labels))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def multilabel(self) -> bool:
        return isinstance(self.labels, SparseLabels)

    def take(self, indices: np.ndarray) -> "Source":
        """The images with these indices, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        keys, fetch, digest, size = self.keys, self.fetch, self.digest, self.size
        digests, targets = self.digests, self.targets
        hasher = hashlib.sha256(self.identity.encode())
        hasher.update(np.ascontiguousarray(indices).data)
        identity = hasher.hexdigest() if self.identity else ""
        labels = self.labels[indices]
        if len(self) < 2**32:
            indices = indices.astype(np.uint32)  # half the memory, which matters with many millions
        return replace(
            self,
            keys=Lazy(len(indices), partial(call_at, keys.__getitem__, indices)),
            labels=labels,
            fetch=partial(call_at, fetch, indices),
            digest=partial(call_at, digest, indices) if digest else None,
            digests=partial(call_at_indices, digests, indices) if digests else None,
            size=partial(call_at, size, indices) if size else None,
            identity=identity,
            hashes=None if self.hashes is None else self.hashes[indices],
            targets=targets and targets_at(targets, indices),
            target_hashes=None if self.target_hashes is None else self.target_hashes[indices],
        )


def is_run(folder: Path) -> bool:
    """Whether this is a run folder of vitkit."""
    return all((folder / name).is_file() for name in RUN_FILES)


def walk(root: Path, folders: list[str] | None = None) -> Iterator[str]:
    """The relative name of every file below a folder, without hidden files; link cycles end the descent.

    A folder with a second name, by a link, is read under both, as programs that follow links do. Links in it
    are followed once, so that links which name each other cannot multiply. Run folders, which hold a picture
    of a training batch, are left out: they lie in the data after `cd photos; vitkit finetune .`.

    folders: a list to which the relative name of every visited folder is appended.
    """
    pending: deque[tuple[str, Path, frozenset[tuple[int, int]]]] = deque([("", root, frozenset())])
    seen: set[tuple[int, int]] = set()
    while pending:
        prefix, folder, above = pending.pop()
        status = os.stat(folder)
        own = (status.st_dev, status.st_ino)
        if own in above:
            continue
        if prefix and is_run(folder):
            if folders is not None:  # a folder that holds only runs is no empty class either
                folders[:] = [name for name in folders if not prefix.startswith(f"{name}/")]
            continue
        again, above = own in seen, above | {own}
        seen.add(own)
        if folders is not None and prefix:
            folders.append(prefix.rstrip("/"))
        with os.scandir(folder) as entries:
            for entry in entries:
                if hidden(entry.name):
                    continue
                # is_dir() raises for a link to itself, isdir() does not
                link = entry.is_symlink()
                if not (os.path.isdir(entry.path) if link else entry.is_dir()):
                    yield prefix + entry.name
                elif not link:
                    pending.append((f"{prefix}{entry.name}/", Path(entry.path), above))
                elif not again:  # links wait until all other folders are read
                    pending.appendleft((f"{prefix}{entry.name}/", Path(entry.path), above))


def open_tree(
    name: str,
    names: Sequence[str],
    fetch: Callable[[str], bytes],
    digest: Callable[[str], bytes] | None = None,
    skipped: Sequence[str] = (),
    size: Callable[[str], int] | None = None,
    folders: Sequence[str] = (),
) -> dict[str, Source]:
    """Files named [split/]class/.../image; nested class folders are joined by '/'."""
    files = [n for n in names if n.lower().endswith(SUFFIXES)]
    skipped = (*skipped, *(n for n in names if not n.lower().endswith(SUFFIXES)))
    if not files:
        raise Error(
            f"{name}: no images ({', '.join(SUFFIXES)}), only {len(skipped)} other files", code="data.empty"
        )
    short_names = without_common_root(files)
    splits = split_folders(name, short_names)
    groups: dict[str, list[tuple[str, str]]] = {}
    for file, short in zip(files, short_names, strict=True):
        top, _, rest = short.partition("/")
        split, inner = (splits[top], rest) if top in splits else ("all", short)
        groups.setdefault(split, []).append((file, inner.rpartition("/")[0]))
    unlabelled = [file for rows in groups.values() for file, label in rows if not label]
    if unlabelled:
        raise Error(
            f"{name}: {len(unlabelled)} images are in no class folder, the first is {unlabelled[0]!r}; "
            "expected [train|val|test/]class/image",
            code="data.layout",
        )
    empty = without_images(folders, files)
    sources = {
        split: from_rows(name, rows, fetch, skipped, digest=digest, size=size)
        for split, rows in groups.items()
    }
    return {split: replace(source, empty=empty) for split, source in sources.items()}


def open_unsorted(
    name: str,
    names: Sequence[str],
    fetch: Callable[[str], bytes],
    digest: Callable[[str], bytes] | None = None,
    skipped: Sequence[str] = (),
    size: Callable[[str], int] | None = None,
    folders: Sequence[str] = (),
) -> dict[str, Source]:
    """Like open_tree, but images that are not in class folders are opened as well, without labels."""
    try:
        return open_tree(name, names, fetch, digest, skipped, size, folders)
    except Error as error:
        if error.code != "data.layout":
            raise
    rows = [(file, "") for file in names if file.lower().endswith(SUFFIXES)]
    return {"all": from_rows(name, rows, fetch, tuple(skipped), digest=digest, size=size)}


def without_images(folders: Sequence[str], images: Sequence[str]) -> tuple[str, ...]:
    """The topmost folders without any image in or below them, except those named like a split."""
    used = {""}
    for name in images:
        while (name := name.rpartition("/")[0]) not in used:
            used.add(name)
    topmost = [folder for folder in folders if folder not in used and folder.rpartition("/")[0] in used]
    return tuple(sorted(folder for folder in topmost if folder.rpartition("/")[2].lower() not in SPLITS))


def without_common_root(names: list[str]) -> list[str]:
    """Names without the folders that contain everything, as archives often have; those are not classes."""
    tops = {n.split("/", 1)[0] for n in names}
    deep = all(n.count("/") >= 2 for n in names)
    if len(tops) == 1 and deep and next(iter(tops)).lower() not in SPLITS:
        return without_common_root([n.split("/", 1)[1] for n in names])
    return names


def from_rows(
    name: str,
    rows: list[tuple[str, str]],
    fetch: Callable[[str], bytes],
    skipped: tuple[str, ...] = (),
    several: bool = False,
    digest: Callable[[str], bytes] | None = None,
    size: Callable[[str], int] | None = None,
) -> Source:
    """(file, label) rows to a Source; classes are sorted by name, and an empty label is -1.

    several: a label cell may hold several labels, so the labels are sparse.
    """
    keys = [key for key, _ in rows]
    cells = [
        [part.strip() for part in label.split(LABEL_SEPARATOR)] if several else [label] for _, label in rows
    ]
    classes = tuple(sorted({part for cell in cells for part in cell if part}))
    number = {label: i for i, label in enumerate(classes)}
    labels: Labels
    if several:
        labels = SparseLabels.from_lists(
            ([number[part] for part in cell if part] for cell in cells), len(classes)
        )
    else:
        labels = np.array([number.get(cell[0], -1) for cell in cells], dtype=np.int64)
    digest_of = partial(call_item, digest, keys) if digest else None
    size_of = partial(call_item, size, keys) if size else None
    return Source(name, classes, keys, labels, partial(call_item, fetch, keys), skipped, digest_of, size_of)


def from_arrays(
    name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...] | None = None
) -> Source:
    """Pixels in memory to a Source; grayscale images get three channels when they are fetched."""
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise Error(
            f"{name}: images must be uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3), not "
            f"{images.dtype} {images.shape}",
            code="data.layout",
        )
    if labels.shape != (len(images),):
        raise Error(
            f"{name}: labels must be {len(images)} class numbers from 0, not {labels.dtype} {labels.shape}",
            code="data.labels",
        )
    labels = class_numbers(name, labels)
    classes = classes or tuple(str(n) for n in range(int(labels.max(initial=-1)) + 1))
    if len(labels) and labels.max() >= len(classes):
        row = int(labels.argmax())
        raise Error(
            f"{name}, row {row}: label {labels[row]} is out of range for {len(classes)} class names",
            code="data.labels",
        )
    return Source(name, classes, [f"{i:06d}" for i in range(len(images))], labels, Pixels(images))


def class_numbers(where: str, labels: np.ndarray) -> np.ndarray:
    """Labels as int64; the first that is not a class number is an error that names its row."""
    kind = labels.dtype.kind
    if kind in "iu":
        wrong = (labels < 0) | (labels >= MOST_CLASSES)
    else:
        wrong = np.ones(labels.shape, bool)
        if kind == "f" and (fractional := labels != np.floor(labels)).any():  # NaN included
            wrong = fractional
    rows = np.flatnonzero(wrong)
    if len(rows):
        raise Error(
            f"{where}, row {rows[0]}: the label {labels[rows[0]]} of type {labels.dtype} is no class number; "
            f"labels must be integers from 0 to {MOST_CLASSES - 1}",
            code="data.labels",
        )
    return labels.astype(np.int64)


def digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (the test set of UCI's optical recognition data, CC BY 4.0)."""
    with files("vitkit.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return from_arrays("digits", arrays["images"], arrays["labels"])
