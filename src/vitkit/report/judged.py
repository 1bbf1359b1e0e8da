"""How a model did, class by class and picture by picture: tables, confusions, calibration, mistakes."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.proportions import percent as share_of
from vitkit.proportions import span, wilson
from vitkit.report.charts import line_chart
from vitkit.report.heat import bar, heat_map
from vitkit.report.html import Markup, Number, clipped, details, image, name, note, percent, table

FIRST, ROWS, OFTEN = 20, 1000, 12  # rows of a table at first, unfolded, and beside a matrix
SEEN = 12  # mistakes at first
ENOUGH = 5  # images of which a share says something
SHOWN = 30  # classes up to which the whole matrix is drawn
NAMED = 120  # letters of a name in a long table
Pair = tuple[str, str, int, int]  # truth, said, how often, images of that truth


def class_tables(per_class: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The worst classes, and behind a click all of them in their order."""
    key = next((k for row in per_class.values() for k in row if k != "images"), "accuracy")
    counted = [(label, row[key], row["images"]) for label, row in per_class.items()]
    known = [one for one in counted if one[1] is not None]
    worst = sorted(known, key=lambda one: (one[1], one[0]))[:FIRST]
    lead = (
        f"The {len(worst)} worst of {len(counted):,} classes" if len(counted) > FIRST else "The worst first"
    )
    without = len(counted) - len(known)
    lead += f"; {without:,} have no image here and are not judged." if without else "."
    told = note(lead) + class_table(worst, key)
    if len(counted) > 1:
        more = f", the first {ROWS:,} of them" if len(counted) > ROWS else ""
        told += details(f"All {len(counted):,} classes in order{more}", class_table(counted[:ROWS], key))
    return Markup(told)


def class_table(rows: Sequence[tuple[str, float | None, int]], key: str) -> str:
    """A share of images has its 95 % interval; an average precision is none."""

    def line(label: str, share: float | None, images: int) -> dict[str, Any]:
        ends = {} if key != "accuracy" else {
            "95 % interval": Number("–" if share is None else span(wilson(share, images), images))
        }  # fmt: skip
        found = {"class": name(label, NAMED), key: Number(share_of(share, images)), **ends}
        return found | {" ": bar(share or 0.0), "images": images}

    return table(line(*row) for row in rows)


def pairs_of(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> list[Pair]:
    """What is taken for what, the most frequent first."""
    found = [(count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if count and i != j]
    found.sort(key=lambda one: (-one[0], one[1:]))
    return [(names[i], names[j], count, sum(matrix[i])) for count, i, j in found[:ROWS]]


def confusions(
    matrix: Sequence[Sequence[int]] | None, names: Sequence[str], pairs: Sequence[Pair] | None
) -> Markup:
    """The matrix where it can be looked at as a whole, and the most frequent mistakes."""
    if pairs is None and matrix is not None:
        pairs = pairs_of(matrix, names)
    whole = matrix is not None and len(names) <= SHOWN
    lead = "Rows are what is, columns what was said. Blue is right, orange is wrong."
    if not whole:
        lead = f"With {len(names):,} classes the matrix is too large to look at: its largest mistakes."
    drawn = heat_map(matrix, names, names) if matrix is not None and whole else ""
    rows = [
        {"truth": name(truth, NAMED), "said": name(said, NAMED), "times": times,
         "of_images": images, "share": Number(share_of(times / images if images else None, images))}
        for truth, said, times, images in (pairs or ())[: OFTEN if whole else FIRST]
    ]  # fmt: skip
    often = f"<div><h3>Most often confused</h3>\n{table(rows)}</div>" if rows else ""
    if not rows and pairs is not None:
        often = note("No class was taken for another.")
    return Markup(f'{note(lead)}<div class="beside">{drawn}{often}</div>' if drawn or often else "")


def calibration(bins: Sequence[Sequence[float]], error: float | None) -> Markup:
    """How often it is right when it is so sure: bins of (mean confidence, share right, images)."""
    off = "" if error is None else f"Expected calibration error {percent(error)}."
    found = [(b[0], b[1]) for b in bins if b[2] >= ENOUGH]
    if not found:
        return note(off) if off else Markup("")
    lead = note(f"{off} Of the images of which it is 80 % sure, a model should have 80 % right. "
                f"A point stands for {ENOUGH} images or more.")  # fmt: skip
    series = {"this model": found, "as it should be": [(0.0, 0.0), (1.0, 1.0)]}
    drawn = line_chart(series, x_label="confidence", y_label="share that is right", points=True, percent=True)
    return Markup(f'{lead}<div class="charts calibration">{drawn}</div>')


def pictures(mistakes: Sequence[Mapping[str, Any]]) -> Markup:
    """Images that were taken for something else, each with what the model attended to if that is known."""
    told = []
    for one in mistakes:
        alt = f"{clipped(str(one['key']), 80)}: is {clipped(one['truth'], 40)}"
        shown = [(one.get("image"), alt), (one.get("overlay"), f"attention over {alt}")]
        both = "".join(image(base64.b64decode(data), "image/jpeg", words) for data, words in shown if data)
        said = f"{name(one['said'], NAMED)} <b>{percent(one['confidence'], 1)}</b>"
        told.append(
            f'<li><div class="pair">{both}</div>said {said}<br>is {name(one["truth"], NAMED)}'
            f'<div class="file">{name(one["key"], NAMED)}</div></li>\n'
        )
    return Markup(f'<ul class="pictures">{"".join(told)}</ul>\n')


def mistake_section(found: Mapping[str, Any]) -> Markup:
    """The mistakes of which a model was most sure, and those of which it was least."""
    total, worst, unsure = found["wrong"], found["worst"], found["unsure"]
    if not total:
        return note("There are none.")
    told = f"{total:,} of {found['images']:,} images are taken for something else."
    if any(one.get("overlay") for one in worst):
        told += " Beside each image: the parts of it that reach the output through attention, brightest most."
    body = note(told) + f"<h3>Most sure, and wrong</h3>\n{pictures(worst[:SEEN])}"
    if worst[SEEN:]:
        body += details(f"{len(worst) - SEEN} more of them", pictures(worst[SEEN:]))
    if unsure:
        body += details("Least sure, and wrong", pictures(unsure))
    return Markup(body)
