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
from typing import Any, Protocol

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


class RemoteTable(Protocol):
    """A table that is not a local file."""

    @property
    def name(self) -> str: ...
    def open_binary(self) -> Any: ...


AnyTable = Path | RemoteTable


def open_file(path: AnyTable) -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise Error(
            f"{path}: reading Parquet needs pyarrow (pip install 'vitkit[parquet]'), or use a .csv",
            code="request.extra-missing",
        ) from None
    with parquet_errors(path):
        return parquet.ParquetFile(path if isinstance(path, Path) else path.open_binary())


@contextmanager
def parquet_errors(path: AnyTable) -> Iterator[None]:
    """Turn any error of pyarrow into one that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise Error(f"{path}: not a readable Parquet file ({reason})", code="data.corrupt") from None


def manifest_rows(path: Path, needed: tuple[str, ...]) -> list[Row] | None:
    """The rows of a table of paths and labels; None where the table contains the images themselves."""
    file = open_file(path)
    columns = file.schema_arrow.names
    has_images = not set(columns).isdisjoint(IMAGE)
    if set(needed) <= set(columns) and ("label" in columns or not has_images):
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
    if has_images:
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


def tables_in(path: Path) -> dict[str, AnyTable]:
    """The .parquet files below a folder by relative name; a file alone is itself."""
    if not path.is_dir():
        return {path.name: path}
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*.parquet"))}
    return {name: file for name, file in files.items() if not hidden(name)}


def by_split(place: str, files: Mapping[str, AnyTable]) -> dict[str, list[AnyTable]]:
    """The tables of each split; the name of a file or folder starts with it (train-00000-of-9)."""
    groups: dict[str, list[AnyTable]] = {}
    aliases: set[str] = set()
    for name, file in files.items():
        words = [re.split(r"[-_.]", part)[0].lower() for part in name.split("/")]
        known = [word for word in words if word in SPLITS][-1:]
        aliases.update(known)
        groups.setdefault(SPLITS[known[0]] if known else "all", []).append(file)
    check_aliases(place, aliases)
    check_stray(place, {split: [file.name for file in members] for split, members in groups.items()})
    return groups


class Table:
    """The images of several Parquet files; fetching a row reads its whole row group.

    Reading in shuffled order is slow for that reason; convert the data with `vitkit shard` to train on it.
    """

    def __init__(self, files: list[AnyTable], *, labelled: bool = True):
        self.files = files
        self.handles: dict[tuple[int, int], Any] = {}  # by process, since handles do not survive a fork
        self.cached: OrderedDict[int, Any] = OrderedDict()  # row groups, the most recent last
        self.lock = threading.Lock()
        self.groups: list[tuple[int, int]] = []  # (file, row group)
        self.starts: list[int] = []  # the first row of each group
        labels, names, row = [], None, 0
        for number, path in enumerate(files):
            file = open_file(path)
            self.image = column(path, file.schema_arrow.names, IMAGE)
            label = label_column(path, file.schema_arrow, labelled)
            for group in range(file.num_row_groups):
                self.groups.append((number, group))
                self.starts.append(row)
                row += file.metadata.row_group(group).num_rows
            stored_names = class_names(file.schema_arrow.metadata, label)
            if number and stored_names != names:
                raise Error(f"{path}: its classes differ from those of {files[0].name}", code="data.classes")
            names = stored_names
            labels.append(read_labels(path, file, label, names))
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


def label_column(path: AnyTable, schema: Any, labelled: bool) -> str:
    """The column of class numbers; empty if there is none and none is needed."""
    present = [name for name in LABEL if name in schema.names]
    if labelled or (present and str(schema.field(present[0]).type).startswith(("int", "uint"))):
        return column(path, schema.names, LABEL)
    return ""


def read_labels(path: AnyTable, file: Any, label: str, names: tuple[str, ...] | None) -> np.ndarray:
    rows = file.metadata.num_rows
    if not label:
        return np.full(rows, -1)
    with parquet_errors(path):
        values = file.read(columns=[label], use_threads=False).column(0)
    if len(values) != rows:
        raise Error(f"{path}: {len(values)} labels for {rows} rows; it is damaged", code="data.corrupt")
    return numbers(path, values, names)


def column(path: AnyTable, names: list[str], known: tuple[str, ...]) -> str:
    """The first of the known column names that the table has."""
    present = [name for name in known if name in names]
    if not present:
        raise Error(
            f"{path}: has no column {' or '.join(known)}, only {', '.join(names)}", code="data.layout"
        )
    return present[0]


def numbers(path: AnyTable, values: Any, names: tuple[str, ...] | None) -> np.ndarray:
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


def needed_columns(labelled: bool) -> tuple[str, ...]:
    """The columns that a manifest must have."""
    return ("path", "label") if labelled else ("path",)


def open_parquet(path: Path, *, labelled: bool = True) -> dict[str, Source]:
    """A manifest, or a file or folder of images as Hugging Face datasets write them.

    labelled: False includes rows without a label.
    """
    rows = None if path.is_dir() else manifest_rows(path, needed_columns(labelled))
    if rows is not None:
        return open_rows(path, rows, labelled=labelled)
    return open_tables(str(path), path.name, tables_in(path), labelled=labelled)


def open_tables(
    place: str, name: str, files: Mapping[str, AnyTable], *, labelled: bool = True
) -> dict[str, Source]:
    """The images in .parquet files, given by their relative names."""
    sources = {}
    for split, members in by_split(place, files).items():
        table = Table(members, labelled=labelled)
        keys, unlabelled = Lazy(len(table.labels), table.key), np.flatnonzero(table.labels < 0)
        source = Source(name, table.classes, keys, table.labels, table.fetch)
        if not labelled:
            sources[split] = source
        elif len(unlabelled) < len(source):  # test splits are often published without labels
            part = source.take(np.flatnonzero(table.labels >= 0)) if len(unlabelled) else source
            sources[split] = replace(part, skipped=tuple(keys[i] for i in unlabelled))
    if not sources:
        raise Error(f"{place}: no image has a label", code="data.labels")
    return sources


def open_manifest(path: Path, *, labelled: bool = True) -> dict[str, Source]:
    """A .csv of paths and labels."""
    return open_rows(path, csv_rows(path, needed_columns(labelled)), labelled=labelled)


def open_rows(path: Path, rows: Iterable[Row], *, labelled: bool = True) -> dict[str, Source]:
    """Rows of path, label and optionally split; paths are relative to the table."""
    groups: dict[str, list[tuple[str, str]]] = {}
    first_use: dict[str, str] = {}  # the first row of each split name
    for where, row in rows:
        label = row.get("label", "")
        if not row["path"] or (labelled and not label):
            needed = " and ".join(needed_columns(labelled))
            raise Error(f"{where}: {needed} must not be empty", code="data.labels")
        name = row.get("split", "")
        groups.setdefault(split_of(where, name), []).append((row["path"], label))
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


def open_table(path: Path, *, labelled: bool = True) -> dict[str, Source]:
    read = open_manifest if path.suffix.lower() == ".csv" else open_parquet
    return read(path, labelled=labelled)


OPENER = Opener(
    description=".csv, .parquet",
    matches=file_with_suffix(".csv", ".parquet"),
    open=lambda place, cache: open_table(Path(place)),
    open_all=lambda place, cache: open_table(Path(place), labelled=False),
)
