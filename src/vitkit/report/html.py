"""Pages that need nothing but themselves: the Jinja2 environment with autoescape, and what pages share."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup, escape

from vitkit.report.terminal import cell, printable

LONGEST = 300  # characters of a name that are shown
STACKED = 4  # columns that a phone has room for


class Number(str):
    """A number that is formatted already; tables align it to the right."""


def shown(value: Any) -> Any:
    """A value as text for a reader; markup stays as it is.

    Control characters, bidirectional marks and undecodable bytes are written out, so that no name passes for
    another.
    """
    return value if isinstance(value, Markup) else printable(cell(value), lines=True)


def text(value: Any) -> Markup:
    """The same, escaped: safe in an element and in an attribute."""
    return escape(shown(value))


def name(value: Any, longest: int = LONGEST) -> Markup:
    """The name of a class or a file: on one line, in its own writing direction, and not too long."""
    return element("bdi", clipped(str(value), longest), class_="name")


def clipped(value: str, longest: int) -> str:
    """A long text without its middle, with its length; line breaks and tabs are written out."""
    value = value.replace("\n", "\\n").replace("\t", "\\t")
    if len(value) <= longest:
        return value
    half = longest // 2
    return (
        f"{value[:half]} ... {value[-half:]} ({len(value):,} characters)"
        if longest > 60
        else f"{value[: longest - 1]}…"
    )


@cache
def environment(package: str = "vitkit.report") -> Environment:
    """The templates of one package, and of no other place; a value that a template lacks is an error."""
    made = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"name": name, "words": words}
    made.globals |= {"table": table, "note": note}
    return made


def fill(template: str, macro: str, /, *values: Any, **named: Any) -> Markup:
    """What a macro of one of our templates makes of these values; LookupError where they lack one."""
    filled = getattr(environment().get_template(template).module, macro)
    try:
        made: Markup = filled(*values, **named)
    except UndefinedError as error:  # a file of a run holds something else than a run writes
        raise LookupError(f"{template}: {error.message}") from error
    return made


def page(title: str, header: Markup, sections: Mapping[str, Markup]) -> str:
    """A whole document: a header, links to the sections, the sections by title; empty ones are left out.

    Its policy allows the one style and images inside the page, and nothing else.
    """
    style = files("vitkit.report").joinpath("page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    kept = {heading: body for heading, body in sections.items() if body.strip()}
    return environment().get_template("page.html").render(
        title=title, header=header, sections=kept, style=style, digest=digest
    )  # fmt: skip


def encoded(document: str) -> bytes:
    """A document as it is written to a file."""
    return document.encode("utf-8", "backslashreplace")


def element(kind: str, body: Any = "", /, **attributes: Any) -> Markup:
    """<kind attribute="value">body</kind>; class_ is class, text_anchor is text-anchor, 0.25 is as short."""
    written = ""
    for key, value in attributes.items():
        shape = f"{round(value, 2):g}" if isinstance(value, int | float) else text(value)
        written += f' {key.rstrip("_").replace("_", "-")}="{shape}"'
    return Markup(f"<{kind}{written}>{text(body)}</{kind}>")  # noqa: S704 (values are escaped, names are ours)


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def table(rows: Iterable[Mapping[str, Any]], marked: Sequence[bool] = ()) -> Markup:
    """One row a mapping, one column a key; numbers are aligned to the right, `marked` rows are highlighted.

    A table of many columns becomes a list of cards on a phone, where each cell names its column.
    """
    rows = list(rows)
    if not rows:
        return note("nothing")
    columns = [(key, all(is_number(row[key]) for row in rows)) for key in rows[0]]
    lit = [*marked, *[False] * (len(rows) - len(marked))]
    return fill("parts.html", "table", columns, list(zip(rows, lit, strict=True)), len(columns) > STACKED)


def is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float | Number) and not isinstance(value, bool))


def percent(share: float | None, digits: int = 2) -> Number:
    return Number("–" if share is None else f"{100 * share:.{digits}f} %")


def words(key: str) -> str:
    """A field's name as words."""
    return key.replace("_", " ")


def facts(values: Mapping[str, Any]) -> Markup:
    """Names with their values, one a line."""
    return fill("parts.html", "facts", values)


def note(sentence: Any) -> Markup:
    """A line in small print."""
    return fill("parts.html", "note", sentence)


def details(summary: str, body: Markup) -> Markup:
    """A part that opens with a click."""
    return fill("parts.html", "details", summary, body)


def commands(lines: Iterable[str]) -> Markup:
    """What to type, a line each."""
    return fill("parts.html", "commands", list(lines))


def headline(big: Any, small: Any) -> Markup:
    """The one result of a page, and what it is of."""
    return fill("parts.html", "headline", big, small)


def link(target: str | None, label: Markup) -> Markup:
    """A label that leads to another page, if there is one."""
    return fill("parts.html", "link", target, label) if target else label


def picture(content: bytes | str, mime: str, alt: str) -> Markup:
    """An image inside the page, from its bytes or their base64."""
    data = base64.b64encode(base64.b64decode(content) if isinstance(content, str) else content).decode()
    return fill("parts.html", "picture", data, mime, alt)
