"""A suite of tasks: the mean of each group, and a row for each task."""

from collections.abc import Mapping
from typing import Any

from vitkit.report.heat import bar
from vitkit.report.html import Markup, contents, name, note, page, percent, section, table, text


def suite_page(suite: Mapping[str, Any], title: str, links: Mapping[str, str]) -> str:
    """`links`: by task, its own report where that lies below this page."""
    last = list(suite["means"])[-1] if suite["means"] else ""
    whole = suite["means"].get(last) or {"mean": None, "tasks": 0, "of": 0}
    small = f"mean accuracy of {whole['tasks']} of {whole['of']} tasks ({last})"
    head = f"<h1>{name(title)}</h1>\n"
    head += f'<p class="headline">{percent(whole["mean"])} <small>{text(small)}</small></p>\n'
    head += f"<p>One setting for every task, from {name(suite['model'])}.</p>\n"
    if suite.get("waiting"):
        head += f'<p class="status">Not finished: {suite["waiting"]} tasks are still to be done.</p>\n'
    means = [
        {"group": group, "mean accuracy": percent(row["mean"]), " ": bar(row["mean"] or 0.0),
         "tasks": f"{row['tasks']} of {row['of']}", "complete": bool(row["complete"])}
        for group, row in suite["means"].items()
    ]  # fmt: skip
    sections = {"Groups": table(means), "Tasks": table(task_row(row, links) for row in suite["tasks"])}
    if suite["missing"]:
        absent = ", ".join(row["task"] for row in suite["missing"])
        sections["Tasks"] = Markup(
            sections["Tasks"] + note(f"Without data, and so not in any mean: {absent}.")
        )
    ids = {f"part-{i}": heading for i, heading in enumerate(sections)}
    body = f"<header>\n{head}</header>\n{contents(ids)}"
    return page(title, body + "".join(section(heading, sections[heading], id) for id, heading in ids.items()))


def task_row(row: Mapping[str, Any], links: Mapping[str, str]) -> dict[str, Any]:
    label = name(row["task"], 80)
    notes = [row.get("differs") or "", "" if row.get("complete", True) else "other files than published"]
    return {
        "task": Markup(f'<a href="{text(links[row["task"]])}">{label}</a>')
        if row["task"] in links
        else label,
        "group": row["group"],
        "accuracy": percent(row["top1"]),
        "±": percent(row.get("std")),
        " ": bar(row["top1"]),
        "seeds": len(row.get("seeds") or ()),
        "rate": row.get("rate"),
        "images": row["images"],
        "note": "; ".join(filter(None, notes)),
    }
