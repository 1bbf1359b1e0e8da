"""Sections of a report on segmentation or detection: tables, confusion, curves, predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.report.charts import charts, line_chart
from vitkit.report.confusion import NAMED, Matrix, confusion_matrix
from vitkit.report.detection_tables import NOTHING
from vitkit.report.html import clipped, details, element, joined, name, note, picture
from vitkit.report.task_table import TaskTable

CONFUSIONS = "Most frequent confusions"  # the table that stands below the matrix
SEEN = 6  # examples of a group before the others are collapsed


def dense_sections(
    task: Mapping[str, Any], test: Mapping[str, Any], samples: Mapping[str, Any]
) -> dict[str, Markup]:
    """The sections by title; none for a task without tables of its own."""
    if not task.get("tables"):
        return {}
    tables = {one["title"]: TaskTable.from_json(one).markup() for one in task["tables"]}
    confused = tables.pop(CONFUSIONS, Markup())
    labels = legend_of(samples.get("legend") or ())
    sections = {"Classes": tables.pop("Classes", Markup())}
    for group in samples.get("groups") or ():
        sections[group["title"]] = examples(group, labels)
    sections["Confusion matrix"] = confusion_section(test, str(task.get("counted")), confused)
    sections["Precision and recall"] = precision_section(samples.get("curves") or {})
    return sections | tables


def examples(group: Mapping[str, Any], labels: Markup) -> Markup:
    """Pictures of the truth beside those of the prediction."""
    items = []
    for one in group["images"]:
        key = clipped(str(one["key"]), 80)
        pair = picture(one["truth"], "image/jpeg", f"{key}: annotation")
        pair += picture(one["predicted"], "image/jpeg", f"{key}: prediction")
        body = element("div", pair, class_="pair wider") + element("div", one["caption"])
        items.append(element("li", body + element("div", name(one["key"], NAMED), class_="file")))
    if not items:
        return Markup()
    body = note(group["lead"]) + labels + element("ul", joined(items[:SEEN]), class_="pictures pairs")
    if rest := items[SEEN:]:
        body += details(f"{len(rest)} more", element("ul", joined(rest), class_="pictures pairs"))
    return body


def legend_of(entries: Sequence[Sequence[str]]) -> Markup:
    """The classes with their colours in the pictures."""
    items = []
    for label, colour in entries:
        square = element("rect", class_="swatch", width=12, height=12, rx=2, fill=colour)
        sample = element("svg", square, class_="patch", viewBox="0 0 12 12", aria_hidden="true")
        items.append(element("li", sample + name(label, 60)))
    return element("ul", joined(items), class_="legend") if items else Markup()


def confusion_section(test: Mapping[str, Any], counted: str, confused: Markup) -> Markup:
    """The matrix as shares of each true class, and the most frequent confusions."""
    matrix: Matrix | None = test.get("confusion")
    if not matrix:
        return Markup()
    names = list(test["per_class"])
    lead = f"Rows are the true class, columns the predicted class, in per cent of the class's {counted}."
    if len(matrix) > len(names):
        names.append(NOTHING)
        lead = (
            "Rows are the true class, columns the detected class, in number of objects. The row "
            f"“{NOTHING}” has false detections, the column missed objects. Detections have a score of at "
            f"least {test['threshold']:.2f}, from which on the F1 over all classes is best "
            f"({test['f1']:.3f}), and an IoU of at least 0.5."
        )
    used = [k for k, row in enumerate(matrix) if any(row) or any(other[k] for other in matrix)]
    part = [[matrix[i][j] for j in used] for i in used]
    drawn = confusion_matrix(part, [names[k] for k in used], shares=len(matrix) == len(test["per_class"]))
    body = note(f"{lead} Blue is correct, orange is wrong.") + drawn
    return body + (element("h3", CONFUSIONS) + confused if confused else Markup())


def precision_section(curves: Mapping[str, Sequence[Sequence[float]]]) -> Markup:
    """A curve for each class."""
    lines = {label: [(x, y) for x, y in points] for label, points in curves.items() if points}
    if not lines:
        return Markup()
    lead = (
        "Precision by recall at an IoU of 0.5: as more detections are taken, from the highest score down, "
        "more objects are detected, and more detections are false."
    )
    if len(curves) > len(lines):
        lead += f" {len(curves) - len(lines)} classes without a right detection have no curve."
    chart = line_chart(lines, x_label="recall", y_label="precision", percent=True, percent_x=True)
    return note(lead) + charts(chart)
