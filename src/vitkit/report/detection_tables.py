"""The tables of a detector's metrics: classes, sizes of objects, kinds of errors, confusions."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.report.task_table import Kind, TaskTable

NOTHING = "no object"  # the row of false detections, the column of missed objects
CONFUSED = 12  # pairs of classes
SIZES = {"small": "up to 32 x 32 pixels", "medium": "to 96 x 96 pixels", "large": "larger"}
ERRORS = {  # kinds as metrics/detection_errors.py names them
    "class": "an object of another class is there",
    "location": "overlaps an object of this class too little (IoU 0.1 to 0.5)",
    "both": "overlaps an object of another class too little",
    "duplicate": "the object has a detection with a higher score",
    "background": "there is no object",
    "missed": "an object without any detection",
}


def detection_tables(test: Mapping[str, Any]) -> tuple[TaskTable, ...]:
    """Tables of the stored metrics."""
    tables = [class_table(test), size_table(test)]
    if test.get("errors"):
        tables.append(error_table(test["errors"]))
    if pairs := confused_pairs(test.get("confusion"), list(test["per_class"])):
        note = f"Detections with a score of at least {test['threshold']:.2f} at an IoU of 0.5."
        columns: dict[str, Kind] = {"true class": "name", "detected class": "name", "objects": "count"}
        tables.append(TaskTable(title="Most frequent confusions", columns=columns, rows=pairs, note=note))
    return tuple(tables)


def class_table(test: Mapping[str, Any]) -> TaskTable:
    rows = [
        {"class": label, "AP": row["ap"], "AP50": row["ap50"], "objects": row["objects"],
         "images": row["images"], "best F1": row["f1"], "at score": row["threshold"]}
        for label, row in test["per_class"].items()
    ]  # fmt: skip
    known = sorted((row for row in rows if row["AP"] is not None), key=lambda row: row["AP"])
    note = (
        "Worst classes first. AP is the mean over IoU thresholds from 0.5 to 0.95. Best F1 "
        "is at an IoU of 0.5, with the detections of at least the score beside it."
    )
    if test.get("ignored"):
        note += f" {test['ignored']:,} objects are crowds or marked as difficult and do not count."
    return TaskTable(
        title="Classes", rows=known + [row for row in rows if row["AP"] is None], bar="AP", note=note,
        columns={"class": "name", "AP": "score", "AP50": "score", "objects": "count", "images": "count",
                 "best F1": "score", "at score": "score"},
    )  # fmt: skip


def size_table(test: Mapping[str, Any]) -> TaskTable:
    rows = [{"objects": "all", "AP": test["ap"], "recall": test["ar_100"]}]
    rows += [
        {"objects": f"{size}, {pixels}", "AP": test[f"ap_{size}"], "recall": test[f"ar_{size}"]}
        for size, pixels in SIZES.items()
    ]
    note = "Recall is the mean over the same thresholds, with at most 100 detections of a class in an image."
    columns: dict[str, Kind] = {"objects": "text", "AP": "score", "recall": "score"}
    return TaskTable(title="Sizes of objects", columns=columns, rows=rows, bar="AP", note=note)


def error_table(errors: Mapping[str, Any]) -> TaskTable:
    rows = [
        {
            "error": kind,
            "meaning": ERRORS.get(kind, ""),
            "count": row["count"],
            "costs AP50": row["importance"],
        }
        for kind, row in errors["kinds"].items()
    ]
    rows.sort(key=lambda row: -row["costs AP50"])
    note = (
        f"How much AP50 would rise if one kind of error were corrected; these do not add up. Without any "
        f"false detection it would rise by {errors['false_positives']:.3f}, without any missed object by "
        f"{errors['false_negatives']:.3f}. Detections of any score count."
    )
    columns: dict[str, Kind] = {"error": "text", "meaning": "text", "count": "count", "costs AP50": "score"}
    return TaskTable(title="Kinds of errors", columns=columns, rows=rows, bar="costs AP50", note=note)


def confused_pairs(confusion: Sequence[Sequence[int]] | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """Objects detected as another class, missed, or detected where there are none, most frequent first."""
    labels = [*names, NOTHING]
    pairs: list[dict[str, Any]] = [
        {"true class": labels[truth], "detected class": labels[detected], "objects": count}
        for truth, row in enumerate(confusion or ())
        for detected, count in enumerate(row)
        if count and truth != detected
    ]
    return sorted(pairs, key=lambda pair: -pair["objects"])[:CONFUSED]
