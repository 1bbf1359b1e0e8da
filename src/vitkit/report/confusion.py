"""The confusion matrix of a report, and the most frequent confusions."""

from collections.abc import Sequence

from markupsafe import Markup

from vitkit.metrics.intervals import percent
from vitkit.report.charts import short
from vitkit.report.html import Number, clipped, fill, joined, name

FIRST, ROWS, OFTEN = 20, 1000, 12  # rows of a table: at first, expanded, and beside a matrix
NAMED = 120  # characters of a name in a long table
WHOLE, PART = 40, 24  # up to WHOLE classes the full matrix fits a wide screen; else the PART most confused
NARROW, NARROW_PART = 10, 8  # the same on a phone
SHORT = 3  # characters of class names that need no room beside and above a matrix
OTHER = "other classes"
Pair = tuple[str, str, int, int]  # true class, predicted class, count, images of the true class
Matrix = Sequence[Sequence[int]]


def pairs_of(matrix: Matrix, names: Sequence[str]) -> list[Pair]:
    """The off-diagonal entries of a confusion matrix, the most frequent first."""
    counts = [(n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if n and i != j]
    counts.sort(key=lambda entry: (-entry[0], entry[1:]))
    return [(names[i], names[j], count, sum(matrix[i])) for count, i, j in counts[:ROWS]]


def confusions(matrix: Matrix | None, names: Sequence[str], pairs: Sequence[Pair] | None) -> Markup:
    """The confusion matrix, or its most confused part, and the most frequent confusions."""
    if pairs is None and matrix is not None:
        pairs = pairs_of(matrix, names)
    matrix_markup = confusion_matrix(matrix, names) if matrix is not None else Markup()
    if not matrix_markup and pairs is None:
        return Markup()
    rows = [
        {"true class": name(truth, NAMED), "predicted class": name(predicted, NAMED),
         "images": Number(f"{count:,} of {images:,}"),
         "share": Number(percent(count / images if images else None, images))}
        for truth, predicted, count, images in (pairs or ())[: OFTEN if matrix_markup else FIRST]
    ]  # fmt: skip
    return fill("run.html", "confusions", matrix_markup, rows)


def confusion_matrix(matrix: Matrix, names: Sequence[str], *, shares: bool = False) -> Markup:
    """The full matrix if it fits the screen, else its most confused part; with counts, or shares of a row.

    If wide and narrow screens need different matrices, both are in the page and the style shows one.
    """
    confused = most_confused(matrix, PART)
    everything = list(range(len(names)))
    wide = everything if len(names) <= WHOLE else confused
    narrow = everything if len(names) <= NARROW else confused[:NARROW_PART]
    if wide == narrow:
        return matrix_table(matrix, names, wide, shares=shares)
    return joined(
        matrix_table(matrix, names, part, screen, shares=shares)
        for part, screen in ((wide, "on-wide"), (narrow, "on-narrow"))
    )


def most_confused(matrix: Matrix, most: int) -> list[int]:
    """Up to `most` classes in order of their most frequent confusions; confused pairs are adjacent."""
    counts = ((-count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if count)
    selected: dict[int, None] = {}
    for _, i, j in sorted(entry for entry in counts if entry[1] != entry[2]):
        if len(selected.keys() | {i, j}) <= most:
            selected |= {i: None, j: None}
        if len(selected) == most:
            break
    return list(selected)


def matrix_table(
    matrix: Matrix, names: Sequence[str], selected: Sequence[int], screen: str = "", *, shares: bool = False
) -> Markup:
    """The selected rows and columns, coloured by row share; all other columns are summed into one."""
    if not selected:
        return Markup()
    partial, selected_set = len(selected) < len(names), set(selected)
    columns = [names[j] for j in selected] + [OTHER] * partial
    rows = []
    for diagonal, i in enumerate(selected):
        counts = [matrix[i][j] for j in selected]
        if partial:
            counts.append(sum(count for j, count in enumerate(matrix[i]) if j not in selected_set))
        total = sum(matrix[i])
        cells = [
            matrix_cell(count, total, names[i], column, correct=j == diagonal, shares=shares)
            for j, (count, column) in enumerate(zip(counts, columns, strict=True))
        ]
        rows.append((names[i], cells))
    sizes = ((3, "fewest"), (6, "few"), (14, "some"), (10**9, "many"))
    css = next(css for most, css in sizes if len(columns) <= most)
    if all(len(label) <= SHORT for label in columns):
        css += " short"
    class_counts = (len(selected), f"{len(names):,}") if partial else None
    return fill("run.html", "matrix", f"{css} {screen}".strip(), class_counts, columns, rows)


def matrix_cell(
    count: int, total: int, row: str, column: str, *, correct: bool, shares: bool = False
) -> dict[str, str] | None:
    """The count or share, colour and tooltip of a cell; None if it is empty."""
    if not count:
        return None
    share = count / total
    shown = f"{100 * share:.0f}" if shares else short(count)
    return {
        "css": f"{'right' if correct else 'wrong'} q{max(1, round(10 * share))}", "count": shown,
        "title": f"{clipped(row, 40)} → {clipped(column, 40)}: {short(count)} ({share:.1%})",
    }  # fmt: skip
