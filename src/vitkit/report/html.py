"""Pages that need nothing but themselves: text made safe, tables, facts, pictures, one style."""

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from vitkit.report.terminal import cell, printable

LONGEST = 300  # characters of a name that are shown
STACKED = 4  # columns that a phone has room for


class Markup(str):
    """Text that is HTML already; everything else is escaped before it is put on a page."""


def text(value: Any) -> Markup:
    """Any value as text, safe in an element and in an attribute. What would not be seen is written out.

    Marks that turn the direction of writing, control characters and the bytes of a file name that are no
    characters are all shown by number, so that no name can pass for another.
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(printable(cell(value), lines=True)))


def name(value: Any, most: int = LONGEST) -> Markup:
    """The name of a class or a file: on one line, in its own direction, and no longer than one reads."""
    return Markup(f'<bdi class="name">{text(clipped(str(value), most))}</bdi>')


def clipped(value: str, most: int) -> str:
    """A long text without its middle, and how long it was; line breaks and tabs are written out."""
    value = value.replace("\n", "\\n").replace("\t", "\\t")
    if len(value) <= most:
        return value
    half = most // 2
    return (
        f"{value[:half]} ... {value[-half:]} ({len(value):,} characters)"
        if most > 60
        else f"{value[: most - 1]}…"
    )


def page(title: str, body: str) -> str:
    """A whole document. Its policy allows the one style and pictures inside the page, and nothing else."""
    style = files("vitkit.report").joinpath("page.css").read_text("utf-8")
    mark = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{mark}'; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def encoded(document: str) -> bytes:
    """A document as it is written to a file."""
    return document.encode("utf-8", "backslashreplace")


def element(kind: str, body: str = "", /, **attributes: Any) -> Markup:
    """<kind attribute="value">body</kind>; class_ is class, text_anchor is text-anchor, 0.25 is as short."""
    told = ""
    for key, value in attributes.items():
        written = f"{round(value, 2):g}" if isinstance(value, int | float) else text(value)
        told += f' {key.rstrip("_").replace("_", "-")}="{written}"'
    return Markup(f"<{kind}{told}>{text(body)}</{kind}>")


def section(title: str, body: str, id: str) -> Markup:
    return Markup(f'<section id="{text(id)}">\n<h2>{text(title)}</h2>\n{body}\n</section>\n')


def contents(sections: Mapping[str, str]) -> Markup:
    """Links to the sections of the page, by their ids."""
    links = (f'<a href="#{text(id)}">{text(title)}</a>' for id, title in sections.items())
    return Markup(f"<nav>{' '.join(links)}</nav>\n")


def table(rows: Iterable[Mapping[str, Any]], *, marked: Sequence[bool] = ()) -> Markup:
    """One row a mapping, one column a key; numbers stand to the right. `marked` rows stand out.

    A table of many columns becomes a list of cards on a phone, where each cell names its column.
    """
    rows = list(rows)
    if not rows:
        return note("nothing")
    right = {key: all(numeric(row[key]) for row in rows) for key in rows[0]}
    css = {key: ' class="number"' if found else "" for key, found in right.items()}
    words = {key: text(key.replace("_", " ")) for key in rows[0]}
    head = "".join(f'<th scope="col"{css[key]}>{words[key]}</th>' for key in rows[0])
    stacked = len(words) > STACKED
    if stacked:
        css = {key: f'{css[key]} data-label="{words[key]}"' for key in css}
    lines = []
    for i, row in enumerate(rows):
        cells = "".join(f"<td{css[key]}>{text(row[key])}</td>" for key in rows[0])
        out = ' class="marked"' if i < len(marked) and marked[i] else ""
        lines.append(f"<tr{out}>{cells}</tr>\n")
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    kind = "wide stacked" if stacked else "wide"
    return Markup(f'<div class="{kind}"><table>{body}</table></div>\n')


class Number(Markup):
    """A number that is written already, as a table should have it."""


def percent(share: float | None, digits: int = 2) -> Number:
    return Number("–" if share is None else f"{100 * share:.{digits}f} %")


def numeric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float | Number) and not isinstance(value, bool))


def facts(found: Mapping[str, Any]) -> Markup:
    """Names with their values, one a line."""
    rows = (f"<dt>{text(key.replace('_', ' '))}</dt><dd>{text(value)}</dd>" for key, value in found.items())
    return Markup(f"<dl>{''.join(rows)}</dl>\n")


def details(summary: str, body: str, *, unfolded: bool = False) -> Markup:
    """A part that opens with a click."""
    state = " open" if unfolded else ""
    return Markup(f"<details{state}><summary>{text(summary)}</summary>\n{body}\n</details>\n")


def note(words: str) -> Markup:
    return Markup(f'<p class="note">{text(words)}</p>\n')


def commands(lines: Iterable[str]) -> Markup:
    """What to type, a line each."""
    told = "\n".join(f'<span class="prompt">$ </span>{text(line)}' for line in lines)
    return Markup(f"<pre>{told}</pre>\n")


def image(content: bytes, mime: str, alt: str) -> Markup:
    """A picture inside the page."""
    data = base64.b64encode(content).decode()
    return Markup(f'<img src="data:{text(mime)};base64,{data}" alt="{text(alt)}">')
