"""A matrix as coloured squares, and a share as a bar, both as SVG inside a page."""

from collections.abc import Sequence

from vitkit.report.charts import LETTER, short, svg
from vitkit.report.html import Markup, clipped, element

CELL = 26  # side of a square
NUMBERED = 24  # columns up to which the squares show their numbers
LONG = 14  # letters of a name beside the squares
ZOOM = 1.25  # pixels of a page that a unit of a drawing becomes
FEW = 4  # letters of a name that stand upright above them


def heat_map(matrix: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> str:
    """Rows of numbers as squares, each row by its own sum; a row's own column has another colour.

    Rows are what is, columns what was said.
    """
    longest = max((len(clipped(n, LONG)) for n in (*rows, *columns)), default=1)
    upright = longest < FEW
    left, top = 28 + LETTER * longest, 40 if upright else 28 + 6 * longest
    drawn = ""
    for i, row in enumerate(rows):
        y = top + i * CELL
        at = {"class_": "tick", "x": left - 6, "y": y + CELL / 2, "dy": 4, "text_anchor": "end"}
        drawn += element("text", label(row), **at) + squares(matrix[i], row, columns, left, y)
    for j, column in enumerate(columns):
        turned = f"translate({left + (j + 0.5) * CELL:.1f} {top - 7}) rotate({0 if upright else -60})"
        anchor = "middle" if upright else "start"
        drawn += element("text", label(column), class_="tick", transform=turned, text_anchor=anchor)
    drawn += element("text", "said", class_="axis", x=left, y=12)
    start = -top - len(rows) * CELL
    drawn += element("text", "truth", class_="axis", transform="rotate(-90)", x=start, y=12)
    width = left + len(columns) * CELL + (2 if upright else top / 2)
    told = f"{len(rows)} by {len(columns)} numbers: rows are what is, columns what was said"
    drawing = svg(width, top + len(rows) * CELL, told, drawn, width=round(ZOOM * width))
    return element("figure", drawing, class_="heat big" if len(columns) > 12 else "heat")


def label(name: str) -> Markup:
    return Markup(element("title", clipped(name, 40)) + element("tspan", clipped(name, LONG)))


def squares(values: Sequence[float], row: str, columns: Sequence[str], left: float, y: float) -> str:
    """One row of the matrix."""
    total, drawn = sum(values) or 1, ""
    for j, (value, column) in enumerate(zip(values, columns, strict=True)):
        x, share = left + j * CELL, value / total
        square = {"x": x, "y": y, "width": CELL - 1, "height": CELL - 1}
        if not value:
            drawn += element("rect", class_="none", **square)
            continue
        told = f"{clipped(row, 40)} → {clipped(column, 40)}: {short(value)} ({share:.1%})"
        css = "right" if row == column else "wrong"
        drawn += element("rect", element("title", told), class_=css, fill_opacity=0.1 + 0.9 * share, **square)
        if len(columns) <= NUMBERED:
            css, at = "count strong" if share > 0.45 else "count", (CELL - 1) / 2
            drawn += element("text", short(value), class_=css, x=x + at, y=y + at, dy=4)
    return drawn


def bar(share: float) -> Markup:
    """A share of a whole as a short bar, for a cell of a table."""
    filled = 100 * min(max(share, 0.0), 1.0)
    inside = element("rect", class_="track", width=100, height=8, rx=2)
    inside = Markup(inside + element("rect", class_="filled", width=filled, height=8, rx=2))
    box = {"viewBox": "0 0 100 8", "preserveAspectRatio": "none", "aria_hidden": "true"}
    return element("svg", inside, class_="bar", **box)
