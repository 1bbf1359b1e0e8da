"""The curves of one run, and those of several laid over each other, out of rows of numbers by step."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.report.charts import Area, Point, averaged, line_chart
from vitkit.report.html import Markup, note

Row = Mapping[str, Any]
VAL = "validation"
SHOWN = ("loss", "top1", "accuracy")  # metrics that have a chart anyway
FEW = 12  # points of a line that are marked


def points(rows: Sequence[Row], *keys: str) -> list[Point]:
    """(step, number) of the rows that have one of these."""
    found = ((row["step"], next((row[k] for k in keys if k in row), None)) for row in rows)
    return [(float(step), float(value)) for step, value in found if isinstance(value, int | float)]


def speed(rows: Sequence[Row]) -> list[Point]:
    """(step, images a second)."""
    told = [row for row in rows if row.get("images") and row.get("seconds")]
    return [(float(row["step"]), row["images"] / row["seconds"]) for row in told]


def chart(
    series: Mapping[str, Sequence[Point]], y_label: str, *, percent: bool = False, noisy: bool = True
) -> str:
    """Over steps; a noisy line of many points is averaged, in a band of what it spans. Nothing for none."""
    lines: dict[str, Sequence[Point]] = {}
    bands: dict[str, Sequence[Area]] = {}
    for key, of in series.items():
        if of:
            lines[key], bands[key] = averaged(of) if noisy else (of, ())
    few = all(len(of) <= FEW for of in lines.values())
    told = line_chart(lines, x_label="step", y_label=y_label, bands=bands, points=few, percent=percent)
    return told if lines else ""


def run_curves(rows: Sequence[Row], metric: Mapping[str, Any]) -> Markup:
    """Loss, accuracy, learning rate and speed of a run; few-shot accuracy where it was measured.

    metric: that of the run's task, which is drawn too where it is another.
    """
    key = str(metric["key"])
    own = {"train": points(rows, key), VAL: points(rows, f"val_{key}")} if key not in SHOWN else {}
    accuracies = {"train": points(rows, "accuracy"), VAL: points(rows, "val_top1", "val_accuracy")}
    return charts(
        chart({"train": points(rows, "loss"), VAL: points(rows, "val_loss")}, "loss"),
        chart(accuracies, "accuracy", percent=True),
        chart(own, str(metric["label"]), percent=bool(metric["percent"])),
        chart({"few-shot": points(rows, "fewshot_mean")}, "few-shot accuracy", percent=True),
        chart({"rate": points(rows, "rate")}, "learning rate", noisy=False),
        chart({"speed": speed(rows)}, "images a second"),
    )


def overlaid(runs: Mapping[str, Sequence[Row]]) -> Markup:
    """The curves of several runs, each in one colour."""

    def of(*keys: str) -> dict[str, list[Point]]:
        return {name: points(rows, *keys) for name, rows in runs.items()}

    return charts(
        chart(of("loss"), "loss on train"),
        chart(of("val_loss"), "loss on validation"),
        chart(of("accuracy"), "accuracy on train", percent=True),
        chart(of("val_top1", "val_accuracy"), "accuracy on validation", percent=True),
        chart(of("rate"), "learning rate", noisy=False),
        chart({name: speed(rows) for name, rows in runs.items()}, "images a second"),
    )


def charts(*drawn: str) -> Markup:
    there = "".join(drawn)
    if not there:
        return note("No step has been written down yet.")
    return Markup(f'<div class="charts">{there}</div>\n')
