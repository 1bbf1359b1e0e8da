"""The page of a study: what the paper claims and what was found, figures, the ledger, every trial."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.report.beside import TITLE, study_sections
from vitkit.report.charts import line_chart
from vitkit.report.html import (
    Markup,
    commands,
    contents,
    details,
    element,
    facts,
    image,
    note,
    page,
    section,
    table,
)

Found = Mapping[str, Any]


def study_page(found: Found) -> str:
    """found: study, shows, about, chosen, verdicts, figures, means, laws, rows, failed, total, commands,
    published (names of tables)."""
    parts = {
        "What the paper says, and what was found": verdict_table(found["verdicts"]),
        "Figures": figures(found["figures"]),
        "Means over seeds, and the ledger": table(found["means"]),
        TITLE: study_sections(found.get("published", ())),
        "Fits": fits(found["laws"]),
        "Failed": failures(found["failed"]),
        "What was chosen": facts(found["chosen"]),
        "Every trial": details(f"{len(found['rows'])} trials", table(found["rows"])),
        "Commands": commands(found["commands"]),
    }
    parts = {title: body for title, body in parts.items() if body}
    ids = {f"part-{i}": title for i, title in enumerate(parts)}
    top: str = element("h1", f"Study: {found['study']} ({found['shows']})")
    top += element("p", found["about"]) + progress(found) + contents(ids)
    body = "".join(section(title, parts[title], id) for id, title in ids.items())
    return page(f"Study: {found['study']}", top + body)


def progress(found: Found) -> Markup:
    """How much of the plan has been run."""
    done, failed, total = len(found["rows"]), len(found["failed"]), found["total"]
    if done == total:
        return note(f"All {total} trials are finished.")
    left = total - done - failed
    words = f"{done} of {total} trials are finished, {failed} failed, {left} are still to be run."
    return element("p", words, class_="status")


def verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [
        {
            "claim": one["claim"], "at this scale": one["outcome"], "measured": one["words"],
            "seeds": one["seeds"],
        }
        for one in verdicts
    ]  # fmt: skip
    told = note(
        "Left minus right side of each claim, seed by seed; in brackets the mean's 95 % interval (t)."
    )
    return Markup(table(rows) + told)


def figures(entries: Sequence[Mapping[str, Any]]) -> Markup | str:
    if not entries:
        return ""
    beside = element("div") if len(entries) == 1 else ""  # so that one alone is not twice as large
    return element("div", Markup("".join(map(figure, entries)) + beside), class_="charts")


def figure(entry: Mapping[str, Any]) -> Markup:
    """A chart where there are lines, else the drawn figures themselves."""
    body: str = element("h3", entry["title"])
    if "lines" in entry:
        lines = entry["lines"]
        body += Markup(
            line_chart(
                {name: [(x, y) for x, y, _ in points] for name, points in lines.items()},
                x_label=entry["x"], y_label=entry["y"], log_x=entry["log_x"], points=True, percent=True,
                errors={name: [reach for _, _, reach in points] for name, points in lines.items()},
            )
        )  # fmt: skip
    else:
        for name, content in entry["png"].items():
            drawn = image(content, "image/png", f"{entry['title']} {name}".strip())
            body += drawn.replace("<img ", '<img width="100%" ', 1)  # as wide as its column
    return element("div", Markup(body))


def fits(laws: Sequence[Mapping[str, Any]]) -> Markup | str:
    if not laws:
        return ""
    words = {
        "power": "error = scale · exaFLOPs^exponent",
        "log-linear": "accuracy = scale + exponent · log10 exaFLOPs",
    }
    rows = []
    for one in laws:
        named = {k: v for k, v in one.items() if k not in ("kind", "scale", "exponent", "low", "high", "r2")}
        points = named.pop("points")
        told = {
            "law": words[one["kind"]],
            "scale": f"{one['scale']:.4g}",
            "exponent": f"{one['exponent']:.4f}",
        }
        told |= {"95 % interval": f"{one['low']:.4f} to {one['high']:.4f}", "R²": f"{one['r2']:.3f}"}
        rows.append(named | told | {"points": points})
    return Markup(table(rows) + note("Intervals are by a bootstrap of 1,000 samples of the trials."))


def failures(failed: Mapping[str, Mapping[str, str]]) -> Markup | str:
    if not failed:
        return ""
    body: str = table({"trial": name, "error": one["error"]} for name, one in failed.items())
    for name, one in failed.items():
        if one.get("trace"):
            body += details(name, element("pre", one["trace"]))
    return Markup(body)
