"""Self-contained HTML pages: the Jinja2 environment with autoescape, and elements that all pages share."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup, escape

from vitkit.report.palette import CSS
from vitkit.report.terminal import cell, printable

LONGEST = 300  # characters after which a name is shortened
PHONE = 46  # characters of a row that fit on a phone, with two for each gap
WRAPPED = 12  # characters to which text is wrapped there


class Number(str):
    """A formatted number; tables align it to the right."""


def display(value: Any) -> Any:
    """A value as text with invisible characters escaped; markup is unchanged.

    Control characters, bidirectional marks and undecodable bytes are shown by code point, so that no name can
    imitate another.
    """
    if value is None:
        return "–"
    return value if isinstance(value, Markup) else printable(cell(value), lines=True)


def text(value: Any) -> Markup:
    """A value as escaped text: safe in elements and attributes."""
    return escape(display(value))


def name(value: Any, longest: int = LONGEST) -> Markup:
    """The name of a class or file: on one line, in its own writing direction, shortened if necessary."""
    return element("bdi", clipped(str(value), longest), class_="name")


def clipped(value: str, longest: int) -> str:
    """Shorten long text in the middle and state its length; line breaks and tabs are escaped."""
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
    """The templates of one package; a missing value is an error."""
    jinja = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, finalize=display,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja.filters |= {"name": name, "words": words, "units": units}
    jinja.globals |= {"table": table, "note": note}
    return jinja


def fill(template: str, macro: str, /, *values: Any, **options: Any) -> Markup:
    """Render a macro of a template; LookupError if a value is missing."""
    render = getattr(environment().get_template(template).module, macro)
    try:
        markup: Markup = render(*values, **options)
    except UndefinedError as error:  # a damaged file in the run folder
        raise LookupError(f"{template}: {error.message}") from error
    return markup


def page(title: str, header: Markup, sections: Mapping[str, Markup]) -> str:
    """A complete document: header, links to the sections, and all non-empty sections by title.

    The content security policy allows only the inline style sheet and inline images.
    """
    style = CSS + files("vitkit.report").joinpath("page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    non_empty = {heading: body for heading, body in sections.items() if body.strip()}
    return environment().get_template("page.html").render(
        title=title, header=header, sections=non_empty, style=style, digest=digest
    )  # fmt: skip


def encoded(document: str) -> bytes:
    """The bytes of a document, with undecodable characters escaped."""
    return document.encode("utf-8", "backslashreplace")


def element(tag: str, body: Any = "", /, **attributes: Any) -> Markup:
    """<tag attribute="value">body</tag>; class_ becomes class, text_anchor becomes text-anchor."""
    written = ""
    for key, value in attributes.items():
        quoted = f"{round(value, 2):g}" if isinstance(value, int | float) else text(value)
        written += f' {key.rstrip("_").replace("_", "-")}="{quoted}"'
    return Markup(f"<{tag}{written}>{text(body)}</{tag}>")  # noqa: S704 (values are escaped, names are ours)


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def table(rows: Iterable[Mapping[str, Any]], highlighted: Sequence[bool] = ()) -> Markup:
    """One row per mapping, one column per key; numbers are right-aligned, `highlighted` rows stand out.

    On a phone, a table that is too wide becomes a list of cards in which each cell names its column, and bars
    are left out.
    """
    rows = list(rows)
    if not rows:
        return note("No entries.")
    columns = [(key, all(is_number(row[key]) for row in rows)) for key in rows[0]]
    flags = [*highlighted, *[False] * (len(rows) - len(highlighted))]
    entries = list(zip(rows, flags, strict=True))
    return fill("parts.html", "table", columns, entries, phone_width(rows, columns) > PHONE)


def phone_width(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, bool]]) -> int:
    """The characters of the widest row: numbers as they are, text and headers wrapped; without bars."""
    total = 0
    for key, number in columns:
        if key != " ":
            longest = max((len(part) for part in words(key).split()), default=0)
            cells = max(len(text(row[key]).striptags()) for row in rows)
            total += 2 + max(longest, cells if number else min(cells, WRAPPED))
    return total


def is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float | Number) and not isinstance(value, bool))


def fixed_percent(share: float | None, digits: int = 2) -> Number:
    """A share in per cent with a fixed number of decimals."""
    return Number("–" if share is None else f"{100 * share:.{digits}f} %")


def units(value: Any) -> Any:
    """A sentence in which no line breaks between a number and its per cent sign."""
    shown = display(value)
    return type(shown)(re.sub(r"(?<=\d) %", "\u00a0%", shown))


def words(key: str) -> str:
    """A field name with spaces instead of underscores."""
    return key.replace("_", " ")


def facts(values: Mapping[str, Any]) -> Markup:
    """A list of names and values."""
    return fill("parts.html", "facts", values)


def note(sentence: Any) -> Markup:
    """A paragraph in small print."""
    return fill("parts.html", "note", sentence)


def details(summary: str, body: Markup) -> Markup:
    """A collapsed section."""
    return fill("parts.html", "details", summary, body)


def commands(lines: Iterable[str]) -> Markup:
    """Shell commands, one per line."""
    return fill("parts.html", "commands", list(lines))


def headline(big: Any, small: Any) -> Markup:
    """The main result of a page, and a line that explains it."""
    return fill("parts.html", "headline", big, small)


def link(target: str | None, label: Markup) -> Markup:
    """A label that links to `target` if there is one."""
    return fill("parts.html", "link", target, label) if target else label


def picture(content: bytes | str, mime: str, alt: str) -> Markup:
    """An inline image, from bytes or base64."""
    data = base64.b64encode(base64.b64decode(content) if isinstance(content, str) else content).decode()
    return fill("parts.html", "picture", data, mime, alt)
