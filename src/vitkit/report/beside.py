"""Published numbers beside one's own, as parts of a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.proportions import decimals
from vitkit.report import literature
from vitkit.report.html import Markup, Number, details, element, note, table

TITLE = "Published numbers"
SOURCE = f"Published, not measured here. Source: {literature.PAPER}."


def number(value: float | None, std: float | None = None, digits: int = 2) -> Number:
    if value is None:
        return Number("–")
    return Number(f"{value:.{digits}f}" + ("" if std is None else f" ± {std:.2f}"))


def task_section(
    task: str | None, name: str, top1: float | None, std: float | None, images: int | None
) -> str:
    """What is published of a task, with this run's accuracy in the first row; nothing if nothing is."""
    if task is None or top1 is None:
        return ""
    digits = 2 if images is None else decimals(images)
    mine = {"model": name, "pre-trained on": "", "top-1, %": number(100 * top1, std and 100 * std, digits),
            "source": "this page"}  # fmt: skip
    rows = [{"model": one.model, "pre-trained on": one.pretrained, "top-1, %": number(one.value, one.std),
             "source": one.source} for one in literature.scores(task)]  # fmt: skip
    first = [row for row in rows if row["source"] in ("Table 2", "Table 9")]
    rest = [row for row in rows if row not in first]
    told = note(f"{task.removeprefix('vtab:')}: {SOURCE}") + table([mine, *first], marked=[True])
    expected = literature.TEST_IMAGES.get(task)
    if expected is not None and images is not None and expected != images:
        told += note(f"The published accuracies are of {expected:,} test images, this one is of {images:,}.")
    return Markup(told + (details("Tables 5 and 6, at 384 pixels", table(rest)) if rest else ""))


def run_section(found: Mapping[str, Any]) -> str:
    """Of a run: the task by its recipe and data."""
    test, recipe = (found["result"] or {}).get("test") or {}, found["recipe"]
    images = test.get("images")
    task = literature.task_of(recipe.get("data") or "", recipe.get("name") or "", images)
    usable = test.get("split") != "val" and "mean_average_precision" not in test
    return task_section(task, found["name"], test.get("top1") if usable else None, None, images)


def suite_sections(suite: Mapping[str, Any]) -> str:
    """Table 9 task by task, and the means of Fig. 2; nothing for a suite of one's own data alone."""
    mine = {row["task"]: row for row in suite["tasks"] if row["task"] in literature.TABLE_9}
    if not mine:
        return ""
    heads = [f"{model}, {data}" for model, data in literature.MODELS_9]
    rows = [
        {"task": task, "here, %": number(100 * row["top1"], digits=decimals(row["images"]))}
        | {head: number(v, digits=1) for head, v in zip(heads, literature.TABLE_9[task], strict=True)}
        for task, row in mine.items()
    ]  # fmt: skip
    own: dict[str, Any] = {"model": suite["model"], "pre-trained on": ""}
    for group in literature.GROUPS:
        facts = suite["means"].get(group) or {"mean": None, "complete": True}
        value = None if facts["mean"] is None else 100 * facts["mean"]
        own[group] = Number(number(value) + ("" if facts["complete"] or value is None else " *"))
    means = [own | {"source": "this page"}]
    for model, data, values, source in literature.FIG_2:
        cells = (Number("–" if value is None else str(value)) for value in values)
        line = dict(zip(literature.GROUPS, cells, strict=True))
        means.append({"model": model, "pre-trained on": data} | line | {"source": source})
    partly = any(not one["complete"] for one in suite["means"].values())
    stars = note("* not of all tasks or not of all files: not comparable.") if partly else ""
    return Markup(
        note(SOURCE) + element("h3", "Means (Fig. 2)") + table(means, marked=[True]) + stars
        + element("h3", "Tasks (Table 9)") + table(rows)
    )  # fmt: skip


def study_sections(names: Sequence[str]) -> str:
    """The tables of the paper that a study is about."""
    told = ""
    for one in map(literature.sheet, names):
        told += element("h3", one.title) + note(
            f"Published, not measured here. Source: {one.source}. {one.note}"
        )
        told += table({k: number(v) if isinstance(v, float) else v for k, v in row.items()}
                      for row in one.rows) if one.rows else ""  # fmt: skip
    return Markup(told)
