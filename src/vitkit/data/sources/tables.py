"""Tables of images and labels: .csv in any encoding, and Parquet as Hugging Face's datasets write it."""

import csv
import io
import json
import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.names import MOST_CLASSES, check_aliases, check_stray, hidden
from vitkit.data.sources.archives import Positioned
from vitkit.errors import Error

Row = tuple[str, dict[str, str]]  # where it stands, and its cells
ENCODINGS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # by the first bytes
REMEDY = "save the table as UTF-8"


def csv_rows(path: Path, needed: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a table with a header that has the needed columns."""
    table = csv.DictReader(io.StringIO(text_of(path), newline=""))
    line = 1
    try:
        names = list(table.fieldnames or ())
        if not set(needed) <= set(names):
            has = ", ".join(names)[:200]
            raise Error(f"{path}: needs the columns {' and '.join(needed)}, has {has}", code="data.layout")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise Error(f"{path}: has several columns {twice[0]!r}; keep one", code="data.layout")
        line = table.line_num + 1
        for row in table:
            where, line = f"{path}, line {table.line_num}", table.line_num + 1
            extra: object = row.pop(None, None)
            if extra is not None:
                raise Error(
                    f"{where}: more cells than the header has columns ({len(names)}); put a cell that has a "
                    "comma in it between quotes",
                    code="data.layout",
                )
            yield where, {name: cell or "" for name, cell in row.items()}
    except csv.Error as error:
        raise Error(f"{path}, line {line}: {error}; is a quote not closed?", code="data.layout") from None


def text_of(path: Path) -> str:
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
            f"{path}, line {line}: a NUL, as in UTF-16 without its first mark; {REMEDY}", code="data.layout"
        )
    return text


IMAGE, LABEL = ("image", "img"), ("label", "labels", "fine_label")
GROUPS = 4  # row groups held in memory


def reader(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise Error(
            f"{path}: reading Parquet needs pyarrow (pip install 'vitkit[parquet]'), or use a .csv",
            code="request.extra-missing",
        ) from None
    with readable(path):
        return parquet.ParquetFile(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside, whatever pyarrow finds wrong with a file is one error that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise Error(f"{path}: not a readable Parquet file ({reason})", code="data.corrupt") from None


def manifest_rows(path: Path) -> list[Row] | None:
    """The rows of a table of paths and labels; None where the table holds the images themselves."""
    file = reader(path)
    columns = file.schema_arrow.names
    if {"path", "label"} <= set(columns):
        wanted = [name for name in columns if name in ("path", "label", "split")]
        if len(set(wanted)) < len(wanted):
            raise Error(
                f"{path}: has a column twice, of {', '.join(wanted)}; keep one of each", code="data.layout"
            )
        with readable(path):
            rows = file.read(columns=wanted).to_pylist()
        return [
            (f"{path}, row {i}", {name: cell(f"{path}, row {i}", name, row[name]) for name in wanted})
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
    """A cell as text; a label may be a whole number."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    if value is None or isinstance(value, str) or (name == "label" and whole):
        return "" if value is None else str(value)
    kind = "text or a whole number" if name == "label" else "text"
    found = f"{str(value)[:40]!r} of type {type(value).__name__}"
    raise Error(f"{where}: {name} must be {kind}, not {found}", code="data.layout")


def image_tables(path: Path, splits: Mapping[str, str]) -> dict[str, "Table"]:
    """The tables below a folder by split, with which a file's or folder's name begins (train-00000-of-9)."""
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
            found = class_names(file.schema_arrow.metadata, label)
            if number and found != names:
                raise Error(f"{path}: other classes than {files[0].name} has", code="data.classes")
            names = found
            with readable(path):
                values = file.read(columns=[label], use_threads=False).column(0)
            if len(values) != (rows := file.metadata.num_rows):
                raise Error(
                    f"{path}: {len(values)} labels for {rows} rows; it is damaged", code="data.corrupt"
                )
            labels.append(numbers(path, values, names))
        self.labels = np.concatenate(labels)  # -1: none
        self.classes = names or tuple(str(n) for n in range(int(self.labels.max(initial=-1)) + 1))

    def key(self, index: int) -> str:
        group = bisect_right(self.starts, index) - 1
        return f"{self.files[self.groups[group][0]].name}:{index - self.starts[group] + self.offset(group)}"

    def offset(self, group: int) -> int:
        """The rows of its file before a row group."""
        first = bisect_right(self.groups, (self.groups[group][0], -1))
        return self.starts[group] - self.starts[first]

    def fetch(self, index: int) -> bytes:
        group = bisect_right(self.starts, index) - 1
        value = self.rows(group)[index - self.starts[group]].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
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
            try:
                with readable(self.files[number]):
                    rows = self.opened[place].read_row_group(inner, columns=[self.image], use_threads=False)
            except ValueError as error:
                raise BadImage("unreadable", str(error)) from None
            found = rows.column(0)
            self.held[group] = found
            if len(self.held) > GROUPS:
                self.held.popitem(last=False)
            return found


def column(path: Path, names: list[str], known: tuple[str, ...]) -> str:
    found = [name for name in known if name in names]
    if not found:
        raise Error(
            f"{path}: has no column {' or '.join(known)}, only {', '.join(names)}", code="data.layout"
        )
    return found[0]


def numbers(path: Path, values: Any, names: tuple[str, ...] | None) -> np.ndarray:
    """Class numbers; -1 where there is none."""
    found = [-1 if value is None else value for value in values.to_pylist()]
    most = len(names) if names else MOST_CLASSES
    for row, value in enumerate(found):
        if type(value) is not int or value < -1:
            told = f"not {values.type} with {str(value)[:40]!r}"
            raise Error(f"{path}, row {row}: labels must be class numbers, {told}", code="data.labels")
        if value >= most:
            raise Error(
                f"{path}, row {row}: label {value} has no name among {most} classes"
                + ("" if names else ", the most that there may be"),
                code="data.labels",
            )
    return np.array(found, dtype=np.int64)


def class_names(metadata: Mapping[bytes, bytes] | None, label: str) -> tuple[str, ...] | None:
    """The names of the classes, where the file's writer left them."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return None
