"""The curves of one run over its steps: loss, metrics, learning rate and speed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.report.charts import VAL, Row, charts, curve, points, speed

STEP = ("step", "rate", "images", "seconds", "waited", "gradient_norm", "std", "rank")  # or drawn
EXTRA = 6  # charts of a task's own metrics
DRAWN = ("loss", "top1", "accuracy")  # metrics that always have a chart


def run_curves(rows: Sequence[Row], metric: Mapping[str, Any], more: Sequence[str] = ()) -> Markup:
    """Loss, accuracy, learning rate, throughput and, if measured, few-shot accuracy of a run.

    metric: that of the run's task, with a chart of its own if it is none of these; more: others of the task.
    """
    key = str(metric["key"])
    task_metric = {"train": points(rows, key), VAL: points(rows, f"val_{key}")} if key not in DRAWN else {}
    accuracies = {"train": points(rows, "accuracy"), VAL: points(rows, "val_top1", "val_accuracy")}
    return charts(
        curve({"train": points(rows, "loss"), VAL: points(rows, "val_loss")}, "loss"),
        curve(accuracies, "accuracy", percent=True),
        curve(task_metric, str(metric["label"]), percent=bool(metric["percent"])),
        of_evaluations(rows, [name for name in more if name != key], percent=bool(metric["percent"])),
        curve({"few-shot": points(rows, "fewshot_mean")}, "few-shot accuracy", percent=True),
        curve({"k-NN": points(rows, "knn")}, "k-NN accuracy", percent=True),
        curve({"train": points(rows, "std"), VAL: points(rows, "val_std")}, "feature std"),
        curve({"train": points(rows, "rank"), VAL: points(rows, "val_rank")}, "effective rank"),
        curve({"rate": points(rows, "rate")}, "learning rate", noisy=False),
        curve({"speed": speed(rows)}, "images per second"),
        *(curve({"train": points(rows, name)}, name) for name in of_task(rows, key)),
    )


def of_evaluations(rows: Sequence[Row], names: Sequence[str], *, percent: bool) -> Markup:
    """Further metrics of the validation images; empty without any."""
    series = {label_of(name): points(rows, f"val_{name}") for name in names}
    return curve(series, " and ".join(series), percent=percent)


def label_of(name: str) -> str:
    return name.upper() if re.fullmatch(r"ap\d*", name) else name.replace("_", " ")


def of_task(rows: Sequence[Row], key: str) -> list[str]:
    """The names of further metrics of training steps, such as the entropy of a teacher's outputs."""
    steps = (row for row in rows if "gradient_norm" in row)
    names = {name for row in steps for name, value in row.items() if isinstance(value, int | float)}
    return sorted(names - {*STEP, *DRAWN, key})[:EXTRA]
