"""Tables of images and labels: .csv in any Unicode encoding, and Parquet as written by Hugging Face."""

import csv
import io
import json
import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import Files
from vitkit.data.decode import BadImage
from vitkit.data.names import MOST_CLASSES, SPLITS, check_aliases, check_stray, hidden, split_of
from vitkit.data.sources.archives import Positioned
from vitkit.data.sources.openers import Opener, file_with_suffix
from vitkit.data.sources.source import LABEL_SEPARATOR, Lazy, Source, from_rows
from vitkit.errors import Error

Row = tuple[str, dict[str, str]]  # file and line for messages, and the cells by column
ENCODINGS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # by byte order mark
REMEDY = "save the table as UTF-8"


def csv_rows(path: Path, needed: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a table whose header has the needed columns."""
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    line = 1
    try:
        names = list(table.fieldnames or ())
        if not set(needed) <= set(names):
            columns = ", ".join(names)[:200]
            raise Error(
                f"{path}: needs the columns {' and '.join(needed)}, has {columns}", code="data.layout"
            )
        duplicates = [name for name in names if names.count(name) > 1]
        if duplicates:
            raise Error(f"{path}: has several columns {duplicates[0]!r}; keep one", code="data.layout")
        line = table.line_num + 1
        for row in table:
            where, line = f"{path}, line {table.line_num}", table.line_num + 1
            extra: object = row.pop(None, None)
            if extra is not None:
                raise Error(
                    f"{where}: more cells than the {len(names)} columns of the header; put quotes around "
                    "cells that contain a comma",
                    code="data.layout",
                )
            yield where, {name: cell or "" for name, cell in row.items()}
    except csv.Error as error:
        raise Error(f"{path}, line {line}: {error}; is a quote left open?", code="data.layout") from None


def read_text(path: Path) -> str:
    with Positioned(path) as file:
        content = file.readall() or b""
    encoding = next((name for start, name in ENCODINGS.items() if content.startswith(start)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        byte = f"the byte 0x{content[error.start]:02x}"
        raise Error(
            f"{path}, line {line}: {byte} is not {encoding.upper()}; {REMEDY}", code="data.layout"
        ) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise Error(
            f"{path}, line {line}: a NUL byte, as in UTF-16 without a byte order mark; {REMEDY}",
            code="data.layout",
        )
    return text


IMAGE, LABEL = ("image", "img"), ("label", "labels", "fine_label")
GROUPS = 4  # row groups cached in memory


def open_file(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise Error(
            f"{path}: reading Parquet needs pyarrow (pip install 'vitkit[parquet]'), or use a .csv",
            code="request.extra-missing",
        ) from None
    with parquet_errors(path):
        return parquet.ParquetFile(path)


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Turn any error of pyarrow into one that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise Error(f"{path}: not a readable Parquet file ({reason})", code="data.corrupt") from None


def manifest_rows(path: Path) -> list[Row] | None:
    """The rows of a table of paths and labels; None where the table contains the images themselves."""
    file = open_file(path)
    columns = file.schema_arrow.names
    if {"path", "label"} <= set(columns):
        used = [name for name in columns if name in ("path", "label", "split")]
        if len(set(used)) < len(used):
            raise Error(
                f"{path}: duplicate columns among {', '.join(used)}; keep one of each", code="data.layout"
            )
        with parquet_errors(path):
            rows = file.read(columns=used).to_pylist()
        return [
            (f"{path}, row {i}", {name: cell(f"{path}, row {i}", name, row[name]) for name in used})
            for i, row in enumerate(rows)
        ]
    if not set(columns).isdisjoint(IMAGE):
        return None
    raise Error(
        f"{path}: needs the columns path and label (and split, if any), or image and label; "
        f"has {', '.join(columns)}",
        code="data.layout",
    )


def cell(where: str, name: str, value: Any) -> str:
    """A cell as text; a label may also be a whole number."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    if value is None or isinstance(value, str) or (name == "label" and whole):
        return "" if value is None else str(value)
    expected = "text or a whole number" if name == "label" else "text"
    actual = f"{str(value)[:40]!r} of type {type(value).__name__}"
    raise Error(f"{where}: {name} must be {expected}, not {actual}", code="data.layout")


def image_tables(path: Path, splits: Mapping[str, str]) -> dict[str, "Table"]:
    """The tables below a folder by split; the name of a file or folder starts with it (train-00000-of-9)."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    groups: dict[str, list[Path]] = {}
    aliases: set[str] = set()
    for file in files:
        words = [re.split(r"[-_.]", part)[0].lower() for part in file.relative_to(path.parent).parts[1:]]
        words = words or [re.split(r"[-_.]", file.name)[0].lower()]
        if path.is_dir() and hidden(file.relative_to(path).as_posix()):
            continue
        known = [word for word in words if word in splits][-1:]
        aliases.update(known)
        groups.setdefault(splits[known[0]] if known else "all", []).append(file)
    check_aliases(str(path), aliases)
    check_stray(str(path), {split: [file.name for file in members] for split, members in groups.items()})
    return {split: Table(members) for split, members in groups.items()}


class Table:
    """The images of several Parquet files; fetching a row reads its whole row group.

    Reading in shuffled order is slow for that reason; convert the data with `vitkit shard` to train on it.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        self.handles: dict[tuple[int, int], Any] = {}  # by process, since handles do not survive a fork
        self.cached: OrderedDict[int, Any] = OrderedDict()  # row groups, the most recent last
        self.lock = threading.Lock()
        self.groups: list[tuple[int, int]] = []  # (file, row group)
        self.starts: list[int] = []  # the first row of each group
        labels, names, row = [], None, 0
        for number, path in enumerate(files):
            file = open_file(path)
            self.image, label = (column(path, file.schema_arrow.names, known) for known in (IMAGE, LABEL))
            for group in range(file.num_row_groups):
                self.groups.append((number, group))
                self.starts.append(row)
                row += file.metadata.row_group(group).num_rows
            stored_names = class_names(file.schema_arrow.metadata, label)
            if number and stored_names != names:
                raise Error(f"{path}: its classes differ from those of {files[0].name}", code="data.classes")
            names = stored_names
            with parquet_errors(path):
                values = file.read(columns=[label], use_threads=False).column(0)
            if len(values) != (rows := file.metadata.num_rows):
                raise Error(
                    f"{path}: {len(values)} labels for {rows} rows; it is damaged", code="data.corrupt"
                )
            labels.append(numbers(path, values, names))
        self.labels = np.concatenate(labels)  # -1: none
        self.classes = names or tuple(str(n) for n in range(int(self.labels.max(initial=-1)) + 1))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handles": {}, "cached": OrderedDict(), "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"lock": threading.Lock()})

    def key(self, index: int) -> str:
        group = bisect_right(self.starts, index) - 1
        return f"{self.files[self.groups[group][0]].name}:{index - self.starts[group] + self.offset(group)}"

    def offset(self, group: int) -> int:
        """The number of rows that precede a row group in its file."""
        first = bisect_right(self.groups, (self.groups[group][0], -1))
        return self.starts[group] - self.starts[first]

    def fetch(self, index: int) -> bytes:
        group = bisect_right(self.starts, index) - 1
        value = self.rows(group)[index - self.starts[group]].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise BadImage("unreadable", f"{self.key(index)}: the table has no image bytes in this row")
        return content

    def rows(self, group: int) -> Any:
        with self.lock:
            if group in self.cached:
                self.cached.move_to_end(group)
                return self.cached[group]
            number, inner = self.groups[group]
            handle = (os.getpid(), number)
            if handle not in self.handles:
                self.handles[handle] = open_file(self.files[number])
            try:
                with parquet_errors(self.files[number]):
                    table = self.handles[handle].read_row_group(
                        inner, columns=[self.image], use_threads=False
                    )
            except ValueError as error:
                raise BadImage("unreadable", str(error)) from None
            images = table.column(0)
            self.cached[group] = images
            if len(self.cached) > GROUPS:
                self.cached.popitem(last=False)
            return images


def column(path: Path, names: list[str], known: tuple[str, ...]) -> str:
    """The first of the known column names that the table has."""
    present = [name for name in known if name in names]
    if not present:
        raise Error(
            f"{path}: has no column {' or '.join(known)}, only {', '.join(names)}", code="data.layout"
        )
    return present[0]


def numbers(path: Path, values: Any, names: tuple[str, ...] | None) -> np.ndarray:
    """Class numbers; -1 for a missing label."""
    labels = [-1 if value is None else value for value in values.to_pylist()]
    most = len(names) if names else MOST_CLASSES
    for row, value in enumerate(labels):
        if type(value) is not int or value < -1:
            actual = f"{str(value)[:40]!r} of type {values.type}"
            raise Error(f"{path}, row {row}: labels must be class numbers, not {actual}", code="data.labels")
        if value >= most:
            limit = f"{most} classes" if names else f"the limit of {most} classes"
            raise Error(f"{path}, row {row}: label {value} is out of range for {limit}", code="data.labels")
    return np.array(labels, dtype=np.int64)


def class_names(metadata: Mapping[bytes, bytes] | None, label: str) -> tuple[str, ...] | None:
    """The class names, if the writer stored them in the metadata."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return None


def open_parquet(path: Path) -> dict[str, Source]:
    """A manifest, or a file or folder of images as Hugging Face datasets write them."""
    rows = None if path.is_dir() else manifest_rows(path)
    if rows is not None:
        return open_rows(path, rows)
    sources = {}
    for split, table in image_tables(path, SPLITS).items():
        keys, unlabelled = Lazy(len(table.labels), table.key), np.flatnonzero(table.labels < 0)
        source = Source(path.name, table.classes, keys, table.labels, table.fetch)
        if len(unlabelled) < len(source):  # test splits are often published without labels
            labelled = source.take(np.flatnonzero(table.labels >= 0)) if len(unlabelled) else source
            sources[split] = replace(labelled, skipped=tuple(keys[i] for i in unlabelled))
    if not sources:
        raise Error(f"{path}: no image has a label", code="data.labels")
    return sources


def open_manifest(path: Path) -> dict[str, Source]:
    """A .csv of paths and labels."""
    return open_rows(path, csv_rows(path, ("path", "label")))


def open_rows(path: Path, rows: Iterable[Row]) -> dict[str, Source]:
    """Rows of path, label and optionally split; paths are relative to the table."""
    groups: dict[str, list[tuple[str, str]]] = {}
    first_use: dict[str, str] = {}  # the first row of each split name
    for where, row in rows:
        if not row["path"] or not row["label"]:
            raise Error(f"{where}: path and label must not be empty", code="data.labels")
        name = row.get("split", "")
        groups.setdefault(split_of(where, name), []).append((row["path"], row["label"]))
        first_use.setdefault(name.lower(), where)
    if not groups:
        raise Error(f"{path}: the table has no rows", code="data.empty")
    check_aliases(str(path), first_use.keys() & SPLITS.keys())
    if "all" in groups and len(groups) > 1:
        where = first_use.get("") or first_use["all"]
        raise Error(
            f"{where}: no split, although other rows have one; set train, val or test", code="data.layout"
        )
    # one label cell with a separator in any split makes all splits multi-label
    several = any(LABEL_SEPARATOR in label for part in groups.values() for _, label in part)
    files = Files(path.parent)
    return {
        split: from_rows(path.name, part, files.read, (), several, files.digest, files.size)
        for split, part in groups.items()
    }


def open_table(path: Path) -> dict[str, Source]:
    return open_manifest(path) if path.suffix.lower() == ".csv" else open_parquet(path)


OPENER = Opener(
    description=".csv, .parquet",
    matches=file_with_suffix(".csv", ".parquet"),
    open=lambda place, cache: open_table(Path(place)),
)
