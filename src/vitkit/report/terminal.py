"""Tables and facts on a terminal: in colour where there is one, plain text where not."""

import sys
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

JOINERS = "\u200c\u200d"  # parts of words in some scripts, and of emoji
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # kinds of characters that a reader would not see


class Output(Console):
    """Standard output. A reader who leaves early is an error like others: main() decides the exit code."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the BrokenPipeError


def console() -> Console:
    """Standard output; as wide as the table needs when it is not a terminal."""
    found = Output(highlight=False)
    return found if found.is_terminal else Output(highlight=False, width=200)


def print_table(rows: Iterable[Mapping[str, Any]], title: str = "") -> None:
    """One row a mapping, one column a key; numbers stand to the right."""
    rows = list(rows)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for key in rows[0] if rows else ():
        numeric = all(
            isinstance(row[key], int | float | None) or str(row[key]).endswith(("%", "–")) for row in rows
        )
        table.add_column(key.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(plain(safe_cell(value)) for value in row.values()))
    console().print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """One fact a line, its name before it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), plain(safe_cell(value)))
    console().print(table)


def say(text: str, style: str = "") -> None:
    """A text on standard output; in a file or a pipe one line stays one line."""
    out = console()
    out.print(plain(text), style=style or None, soft_wrap=not out.is_terminal)


def warn(text: str) -> None:
    """A line on standard error."""
    print(printable(text, lines=True), file=sys.stderr, flush=True)


def plain(text: str) -> Any:
    """Text shown as it is, whatever brackets it contains; no character of it controls the terminal."""
    from rich.text import Text

    return Text(printable(text, lines=True))


def printable(text: str, *, lines: bool = False) -> str:
    """Text that a stranger may have written, with everything that a reader would not see written out.

    Escape sequences, marks that turn the direction of writing and bytes that are no characters are shown by
    number, so that no name passes for another. lines: line breaks stay, where the text is more than a name.
    """
    if text.isprintable():
        return text
    return "".join(map(visible, text if lines else text.replace("\n", "\\n").replace("\t", "\\t")))


def csv_cell(text: str) -> str:
    """Text that a spreadsheet shows and does not compute: an apostrophe before what begins like a formula."""
    return f"'{printable(text)}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else printable(text)


def visible(character: str) -> str:
    if character in "\n\t" or character in JOINERS or unicodedata.category(character) not in HIDDEN:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python keeps a byte that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"[U+{number:04X}]"


def safe_cell(value: Any) -> str:
    """A value for a table: each name on a line of its own."""
    names = value if isinstance(value, tuple | list) else (value,)
    return "\n".join(printable(cell(one)) for one in names) or "-"


def cell(value: Any) -> str:
    """A value as a person would write it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 and value else f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, tuple | list):
        return "\n".join(map(str, value)) or "-"
    return str(value)


def duration(seconds: float) -> str:
    """A length of time as a person would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
