"""Where images are: folders, manifests, archives and arrays, all as one Source of named, labelled images."""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from vitkit.data.archives import open_tar, open_zip
from vitkit.data.decode import read

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
SPLITS = {  # what people call the folders of a split
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
BETWEEN = ";"  # several labels in one cell of a manifest


@dataclass(frozen=True)
class Source:
    """Images with names and labels; nothing is read before it is asked for."""

    name: str
    classes: tuple[str, ...]
    keys: Sequence[str]
    labels: np.ndarray  # (N,) of class numbers, or (N, classes) of 0 and 1 where an image may have several
    fetch: Callable[[int], bytes | np.ndarray]  # encoded bytes, or pixels (H, W, 3)
    skipped: tuple[str, ...] = ()  # files that are not images, by name

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def multilabel(self) -> bool:
        return self.labels.ndim == 2

    def take(self, indices: np.ndarray) -> "Source":
        """The images with these numbers, in this order."""
        indices = np.asarray(indices, dtype=np.int64)
        keys, fetch = self.keys, self.fetch
        return replace(
            self,
            keys=[keys[i] for i in indices],
            labels=self.labels[indices],
            fetch=lambda i: fetch(int(indices[i])),
        )


def open_data(place: str | Path) -> dict[str, Source]:
    """All splits of a data set by name; one without splits is under "all".

    place: an image folder, a .csv or .parquet manifest, a .zip or .tar of a folder, an .npz, or "digits".
    """
    if str(place) == "digits":
        return {"all": digits()}
    path = Path(place)
    if not path.exists():
        raise ValueError(
            f"no data at {str(place)!r}; give a folder, .csv, .parquet, .zip, .tar, .npz or 'digits'"
        )
    if path.is_dir():
        return open_tree(path.name or str(path), sorted(walk(path)), lambda key: read(path / key))
    opener = {
        ".csv": open_manifest, ".parquet": open_manifest, ".npz": open_arrays,
        ".zip": open_archive, ".tar": open_archive,
    }.get(path.suffix.lower())  # fmt: skip
    if opener is None:
        raise ValueError(
            f"{path}: not a kind of data that is read; known are .csv, .parquet, .zip, .tar, .npz"
        )
    return opener(path)


def walk(root: Path) -> Iterator[str]:
    """Every file below a folder by its relative name; hidden ones are left out, links in a circle too."""
    pending = [("", root)]
    seen = set()
    while pending:
        prefix, folder = pending.pop()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    pending.append((f"{prefix}{entry.name}/", Path(entry.path)))
                else:
                    yield prefix + entry.name


def open_archive(path: Path) -> dict[str, Source]:
    members, fetch = open_zip(path) if path.suffix.lower() == ".zip" else open_tar(path)
    return open_tree(path.name, members, fetch)


def open_tree(name: str, names: Sequence[str], fetch: Callable[[str], bytes]) -> dict[str, Source]:
    """Files named [split/]class/.../image: the folders between are the class, nested ones joined by '/'."""
    images = [n for n in names if n.lower().endswith(SUFFIXES)]
    skipped = tuple(n for n in names if not n.lower().endswith(SUFFIXES))
    if not images:
        raise ValueError(f"{name}: holds no images ({', '.join(SUFFIXES)}); {len(skipped)} other files")
    images = without_common_root(images)
    tops = {n.split("/", 1)[0] for n in images}
    split = all(top.lower() in SPLITS for top in tops)
    groups: dict[str, list[tuple[str, str]]] = {}
    for full, short in zip([n for n in names if n.lower().endswith(SUFFIXES)], images, strict=True):
        top, _, rest = short.partition("/")
        where, inner = (SPLITS[top.lower()], rest) if split else ("all", short)
        groups.setdefault(where, []).append((full, inner.rpartition("/")[0]))
    bare = [full for rows in groups.values() for full, label in rows if not label]
    if bare:
        raise ValueError(
            f"{name}: {len(bare)} images lie in no class folder, the first {bare[0]!r}; "
            "expected [train|val|test/]class/image"
        )
    return {where: from_rows(name, rows, fetch, skipped) for where, rows in groups.items()}


def without_common_root(names: list[str]) -> list[str]:
    """An archive often holds one folder that holds all: that folder is no class."""
    tops = {n.split("/", 1)[0] for n in names}
    deep = all(n.count("/") >= 2 for n in names)
    if len(tops) == 1 and deep and next(iter(tops)).lower() not in SPLITS:
        return [n.split("/", 1)[1] for n in names]
    return names


def from_rows(
    name: str,
    rows: list[tuple[str, str]],
    fetch: Callable[[str], bytes],
    skipped: tuple[str, ...] = (),
    several: bool = False,
) -> Source:
    """(file, label) rows to a Source; classes stand in the order of their names.

    several: a label may be several, and each image has a 0 or 1 for each class.
    """
    keys = [key for key, _ in rows]
    sets = [[part.strip() for part in label.split(BETWEEN)] if several else [label] for _, label in rows]
    classes = tuple(sorted({part for labels in sets for part in labels if part}))
    number = {label: i for i, label in enumerate(classes)}
    if several:
        labels = np.zeros((len(rows), len(classes)), dtype=np.float32)
        for row, found in enumerate(sets):
            labels[row, [number[part] for part in found if part]] = 1
    else:
        labels = np.array([number[found[0]] for found in sets], dtype=np.int64)
    return Source(name, classes, keys, labels, lambda i: fetch(keys[i]), skipped)


def open_manifest(path: Path) -> dict[str, Source]:
    """A table with the columns path, label and, if given, split; paths are relative to the table."""
    rows = parquet_rows(path) if path.suffix.lower() == ".parquet" else csv_rows(path)
    groups: dict[str, list[tuple[str, str]]] = {}
    for line, row in enumerate(rows, start=2):
        if not row.get("path") or row.get("label") in (None, ""):
            raise ValueError(f"{path}, line {line}: path and label must both be given")
        where = (row.get("split") or "all").lower()
        groups.setdefault(SPLITS.get(where, where), []).append((row["path"], row["label"]))
    if not groups:
        raise ValueError(f"{path}: the table has no rows")
    several = any(BETWEEN in label for rows_ in groups.values() for _, label in rows_)  # in any split: in all
    return {
        where: from_rows(path.name, part, lambda key: read(path.parent / key), several=several)
        for where, part in groups.items()
    }


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        check_columns(path, table.fieldnames or [])
        return list(table)


def parquet_rows(path: Path) -> list[dict[str, str]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: reading Parquet needs pyarrow (pip install pyarrow), or use a .csv"
        ) from None
    table = parquet.read_table(path)
    check_columns(path, table.column_names)
    return [{k: "" if v is None else str(v) for k, v in row.items()} for row in table.to_pylist()]


def check_columns(path: Path, columns: Sequence[str]) -> None:
    if not {"path", "label"} <= set(columns):
        raise ValueError(
            f"{path}: needs the columns path and label (and split, if any), has {', '.join(columns)}"
        )


def open_arrays(path: Path) -> dict[str, Source]:
    """An .npz of images (N, H, W[, 1 or 3]) uint8 and labels; x_train and y_train, x_test ... for splits."""
    with np.load(path, allow_pickle=False) as arrays:
        names = set(arrays.files)
        pairs = {SPLITS[k[2:]]: (k, "y" + k[1:]) for k in names if k[:2] == "x_" and k[2:] in SPLITS}
        if {"images", "labels"} <= names:
            pairs = {"all": ("images", "labels")}
        if not pairs:
            raise ValueError(
                f"{path}: needs images and labels, or x_train and y_train ...; has {sorted(names)}"
            )
        classes = tuple(map(str, arrays["classes"])) if "classes" in names else None
        return {
            where: from_arrays(path.name, arrays[x], arrays[y], classes) for where, (x, y) in pairs.items()
        }


def from_arrays(
    name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...] | None = None
) -> Source:
    """Pixels in memory to a Source; grey ones get three channels when they are fetched."""
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ValueError(f"{name}: images must be uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3), not "
                         f"{images.dtype} {images.shape}")  # fmt: skip
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise ValueError(
            f"{name}: labels must be {len(images)} class numbers from 0, not {labels.dtype} {labels.shape}"
        )
    labels = labels.astype(np.int64)
    classes = classes or tuple(str(n) for n in range(int(labels.max(initial=-1)) + 1))
    if len(labels) and labels.max() >= len(classes):
        raise ValueError(f"{name}: label {labels.max()} has no name among {len(classes)} classes")
    keys = range(len(images))
    return Source(
        name, classes, [f"{i:06d}" for i in keys], labels,
        lambda i: np.broadcast_to(images[i], (*images.shape[1:3], 3)),
    )  # fmt: skip


def digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (the test set of UCI's optical recognition data, CC BY 4.0)."""
    with files("vitkit.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return from_arrays("digits", arrays["images"], arrays["labels"])
