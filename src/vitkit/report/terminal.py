"""Tables and facts on a terminal: in colour where there is one, plain text where not."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


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
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        table.add_column(key.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(plain(cell(value)) for value in row.values()))
    console().print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """One fact a line, its name before it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), plain(cell(value)))
    console().print(table)


def say(text: str, style: str = "") -> None:
    console().print(plain(text), style=style or None)


def plain(text: str) -> Any:
    """Text shown as it is, whatever brackets it contains."""
    from rich.text import Text

    return Text(text)


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
