"""The files of bulk results, by their endings: .parquet, .csv and .npz, written in parts and merged."""

import csv
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitkit.errors import Error
from vitkit.report.terminal import csv_cell, printable

Columns = Mapping[str, Any]  # by name: a list of texts, numbers or lists, or an array (rows, values)
GROUP = 8192  # rows of a row group in a merged .parquet
LINE_END = b"\r\n"  # of a .csv


class Format(Protocol):
    """How columns become a file."""

    def check(self, out: Path) -> None:
        """Raise an error if the library for this format is not installed."""

    def write(self, path: Path, columns: Columns) -> None:
        """Write the rows of a part."""

    def merge(self, path: Path, parts: Sequence[Path], rows: Sequence[int], about: Mapping[str, Any]) -> int:
        """Write all parts, of which the numbers of rows are given; returns how many rows have an error."""


def format_of(out: str | Path, endings: Sequence[str]) -> Format:
    """The format of a file name; an error names the endings that are possible."""
    suffix = Path(out).suffix.lower()
    if suffix not in endings:
        raise Error(
            f"--out {str(out)[:60]!r}: expected a file name that ends in {' or '.join(endings)}",
            code="request.value",
        )
    return FORMATS[suffix]


def text(value: str | None) -> str | None:
    """Text as UTF-8 can store it: bytes of a file name that are not UTF-8 are escaped."""
    if value is None:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return printable(value)
    return value


def check_rows(path: Path, actual: int, expected: int) -> None:
    if actual != expected:
        raise Error(
            f"{path}: {actual} rows instead of {expected}; delete this file and run the command again",
            code="run.corrupt",
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of a damaged part into one that names it."""
    try:
        yield
    except Error:
        raise
    except Exception as error:  # pyarrow, zipfile and csv have no common base class
        reason = " ".join(str(error).split())[:200]
        raise Error(
            f"{path}: damaged ({reason}); delete this file and run the command again", code="run.corrupt"
        ) from None


@dataclass(frozen=True)
class Parquet:
    """Apache Parquet by pyarrow; an array is a column of fixed-size lists, null where a row has an error."""

    def check(self, out: Path) -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ModuleNotFoundError:
            raise Error(
                f"--out {out}: writing Parquet needs pyarrow (pip install 'vitkit[parquet]')",
                code="request.extra-missing",
            ) from None

    def write(self, path: Path, columns: Columns) -> None:
        import pyarrow
        from pyarrow import parquet

        failed = [error is not None for error in columns["error"]]
        arrays = {name: arrow(name, values, failed) for name, values in columns.items()}
        parquet.write_table(pyarrow.table(arrays), path, use_dictionary=dictionaries(arrays))

    def merge(self, path: Path, parts: Sequence[Path], rows: Sequence[int], about: Mapping[str, Any]) -> int:
        import pyarrow
        from pyarrow import parquet

        errors, waiting = 0, 0
        pending: list[Any] = []
        with reading(parts[0]):
            schema = parquet.read_schema(parts[0]).with_metadata({"vitkit": json.dumps(about)})
        with parquet.ParquetWriter(path, schema, use_dictionary=dictionaries(schema.names)) as writer:
            for part, expected in zip(parts, rows, strict=True):
                with reading(part):
                    table = parquet.read_table(part, partitioning=None).cast(schema)  # without other metadata
                check_rows(part, table.num_rows, expected)
                errors += table.num_rows - table["error"].null_count
                pending, waiting = [*pending, table], waiting + table.num_rows
                if waiting >= GROUP or part == parts[-1]:
                    writer.write_table(
                        pyarrow.concat_tables(pending).combine_chunks(), row_group_size=waiting
                    )
                    pending, waiting = [], 0
        return errors


def arrow(name: str, values: Any, failed: Sequence[bool]) -> Any:
    """A column as an Arrow array, whose type depends on its name alone; failed rows of an array are null."""
    import pyarrow

    if isinstance(values, np.ndarray):
        flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
        return pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1], mask=pyarrow.array(failed))
    number, words = pyarrow.float32(), pyarrow.string()
    kinds = {"probability": number, "probabilities": pyarrow.list_(number), "labels": pyarrow.list_(words),
             "rejected": pyarrow.bool_()}  # fmt: skip
    return pyarrow.array(safe(values), type=kinds.get(name, words))


def safe(values: Any) -> Any:
    """Values with text as UTF-8 can store it."""
    if isinstance(values, list):
        return [safe(value) for value in values]
    return text(values) if isinstance(values, str) else values


def dictionaries(names: Any) -> list[str]:
    """The columns with repeated text, for which Parquet's dictionaries pay off."""
    return [name for name in names if name in ("label", "labels", "split", "error")]


@dataclass(frozen=True)
class Csv:
    """Comma-separated text, a line for each row; lists are JSON, and `error` is the last column."""

    def check(self, out: Path) -> None:
        return

    def write(self, path: Path, columns: Columns) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(columns)
            for row in zip(*columns.values(), strict=True):
                table.writerow([self.cell(value) for value in row])

    def cell(self, value: Any) -> Any:
        """A cell without line breaks."""
        if isinstance(value, list):
            return json.dumps(safe(value), ensure_ascii=False)
        return csv_cell(value) if isinstance(value, str) else "" if value is None else value

    def merge(self, path: Path, parts: Sequence[Path], rows: Sequence[int], about: Mapping[str, Any]) -> int:
        errors = 0
        with path.open("wb") as file:
            for part, expected in zip(parts, rows, strict=True):
                with reading(part):
                    header, end, lines = part.read_bytes().partition(LINE_END)
                check_rows(part, lines.count(LINE_END), expected)
                errors += expected - lines.count(b"," + LINE_END)
                file.write(header + end + lines if part == parts[0] else lines)
        return errors


@dataclass(frozen=True)
class Npz:
    """NumPy's archive of arrays, one for each column; the rows of an array are NaN where they failed."""

    def check(self, out: Path) -> None:
        return

    def write(self, path: Path, columns: Columns) -> None:
        failed = np.array([error is not None for error in columns["error"]])
        arrays = {name: self.array(values, failed) for name, values in columns.items()}
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    def array(self, values: Any, failed: np.ndarray) -> np.ndarray:
        if isinstance(values, np.ndarray):
            return np.where(failed[:, None], np.nan, values).astype(values.dtype)
        texts = [";".join(value) if isinstance(value, list) else value or "" for value in values]
        return np.array([text(value) for value in texts], dtype=np.str_)

    def merge(self, path: Path, parts: Sequence[Path], rows: Sequence[int], about: Mapping[str, Any]) -> int:
        errors = 0
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            with reading(parts[0]), np.load(parts[0], allow_pickle=False) as first:
                names = list(first)
            for name in names:
                arrays = self.stored(name, parts, rows)
                dtypes = {array.dtype for array in arrays if len(array)}
                dtype = max(dtypes, key=lambda one: one.itemsize)  # the longest text
                shape = (sum(rows), *next(self.stored(name, parts, rows)).shape[1:])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    kind = np.lib.format.dtype_to_descr(dtype)
                    header = {"descr": kind, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                    for array in self.stored(name, parts, rows):
                        file.write(array.astype(dtype).tobytes())
                        errors += int((array != "").sum()) if name == "error" else 0
            archive.comment = json.dumps(about).encode()[:65535]
        return errors

    def stored(self, name: str, parts: Sequence[Path], rows: Sequence[int]) -> Iterator[np.ndarray]:
        """A column of each part."""
        for part, expected in zip(parts, rows, strict=True):
            with reading(part), np.load(part, allow_pickle=False) as arrays:
                array = arrays[name]
            check_rows(part, len(array), expected)
            yield array


FORMATS: dict[str, Format] = {".parquet": Parquet(), ".csv": Csv(), ".npz": Npz()}
EMBED, PREDICT = (".parquet", ".npz"), (".parquet", ".csv")  # the endings that the verbs write
