"""Parquet files: tables of paths, and images as Hugging Face's datasets write them. Needs pyarrow."""

import json
import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import BadImage

IMAGE, LABEL = ("image", "img"), ("label", "labels", "fine_label")
GROUPS = 4  # row groups held in memory


def reader(path: Path) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: reading Parquet needs pyarrow (pip install 'vitkit[parquet]'), or use a .csv"
        ) from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from None


def manifest_rows(path: Path) -> list[dict[str, str]] | None:
    """The rows of a table of paths and labels; None where the table holds the images themselves."""
    file = reader(path)
    columns = file.schema_arrow.names
    if {"path", "label"} <= set(columns):
        rows = file.read().to_pylist()
        return [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
    if not set(columns).isdisjoint(IMAGE):
        return None
    raise ValueError(
        f"{path}: needs the columns path and label (and split, if any), or image and label; "
        f"has {', '.join(columns)}"
    )


def image_tables(path: Path, splits: Mapping[str, str]) -> dict[str, "Table"]:
    """The tables below a folder by split, with which a file's or folder's name begins (train-00000-of-9)."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    groups: dict[str, list[Path]] = {}
    for file in files:
        words = [re.split(r"[-_.]", part)[0].lower() for part in file.relative_to(path.parent).parts[1:]]
        words = words or [re.split(r"[-_.]", file.name)[0].lower()]
        found = [splits[word] for word in words if word in splits]
        groups.setdefault(found[-1] if found else "all", []).append(file)
    return {split: Table(members) for split, members in groups.items()}


class Table:
    """The images of some files; a row is had by reading the row group that it stands in.

    A shuffled order reads a whole row group for each image: `vitkit shard` makes shards of them for training.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        self.opened: dict[tuple[int, int], Any] = {}  # by process, since files are not shared across a fork
        self.held: OrderedDict[int, Any] = OrderedDict()  # row groups, the most recent last
        self.turn = threading.Lock()
        self.groups: list[tuple[int, int]] = []  # (file, row group)
        self.starts: list[int] = []  # the first row of each
        labels, names, row = [], None, 0
        for number, path in enumerate(files):
            file = reader(path)
            self.image, label = (column(path, file.schema_arrow.names, known) for known in (IMAGE, LABEL))
            for group in range(file.num_row_groups):
                self.groups.append((number, group))
                self.starts.append(row)
                row += file.metadata.row_group(group).num_rows
            labels.append(numbers(path, file.read(columns=[label], use_threads=False).column(0)))
            found = class_names(file.schema_arrow.metadata, label)
            if number and found != names:
                raise ValueError(f"{path}: other classes than {files[0].name} has")
            names = found
        self.labels = np.concatenate(labels)  # -1: none
        top = int(self.labels.max(initial=-1))
        self.classes = names or tuple(str(n) for n in range(top + 1))
        if top >= len(self.classes) or self.labels.min(initial=0) < -1:
            raise ValueError(f"{files[0]}: label {top} has no name among {len(self.classes)} classes")

    def key(self, index: int) -> str:
        group = bisect_right(self.starts, index) - 1
        return f"{self.files[self.groups[group][0]].name}:{index - self.starts[group] + self.offset(group)}"

    def offset(self, group: int) -> int:
        """The rows of its file before a row group."""
        first = bisect_right(self.groups, (self.groups[group][0], -1))
        return self.starts[group] - self.starts[first]

    def fetch(self, index: int) -> bytes:
        group = bisect_right(self.starts, index) - 1
        cell = self.rows(group)[index - self.starts[group]].as_py()
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(content, bytes):
            raise BadImage("unreadable", f"{self.key(index)}: the table holds no bytes of it")
        return content

    def rows(self, group: int) -> Any:
        with self.turn:
            if group in self.held:
                self.held.move_to_end(group)
                return self.held[group]
            number, inner = self.groups[group]
            place = (os.getpid(), number)
            if place not in self.opened:
                self.opened[place] = reader(self.files[number])
            found = (
                self.opened[place].read_row_group(inner, columns=[self.image], use_threads=False).column(0)
            )
            self.held[group] = found
            if len(self.held) > GROUPS:
                self.held.popitem(last=False)
            return found


def column(path: Path, names: list[str], known: tuple[str, ...]) -> str:
    found = [name for name in known if name in names]
    if not found:
        raise ValueError(f"{path}: has no column {' or '.join(known)}, only {', '.join(names)}")
    return found[0]


def numbers(path: Path, values: Any) -> np.ndarray:
    """Class numbers; -1 where there is none."""
    found = values.to_pylist()
    if not all(value is None or isinstance(value, int) for value in found):
        raise ValueError(f"{path}: labels must be class numbers, not {values.type}")
    return np.array([-1 if value is None else value for value in found], dtype=np.int64)


def class_names(metadata: Mapping[bytes, bytes] | None, label: str) -> tuple[str, ...] | None:
    """The names of the classes, where the file's writer left them."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return None
