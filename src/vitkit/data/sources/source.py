"""Where images are: folders, manifests, archives, arrays, shards; all as one Source of labelled images."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import file_hash
from vitkit.data.decode import read
from vitkit.data.names import SPLITS, SUFFIXES, check_aliases, hidden, split_folders, split_of
from vitkit.data.sources.archives import open_tar, open_zip
from vitkit.data.sources.arrays import class_numbers, read_npz
from vitkit.data.sources.index import INDEX, Index, ReadShard, local_shards, open_index
from vitkit.data.sources.sparse_labels import Labels, SparseLabels
from vitkit.data.sources.tables import Row, csv_rows, image_tables, manifest_rows
from vitkit.errors import Error

KINDS = "a folder, .csv, .parquet, .zip, .tar, .npz, an http(s) address of shards or 'digits'"
BETWEEN = ";"  # several labels in one cell of a manifest


class Lazy(Sequence[str]):
    """Names that are made when they are asked for, since ten million of them fill a gigabyte."""

    def __init__(self, length: int, name: Callable[[int], str]):
        self.numbers, self.name = range(length), name

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        found = self.numbers[place]
        return [self.name(i) for i in found] if isinstance(found, range) else self.name(found)


@dataclass(frozen=True)
class Source:
    """Images with names and labels; nothing is read before it is asked for."""

    name: str
    classes: tuple[str, ...]
    keys: Sequence[str]
    labels: Any  # (N,) of class numbers, or SparseLabels where an image may have several
    fetch: Callable[[int], bytes | np.ndarray]  # encoded bytes, or pixels (H, W, 3)
    skipped: tuple[str, ...] = ()  # files that are not images, by name
    digest: Callable[[int], bytes] | None = None  # of an image's content, where it is had without reading all
    size: Callable[[int], int] | None = None  # bytes of an image's file, without reading it
    identity: str = ""  # a digest of all names, labels and contents, where an index holds their checksums
    marks: np.ndarray | None = None  # (N,) of the digests of all images, where they were computed already
    empty: tuple[str, ...] = ()  # folders that hold no image, and so make no class

    def __post_init__(self) -> None:
        if isinstance(self.labels, np.ndarray) and self.labels.ndim == 2:  # of 0 and 1
            object.__setattr__(self, "labels", SparseLabels.from_dense(self.labels))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def multilabel(self) -> bool:
        return isinstance(self.labels, SparseLabels)

    def take(self, indices: np.ndarray) -> "Source":
        """The images with these numbers, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        keys, fetch, digest, size = self.keys, self.fetch, self.digest, self.size
        chosen = (
            hashlib.sha256(self.identity.encode() + indices.tobytes()).hexdigest() if self.identity else ""
        )
        return replace(
            self,
            keys=Lazy(len(indices), lambda i: keys[indices[i]]),
            labels=self.labels[indices],
            fetch=lambda i: fetch(int(indices[i])),
            digest=(lambda i: digest(int(indices[i]))) if digest else None,
            size=(lambda i: size(int(indices[i]))) if size else None,
            identity=chosen,
            marks=None if self.marks is None else self.marks[indices],
        )


def check_place(place: str) -> None:
    """Refuse a place where no data can be, before anything is opened."""
    if not place.strip():
        raise Error(f"the data is {place!r}, an empty name; give {KINDS}", code="request.value")
    named = place == "digits" or re.match("vtab:|https?://", place)
    if not named and not Path(place).exists():
        raise Error(
            f"no data at {place!r}; give {KINDS}", code="data.not-found"
        )  # no pipe: or other kinds of addresses


def open_folder(path: Path) -> dict[str, Source]:
    """Shards, known by their index; .parquet files; or files in class folders."""
    if (path / INDEX).is_file():
        return open_shards(path.name, path / INDEX)
    folders: list[str] = []
    names = sorted(walk(path, folders))
    suffixes = {os.path.splitext(name)[1].lower() for name in names}
    if suffixes.isdisjoint(SUFFIXES):
        if ".parquet" in suffixes:
            return open_parquet(path)
        if ".tar" in suffixes:
            raise Error(
                f"{path}: tar shards without {INDEX}; 'vitkit shard {path} {path}' writes it",
                code="data.layout",
            )
    return open_tree(
        path.name or str(path), names, lambda key: read(path / key), lambda key: file_hash(path / key),
        size=lambda key: os.stat(path / key).st_size, folders=folders,
    )  # fmt: skip


def open_shards(name: str, path: Path, read: ReadShard | None = None) -> dict[str, Source]:
    """The splits of an index, whose shards lie beside it unless `read` knows better."""
    classes, splits = open_index(path)
    by_place = read or local_shards(path.parent, splits)

    def source(part: Index) -> Source:
        keys, labels = Lazy(len(part), part.key), part.labels(len(classes))
        return Source(
            name, classes, keys, labels, lambda i: part.fetch(i, by_place), digest=part.digest,
            identity=part.identity,
        )  # fmt: skip

    return {where: source(part) for where, part in splits.items()}


def open_parquet(path: Path) -> dict[str, Source]:
    """A manifest, or a file or folder of images as Hugging Face's datasets write them."""
    rows = None if path.is_dir() else manifest_rows(path)
    if rows is not None:
        return open_rows(path, rows)
    found = {}
    for where, table in image_tables(path, SPLITS).items():
        keys, bare = Lazy(len(table.labels), table.key), np.flatnonzero(table.labels < 0)
        source = Source(path.name, table.classes, keys, table.labels, table.fetch)
        if len(bare) < len(source):  # the test split is often published without labels
            kept = source.take(np.flatnonzero(table.labels >= 0)) if len(bare) else source
            found[where] = replace(kept, skipped=tuple(keys[i] for i in bare))
    if not found:
        raise Error(f"{path}: no image has a label", code="data.labels")
    return found


def walk(root: Path, folders: list[str] | None = None) -> Iterator[str]:
    """Every file below a folder by its relative name; hidden ones are left out, links in a circle too.

    folders: a list that gets the relative name of every folder on the way.
    """
    pending = [("", root)]
    seen = set()
    while pending:
        prefix, folder = pending.pop()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        if folders is not None and prefix:
            folders.append(prefix.rstrip("/"))
        with os.scandir(folder) as entries:
            for entry in entries:
                if hidden(entry.name):
                    continue
                if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():  # to itself, perhaps
                    pending.append((f"{prefix}{entry.name}/", Path(entry.path)))
                else:
                    yield prefix + entry.name


def open_archive(
    path: Path, check: Callable[[Path, Sequence[str]], None] = lambda path, names: None
) -> dict[str, Source]:
    """Files in class folders within an archive; check: refuses it by the names of its files."""
    members, fetch, odd, size = open_zip(path) if path.suffix.lower() == ".zip" else open_tar(path)
    check(path, members)
    return open_tree(path.name, members, fetch, skipped=odd, size=size)


def open_tree(
    name: str,
    names: Sequence[str],
    fetch: Callable[[str], bytes],
    digest: Callable[[str], bytes] | None = None,
    skipped: Sequence[str] = (),
    size: Callable[[str], int] | None = None,
    folders: Sequence[str] = (),
) -> dict[str, Source]:
    """Files named [split/]class/.../image: the folders between are the class, nested ones joined by '/'."""
    images = [n for n in names if n.lower().endswith(SUFFIXES)]
    skipped = (*skipped, *(n for n in names if not n.lower().endswith(SUFFIXES)))
    if not images:
        raise Error(
            f"{name}: holds no images ({', '.join(SUFFIXES)}); {len(skipped)} other files", code="data.empty"
        )
    images = without_common_root(images)
    splits = split_folders(name, images)
    groups: dict[str, list[tuple[str, str]]] = {}
    for full, short in zip([n for n in names if n.lower().endswith(SUFFIXES)], images, strict=True):
        top, _, rest = short.partition("/")
        where, inner = (splits[top], rest) if top in splits else ("all", short)
        groups.setdefault(where, []).append((full, inner.rpartition("/")[0]))
    bare = [full for rows in groups.values() for full, label in rows if not label]
    if bare:
        raise Error(
            f"{name}: {len(bare)} images lie in no class folder, the first {bare[0]!r}; "
            "expected [train|val|test/]class/image",
            code="data.layout",
        )
    empty = without_images(folders, [n for n in names if n.lower().endswith(SUFFIXES)])
    made = {
        where: from_rows(name, rows, fetch, skipped, digest=digest, size=size)
        for where, rows in groups.items()
    }
    return {where: replace(source, empty=empty) for where, source in made.items()}


def without_images(folders: Sequence[str], images: Sequence[str]) -> tuple[str, ...]:
    """The folders with no image in or below them, the outermost of each branch; not those named as splits."""
    used = {""}
    for name in images:
        while (name := name.rpartition("/")[0]) not in used:
            used.add(name)
    outermost = [one for one in folders if one not in used and one.rpartition("/")[0] in used]
    return tuple(sorted(one for one in outermost if one.rpartition("/")[2].lower() not in SPLITS))


def without_common_root(names: list[str]) -> list[str]:
    """Names without the folders that hold everything, as archives often have: those are no classes."""
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
    """(file, label) rows to a Source; classes stand in the order of their names.

    several: a label may be several, and the labels are sparse.
    """
    keys = [key for key, _ in rows]
    sets = [[part.strip() for part in label.split(BETWEEN)] if several else [label] for _, label in rows]
    classes = tuple(sorted({part for labels in sets for part in labels if part}))
    number = {label: i for i, label in enumerate(classes)}
    labels: Labels
    if several:
        labels = SparseLabels.from_lists(
            ([number[part] for part in found if part] for found in sets), len(classes)
        )
    else:
        labels = np.array([number[found[0]] for found in sets], dtype=np.int64)
    mark = (lambda i: digest(keys[i])) if digest else None
    length = (lambda i: size(keys[i])) if size else None
    return Source(name, classes, keys, labels, lambda i: fetch(keys[i]), skipped, mark, length)


def open_manifest(path: Path) -> dict[str, Source]:
    return open_rows(path, csv_rows(path, ("path", "label")))


def open_rows(path: Path, rows: Iterable[Row]) -> dict[str, Source]:
    """Rows of path, label and, if given, split; paths are relative to the table."""
    groups: dict[str, list[tuple[str, str]]] = {}
    named: dict[str, str] = {}  # where each name of a split stands first
    for where, row in rows:
        if not row["path"] or not row["label"]:
            raise Error(f"{where}: path and label must both be given", code="data.labels")
        name = row.get("split", "")
        groups.setdefault(split_of(where, name), []).append((row["path"], row["label"]))
        named.setdefault(name.lower(), where)
    if not groups:
        raise Error(f"{path}: the table has no rows", code="data.empty")
    check_aliases(str(path), named.keys() & SPLITS.keys())
    if "all" in groups and len(groups) > 1:
        bare = named.get("") or named["all"]
        raise Error(
            f"{bare}: no split is given, where other rows have one; give train, val or test",
            code="data.layout",
        )
    several = any(BETWEEN in label for rows_ in groups.values() for _, label in rows_)  # in any split: in all
    folder = path.parent
    return {
        where: from_rows(
            path.name,
            part,
            lambda key: read(folder / key),
            (),
            several,
            lambda key: file_hash(folder / key),
            lambda key: os.stat(folder / key).st_size,
        )
        for where, part in groups.items()
    }


def open_arrays(path: Path) -> dict[str, Source]:
    """An .npz of images (N, H, W[, 1 or 3]) uint8 and labels; x_train and y_train, x_test ... for splits."""
    pairs, classes = read_npz(path)
    return {split: from_arrays(path.name, x, y, classes) for split, (x, y) in pairs.items()}


def from_arrays(
    name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...] | None = None
) -> Source:
    """Pixels in memory to a Source; grey ones get three channels when they are fetched."""
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise Error(
            f"{name}: images must be uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3), not "
            f"{images.dtype} {images.shape}",
            code="data.layout",
        )
    if labels.shape != (len(images),):
        found = f"{labels.dtype} {labels.shape}"
        raise Error(
            f"{name}: labels must be {len(images)} class numbers from 0, not {found}", code="data.labels"
        )
    labels = class_numbers(name, labels)
    classes = classes or tuple(str(n) for n in range(int(labels.max(initial=-1)) + 1))
    if len(labels) and labels.max() >= len(classes):
        row = int(labels.argmax())
        raise Error(
            f"{name}, row {row}: label {labels[row]} has no name among {len(classes)} classes",
            code="data.labels",
        )
    pixels = np.broadcast_to(images, (*images.shape[:3], 3))
    return Source(name, classes, [f"{i:06d}" for i in range(len(images))], labels, lambda i: pixels[i])


def digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (the test set of UCI's optical recognition data, CC BY 4.0)."""
    with files("vitkit.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return from_arrays("digits", arrays["images"], arrays["labels"])
