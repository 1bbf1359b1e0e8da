"""How a model did, class by class and picture by picture: tables, confusions, calibration, mistakes."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.proportions import percent as share_of
from vitkit.proportions import span, wilson
from vitkit.report.charts import line_chart
from vitkit.report.heat import bar, confusion_matrix
from vitkit.report.html import Markup, Number, clipped, details, image, name, note, percent, table, text

FIRST, ROWS, OFTEN = 20, 1000, 12  # rows of a table at first, unfolded, and beside a matrix
SEEN = 12  # mistakes at first
ENOUGH = 5  # images of which a share says something
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
    """The matrix, or the part of it that is confused most, and the most frequent mistakes."""
    if pairs is None and matrix is not None:
        pairs = pairs_of(matrix, names)
    drawn = confusion_matrix(matrix, names) if matrix is not None else ""
    lead = "Rows are what an image is, columns what the model said. Blue is right, orange is wrong."
    rows = [
        {"truth": name(truth, NAMED), "said": name(said, NAMED), "images": Number(f"{times:,} of {images:,}"),
         "share": Number(share_of(times / images if images else None, images))}
        for truth, said, times, images in (pairs or ())[: OFTEN if drawn else FIRST]
    ]  # fmt: skip
    often = f"<h3>Most often confused</h3>\n{table(rows)}" if rows else ""
    if not rows and pairs is not None:
        often = note("No class was taken for another.")
    return Markup(f"{note(lead) if drawn else ''}{drawn}{often}")


def calibration(bins: Sequence[Sequence[float]], error: float | None) -> Markup:
    """How often it is right when it is so sure: bins of (mean confidence, share right, images)."""
    off = "" if error is None else f"Expected calibration error {percent(error)}."
    found = [(b[0], b[1]) for b in bins if b[2] >= ENOUGH]
    if not found:
        return note(off) if off else Markup("")
    drawn = line_chart(
        {"this model": found}, x_label="confidence", y_label="share that is right", points=True,
        percent=True, ideal={"ideal": [(0.0, 0.0), (1.0, 1.0)]},
    )  # fmt: skip
    lead = note(f"{off} Of the images of which it is 80 % sure, a model should have 80 % right: the dashed "
                f"line. A point stands for {ENOUGH} images or more.")  # fmt: skip
    return Markup(f'{lead}<div class="charts">{drawn}<div></div></div>')  # as wide as the other charts


def pictures(shown: Sequence[Mapping[str, Any]]) -> Markup:
    """Images with what was said of them, each with what the model attended to if that is known."""
    told = []
    for one in shown:
        alt = f"{clipped(str(one['key']), 80)}: is {clipped(one['truth'], 40)}"
        both = [(one.get("image"), alt), (one.get("overlay"), f"attention over {alt}")]
        drawn = "".join(image(base64.b64decode(data), "image/jpeg", words) for data, words in both if data)
        said = f"<b>{name(one['said'], NAMED)} {percent(one['confidence'], 1)}</b>"
        right = one["said"] == one["truth"]
        truth = "right" if right else f"is {name(one['truth'], NAMED)}"
        told.append(
            f'<li><div class="pair">{drawn}</div>said {said}<br>'
            f'<span class="{"right" if right else "wrong"}-word">{truth}</span>'
            f'<div class="file">{name(one["key"], NAMED)}</div></li>\n'
        )
    return Markup(f'<ul class="pictures">{"".join(told)}</ul>\n')


def mistake_section(found: Mapping[str, Any], table_at: str | None = None) -> Markup:
    """The mistakes of which a model was most sure; `table_at`: the address of a file with all of them."""
    total, worst = found["wrong"], found["worst"]
    if not total:
        return note("There are none.")
    told: str = text(f"{total:,} of {found['images']:,} images are taken for something else.")
    if table_at:
        told += f' All of them as a table: <a href="{text(table_at)}">mistakes.csv</a>.'
    if any(one.get("overlay") for one in worst):
        told += " Beside each image: the parts of it that reach the output through attention, brightest most."
    body = note(Markup(told)) + f"<h3>Most sure, and wrong</h3>\n{pictures(worst[:SEEN])}"
    if worst[SEEN:]:
        body += details(f"{len(worst) - SEEN} more of them", pictures(worst[SEEN:]))
    if found.get("unsure"):  # runs from before the least confident images were kept
        body += details("Least sure, and wrong", pictures(found["unsure"]))
    return Markup(body)


def unsure_section(shown: Sequence[Mapping[str, Any]]) -> Markup:
    """The images of which a model was least sure, right or wrong."""
    if not shown:
        return Markup("")
    lead = "Those that the model is least sure of, right or wrong, besides the ones above. Odd, unclear or "
    return Markup(note(f"{lead}wrongly labelled images often are among them.") + pictures(shown))


def batch_section(batch: Mapping[str, Any]) -> Markup:
    """Images of the first training batch, cropped and augmented, with what they are labelled."""
    told = []
    for one in batch["images"]:
        labels = [label_words(label, share) for label, share in one["labels"]]
        alt = f"training image labelled {', '.join(clipped(str(label), 40) for label, _ in one['labels'])}"
        drawn = image(base64.b64decode(one["image"]), "image/jpeg", alt)
        told.append(f"<li>{drawn}<div>{', '.join(labels)}</div></li>\n")
    lead = f"The first {len(told)} of {batch['of']:,} images of step {batch['step'] + 1:,}, as the model "
    lead += f"sees them: {batch['how']}."
    return Markup(f'{note(lead)}<ul class="pictures batch">{"".join(told)}</ul>\n')


def label_words(label: str, share: float) -> str:
    return name(label, NAMED) + ("" if share >= 0.995 else f"\u00a0{100 * share:.0f}\u00a0%")
