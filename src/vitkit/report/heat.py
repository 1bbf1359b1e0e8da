"""A confusion matrix as coloured squares with whole names, and a share as a bar, inside a page."""

from collections.abc import Sequence

from vitkit.report.charts import short
from vitkit.report.html import Markup, clipped, element, name, note, text

WHOLE = 40  # classes up to which the whole matrix is shown on a wide screen
PART = 24  # of more classes, so many that are confused most
NARROW, NARROW_PART = 10, 8  # the same on a phone
ROW_NAME, COLUMN_NAME = 120, 60  # letters of a name beside a row and above a column
OTHER = "other classes"
Matrix = Sequence[Sequence[int]]


def confusion_matrix(matrix: Matrix, names: Sequence[str]) -> Markup:
    """The matrix as large as a screen has room for: all of it, or the part that is confused most.

    Wide and narrow screens have a matrix each where one does not fit both; the style shows the right one.
    """
    chosen = most_confused(matrix, PART)
    everything = list(range(len(names)))
    wide = everything if len(names) <= WHOLE else chosen
    narrow = everything if len(names) <= NARROW else chosen[:NARROW_PART]
    if wide == narrow:
        return squares(matrix, names, wide)
    return Markup(squares(matrix, names, wide, "on-wide") + squares(matrix, names, narrow, "on-narrow"))


def most_confused(matrix: Matrix, most: int) -> list[int]:
    """Classes by how often one is taken for another, the two beside each other."""
    counted = ((-count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if count)
    chosen: dict[int, None] = {}
    for _, i, j in sorted(one for one in counted if one[1] != one[2]):
        if len(chosen.keys() | {i, j}) <= most:
            chosen |= {i: None, j: None}
        if len(chosen) == most:
            break
    return list(chosen)


def squares(matrix: Matrix, names: Sequence[str], chosen: Sequence[int], where: str = "") -> Markup:
    """Rows are what is, columns what was said; each row is coloured by its share of that row's images."""
    if not chosen:
        return Markup("")
    inside = set(chosen)
    columns = [names[j] for j in chosen] + [OTHER] * (len(chosen) < len(names))
    heads = "".join(f'<th scope="col"><span>{name(column, COLUMN_NAME)}</span></th>' for column in columns)
    body = ""
    for place, i in enumerate(chosen):
        counts = [matrix[i][j] for j in chosen]
        if len(chosen) < len(names):
            counts.append(sum(count for j, count in enumerate(matrix[i]) if j not in inside))
        cells = "".join(
            cell(count, sum(matrix[i]), names[i], column, right=j == place)
            for j, (count, column) in enumerate(zip(counts, columns, strict=True))
        )
        body += f'<tr><th scope="row">{name(names[i], ROW_NAME)}</th>{cells}</tr>\n'
    size = next(css for most, css in ((3, "fewest"), (6, "few"), (14, "some"), (10**9, "many"))
                if len(columns) <= most)  # fmt: skip
    words = "Confusion matrix: rows are what an image is, columns what the model said"
    corner = '<td class="corner"><span class="axis">what it is ↓<br/>said →</span></td>'
    whole = f"<thead><tr>{corner}{heads}</tr></thead>\n<tbody>\n{body}</tbody>"
    part = len(chosen) < len(names)
    lead = note(f"Of {len(names):,} classes, the {len(chosen)} that are confused most often.") if part else ""
    css = f"matrix {size} {where}".strip()
    return Markup(f'<div class="{css}">{lead}<table aria-label="{words}">{whole}</table></div>\n')


def cell(count: int, total: int, row: str, column: str, *, right: bool) -> str:
    """One square, with its number and, for the pointer, its words."""
    if not count:
        return "<td><span></span></td>"
    share = count / total
    told = text(f"{clipped(row, 40)} → {clipped(column, 40)}: {short(count)} ({share:.1%})")
    css = f"{'right' if right else 'wrong'} q{max(1, round(10 * share))}"
    return f'<td class="{css}" title="{told}"><span>{short(count)}</span></td>'


def bar(share: float) -> Markup:
    """A share of a whole as a short bar, for a cell of a table."""
    filled = 100 * min(max(share, 0.0), 1.0)
    inside = element("rect", class_="track", width=100, height=8, rx=2)
    inside = Markup(inside + element("rect", class_="filled", width=filled, height=8, rx=2))
    box = {"viewBox": "0 0 100 8", "preserveAspectRatio": "none", "aria_hidden": "true"}
    return element("svg", inside, class_="bar", **box)
