"""A suite of tasks: the mean of each group, and a row for each task."""

from collections.abc import Mapping
from typing import Any

from vitkit.report.beside import TITLE, suite_sections
from vitkit.report.heat import bar
from vitkit.report.html import Markup, contents, name, note, page, percent, section, table, text


def suite_page(suite: Mapping[str, Any], title: str, links: Mapping[str, str]) -> str:
    """`links`: by task, its own report where that lies below this page."""
    last = list(suite["means"])[-1] if suite["means"] else ""
    whole = suite["means"].get(last) or {"mean": None, "tasks": 0, "of": 0}
    small = f"mean accuracy of {whole['tasks']} of {whole['of']} tasks ({last})"
    head = f"<h1>{name(title)}</h1>\n"
    head += f'<p class="headline">{percent(whole["mean"])} <small>{text(small)}</small></p>\n'
    head += f"<p>From {name(suite['model'])}. {text(setting_words(suite))}</p>\n"
    if suite.get("waiting"):
        head += f'<p class="status">Not finished: {suite["waiting"]} tasks are still to be done.</p>\n'
    means = [
        {"group": group, "mean accuracy": percent(row["mean"]), " ": bar(row["mean"] or 0.0),
         "tasks": f"{row['tasks']} of {row['of']}", "complete": bool(row["complete"])}
        for group, row in suite["means"].items()
    ]  # fmt: skip
    sections: dict[str, str] = {
        "Groups": table(means),
        "Tasks": table(task_row(row, links) for row in suite["tasks"]),
    }
    if suite.get("setting"):
        sections["Setting"] = setting_table(suite["setting"])
    sections[TITLE] = suite_sections(suite)
    sections = {heading: body for heading, body in sections.items() if body}
    if suite["missing"]:
        absent = ", ".join(row["task"] for row in suite["missing"])
        sections["Tasks"] = Markup(
            sections["Tasks"] + note(f"Without data, and so not in any mean: {absent}.")
        )
    ids = {f"part-{i}": heading for i, heading in enumerate(sections)}
    body = f"<header>\n{head}</header>\n{contents(ids)}"
    return page(title, body + "".join(section(heading, sections[heading], id) for id, heading in ids.items()))


def setting_words(suite: Mapping[str, Any]) -> str:
    """How the setting of the final runs was found."""
    if one := suite.get("setting"):
        how = (
            f"the best of {len(one['means'])} by the mean of {one['tasks']} tasks on their validation images"
        )
        return f"One setting for every task: {setting_name(one['chosen'])}, {how}."
    rates = {row.get("rate") for row in suite["tasks"]}
    if any(len(row.get("tried") or ()) > 1 for row in suite["tasks"]) or len(rates) > 1:
        return "Each task has a setting of its own, chosen on its validation images: see the column 'chosen'."
    return "One setting for every task, without a search."


def setting_name(key: str) -> str:
    """rate-0.01-steps-2500 in words."""
    return "BiT's HyperRule" if key == "bit" else key.replace("-steps-", ", steps ").replace("rate-", "rate ")


def setting_table(one: Mapping[str, Any]) -> Markup:
    rows = [{"setting": setting_name(key), "mean on validation images": percent(value)}
            for key, value in one["means"].items()]  # fmt: skip
    return table(rows, marked=[key == one["chosen"] for key in one["means"]])


def chosen_cell(row: Mapping[str, Any]) -> str:
    """What was chosen for a task, with what each candidate came to on its validation images."""
    tried = row.get("tried") or {}
    if not tried:
        return f"rate {row['rate']:g}, not compared" if row.get("rate") is not None else "–"
    told = ", ".join(f"{setting_name(key)}: {percent(top1, 1)}" for key, top1 in tried.items())
    return f"{setting_name(row['chosen'])} (validation: {told})"


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
        "chosen": chosen_cell(row),
        "images": row["images"],
        "note": "; ".join(filter(None, notes)),
    }
