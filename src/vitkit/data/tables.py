"""Rows of .csv files, in the encodings that name themselves; what cannot be read is an error by line."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from vitkit.data.archives import Positioned
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
