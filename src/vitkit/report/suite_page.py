"""A suite of tasks: the mean of each group, and a row for each task."""

from collections.abc import Mapping
from typing import Any

from vitkit.proportions import percent as share_of
from vitkit.proportions import span, wilson
from vitkit.report.beside import TITLE, suite_sections
from vitkit.report.heat import bar
from vitkit.report.html import Markup, Number, contents, name, note, page, percent, section, table, text

ENOUGH = 10_000  # images, where a suite of an older version does not count those of a mean


def suite_page(suite: Mapping[str, Any], title: str, links: Mapping[str, str]) -> str:
    """`links`: by task, its own report where that lies below this page."""
    last = list(suite["means"])[-1] if suite["means"] else ""
    whole = suite["means"].get(last) or {"mean": None, "tasks": 0, "of": 0}
    small = f"mean accuracy of {whole['tasks']} of {whole['of']} tasks ({last})"
    head = f"<h1>{name(title)}</h1>\n"
    small += f"; 95 % interval {mean_span(whole)}" if whole.get("interval") else ""
    head += f'<p class="headline">{mean_share(whole)} <small>{text(small)}</small></p>\n'
    head += f"<p>From {name(suite['model'])}. {text(setting_words(suite))}</p>\n"
    if suite.get("waiting"):
        head += f'<p class="status">Not finished: {suite["waiting"]} tasks are still to be done.</p>\n'
    means = [
        {"group": group, "mean accuracy": mean_share(row), "95 % interval": mean_span(row),
         " ": bar(row["mean"] or 0.0),
         "tasks": f"{row['tasks']} of {row['of']}", "complete": bool(row["complete"])}
        for group, row in suite["means"].items()
    ]  # fmt: skip
    sections: dict[str, str] = {
        "Groups": table(means),
        "Tasks": table(task_row(row, links) for row in suite["tasks"]),
    }
    sections["What was chosen"] = chosen_table(suite)
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


def mean_share(row: Mapping[str, Any]) -> Number:
    return Number(share_of(row["mean"], row.get("images") or ENOUGH))


def mean_span(row: Mapping[str, Any]) -> Number:
    return Number(span(row["interval"], row.get("images") or ENOUGH) if row.get("interval") else "–")


def setting_words(suite: Mapping[str, Any]) -> str:
    """How the setting of the final runs was found."""
    if one := suite.get("setting"):
        how = f"the best of {len(one['means'])} by the mean of all tasks on their validation images"
        return f"One setting for every task: {setting_name(one['chosen'])}, {how}."
    rates = {row.get("rate") for row in suite["tasks"]}
    if any(len(row.get("tried") or ()) > 1 for row in suite["tasks"]) or len(rates) > 1:
        return "Each task has a setting of its own, chosen on its validation images."
    return "One setting for every task, without a search."


def setting_name(key: str) -> str:
    """rate-0.01-steps-2500 in words."""
    return "BiT's HyperRule" if key == "bit" else key.replace("-steps-", ", steps ").replace("rate-", "rate ")


def chosen_table(suite: Mapping[str, Any]) -> Markup | str:
    """A row a task: what was chosen for it, and what each candidate came to on its validation images."""
    rows = [row for row in suite["tasks"] if row.get("tried")]
    if not rows:
        return ""
    names = list(dict.fromkeys(key for row in rows for key in row["tried"]))
    lines = []
    for row in rows:
        scores = {setting_name(key): percent(row["tried"].get(key), 1) for key in names}
        lines.append({"task": name(row["task"], 80), "chosen": setting_name(row["chosen"])} | scores)
    one = suite.get("setting")
    if one:
        last = {setting_name(key): percent(one["means"].get(key), 1) for key in names}
        lines.append({"task": "mean", "chosen": setting_name(one["chosen"])} | last)
    told = note("Accuracy on the validation images of each task, by what was compared there.")
    return Markup(told + table(lines, marked=[False] * len(rows) + [bool(one)]))


def task_row(row: Mapping[str, Any], links: Mapping[str, str]) -> dict[str, Any]:
    label = name(row["task"], 80)
    notes = [row.get("differs") or "", "" if row.get("complete", True) else "other files than published"]
    return {
        "task": Markup(f'<a href="{text(links[row["task"]])}">{label}</a>')
        if row["task"] in links
        else label,
        "group": row["group"],
        "accuracy": Number(share_of(row["top1"], row["images"])),
        "95 % interval": Number(span(wilson(row["top1"], row["images"]), row["images"])),
        "± of seeds": Number(share_of(row.get("std"), row["images"])),
        " ": bar(row["top1"]),
        "seeds": len(row.get("seeds") or ()),
        "chosen": setting_name(row.get("chosen") or f"rate-{row.get('rate') or 0:g}"),
        "images": row["images"],
        "note": "; ".join(filter(None, notes)),
    }
