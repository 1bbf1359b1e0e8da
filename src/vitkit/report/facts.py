"""Everything about one model or recipe as tables on a terminal: a heading for each group, aligned columns."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from vitkit.report.terminal import cell, console, plain, printable

FIRST = {  # what a reader looks for; the other facts of a model are its architecture
    "file", "name", "model", "format", "precision", "kind", "parameters", "classes", "image_size",
    "GFLOPs_224", "GFLOPs_384", "address", "megabytes", "pixels", "trained_on", "top1", "view", "licence",
    "input", "input_type", "input_shape", "output", "any_size", "sizes_are_multiples_of", "vitkit",
}  # fmt: skip
WITH_UNIT = {
    "GFLOPs_224": "GFLOPs 224", "GFLOPs_384": "GFLOPs 384", "megabytes": "MiB", "top1": "ImageNet top-1 %",
    "vitkit": "vitkit version",
}  # fmt: skip


Rows = list[tuple[str, Any]]


def print_groups(facts: Mapping[str, Any]) -> None:
    """One table a group: its facts below each other, names before values."""
    for title, rows in groups(facts).items():
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(plain(f"{'  ' * bool(title)}{name}"), plain(in_words(value)))
        if title:
            console().print()
            console().print(plain(title), style="bold")
        console().print(table)


def groups(facts: Mapping[str, Any]) -> dict[str, Rows]:
    """Facts by group: the first has no title, a nested mapping is one, and so are names with a dot."""
    found: dict[str, Rows] = {"": []}
    architecture: Rows = []
    for key, value in facts.items():
        group, _, name = key.rpartition(".")
        if isinstance(value, Mapping):
            found[key] = [(inner.replace("_", " "), one) for inner, one in value.items()]
        elif key == "labels":
            found[key] = [("" if text.startswith("... ") else str(n), text) for n, text in enumerate(value)]
        elif key == "notes":
            found[key] = [("-", text) for text in value]
        else:
            other = "kind" in facts and key not in FIRST
            rows = architecture if other else found.setdefault(group, [])
            rows.append((WITH_UNIT.get(key, name.replace("_", " ")), value))
    return {title: rows for title, rows in (found | {"architecture": architecture}).items() if rows}


def in_words(value: Any) -> str:
    """A value as a person writes it: a size as 224 x 224, several values with commas."""
    if isinstance(value, tuple | list):
        square = len(value) == 2 and all(type(one) is int for one in value)
        return (" x " if square else ", ").join(printable(cell(one)) for one in value) or "-"
    return printable(cell(value)) or "-"
