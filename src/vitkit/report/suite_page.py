"""The HTML report of a suite: the mean of each group, and all tasks."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from vitkit.metrics.intervals import percent, span, wilson
from vitkit.report.charts import bar
from vitkit.report.html import Number, fill, fixed_percent, link, name, page, table
from vitkit.report.literature import PUBLISHED, suite_section

ENOUGH = 10_000  # images assumed for a mean if an older version did not store their number


def suite_page(suite: Mapping[str, Any], title: str, links: Mapping[str, str]) -> str:
    """`links`: by task, the URL of its report, if there is one."""
    means = [
        {"group": group, "mean accuracy": mean_percent(row), "95 % interval": mean_span(row),
         " ": bar(row["mean"] or 0.0),
         "tasks": f"{row['tasks']} of {row['of']}", "complete": bool(row["complete"])}
        for group, row in suite["means"].items()
    ]  # fmt: skip
    rows = [task_row(row, links) for row in suite["tasks"]]
    sections = {
        "Groups": table(means),
        "Tasks": fill("suite.html", "tasks", rows, [row["task"] for row in suite["missing"]]),
        "Settings": settings_table(suite),
        PUBLISHED: suite_section(suite),
    }
    return page(title, header(suite, title), sections)


def header(suite: Mapping[str, Any], title: str) -> Markup:
    """The mean of the last group, which contains all tasks, and how the settings were chosen."""
    last = list(suite["means"])[-1] if suite["means"] else ""
    total = suite["means"].get(last) or {"mean": None, "tasks": 0, "of": 0}
    small = f"mean accuracy of {total['tasks']} of {total['of']} tasks ({last})"
    small += f"; 95 % interval {mean_span(total)}" if total.get("interval") else ""
    values = title, mean_percent(total), small, suite["model"], setting_text(suite), suite.get("waiting")
    return fill("suite.html", "header", *values)


def mean_percent(row: Mapping[str, Any]) -> Number:
    return Number(percent(row["mean"], row.get("images") or ENOUGH))


def mean_span(row: Mapping[str, Any]) -> Number:
    return Number(span(row["interval"], row.get("images") or ENOUGH) if row.get("interval") else "–")


def setting_text(suite: Mapping[str, Any]) -> str:
    """How the setting of the final runs was chosen."""
    if shared := suite.get("setting"):
        reason = f"the best of {len(shared['means'])} by mean validation accuracy over all tasks"
        return f"The same setting for every task: {setting_name(shared['chosen'])}, {reason}."
    rates = {row.get("rate") for row in suite["tasks"]}
    if any(len(row.get("tried") or ()) > 1 for row in suite["tasks"]) or len(rates) > 1:
        return "Each task has its own setting, chosen on its validation images."
    return "The same setting for every task, without a search."


def setting_name(key: str) -> str:
    """The readable name of a setting: rate-0.01-steps-2500 becomes "rate 0.01, steps 2500"."""
    if key == "bit":
        return "BiT's HyperRule"
    return key.replace("-steps-", ", steps\u00a0").replace("rate-", "rate\u00a0")


def settings_table(suite: Mapping[str, Any]) -> Markup:
    """For each task, the chosen setting and the validation accuracy of every candidate."""
    tasks = [row for row in suite["tasks"] if row.get("tried")]
    if not tasks:
        return Markup()
    keys = list(dict.fromkeys(key for row in tasks for key in row["tried"]))
    rows = []
    for row in tasks:
        scores = {setting_name(key): fixed_percent(row["tried"].get(key), 1) for key in keys}
        rows.append({"task": name(row["task"], 80), "chosen": setting_name(row["chosen"])} | scores)
    shared = suite.get("setting")
    if shared:
        means = {setting_name(key): fixed_percent(shared["means"].get(key), 1) for key in keys}
        rows.append({"task": "mean", "chosen": setting_name(shared["chosen"])} | means)
    return fill("suite.html", "settings", rows, [False] * len(tasks) + [True] * bool(shared))


def task_row(row: Mapping[str, Any], links: Mapping[str, str]) -> dict[str, Any]:
    notes = [
        row.get("differs") or "",
        "" if row.get("complete", True) else "files differ from the published ones",
    ]
    return {
        "task": link(links.get(row["task"]), name(row["task"], 80)),
        "group": row["group"],
        "accuracy": Number(percent(row["top1"], row["images"])),
        "95 % interval": Number(span(wilson(row["top1"], row["images"]), row["images"])),
        "std over seeds": Number(percent(row.get("std"), row["images"])),
        " ": bar(row["top1"]),
        "seeds": len(row.get("seeds") or ()),
        "chosen": setting_name(row.get("chosen") or f"rate-{row.get('rate') or 0:g}"),
        "images": row["images"],
        "note": "; ".join(filter(None, notes)),
    }
