"""The tables of segmentation metrics: classes, and confusions between them."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.metrics.intervals import percent
from vitkit.report.task_table import Kind, TaskTable

CONFUSED = 12  # pairs of classes
PIXELS = 1000  # an image has more, but shares are printed with one decimal


def segmentation_tables(test: Mapping[str, Any]) -> tuple[TaskTable, ...]:
    """Tables of the stored metrics."""
    rows = confused_pairs(test.get("confusion"), list(test["per_class"]))
    columns: dict[str, Kind] = {
        "true class": "name",
        "predicted class": "name",
        "pixels": "count",
        "share of class": "percent",
    }
    confused = TaskTable(title="Most frequent confusions", columns=columns, rows=rows)
    return (class_table(test), confused) if rows else (class_table(test),)


def class_table(test: Mapping[str, Any]) -> TaskTable:
    total = sum(row["pixels"] for row in test["per_class"].values()) or 1
    rows = [
        {"class": label, "IoU": row["iou"], "accuracy": row["accuracy"], "Dice": row["dice"],
         "pixels": row["pixels"], "share": row["pixels"] / total, "images": row["images"]}
        for label, row in test["per_class"].items()
    ]  # fmt: skip
    known = sorted((row for row in rows if row["IoU"] is not None), key=lambda row: row["IoU"])
    note = "Worst classes first. Accuracy is the share of the class's pixels that are correct."
    if test.get("ignored"):
        note += f" {percent(test['ignored'], PIXELS)} of all pixels have no class and do not count."
    return TaskTable(
        title="Classes", rows=known + [row for row in rows if row["IoU"] is None], bar="IoU", note=note,
        columns={"class": "name", "IoU": "percent", "accuracy": "percent", "Dice": "percent",
                 "pixels": "count", "share": "percent", "images": "count"},
    )  # fmt: skip


def confused_pairs(confusion: Sequence[Sequence[int]] | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """The pixels of a class that are predicted as another class, the most first."""
    pairs: list[dict[str, Any]] = [
        {"true class": names[truth], "predicted class": names[predicted], "pixels": pixels,
         "share of class": pixels / sum(row)}
        for truth, row in enumerate(confusion or ())
        for predicted, pixels in enumerate(row)
        if pixels and predicted != truth
    ]  # fmt: skip
    return sorted(pairs, key=lambda pair: -pair["pixels"])[:CONFUSED]
