"""The page of a study: what the paper claims and what was found, figures, the ledger, every trial."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.report.beside import TITLE, study_sections
from vitkit.report.charts import line_chart
from vitkit.report.dots import dot_chart
from vitkit.report.html import (
    Markup,
    commands,
    contents,
    details,
    element,
    facts,
    image,
    name,
    note,
    page,
    section,
    table,
    text,
)
from vitkit.report.overlay import similarity_picture

Found = Mapping[str, Any]
OUTCOMES = {  # of a claim: how one counts them, and the class of the word
    "holds at this scale": ("hold", "right-word"),
    "does not hold at this scale": ("do not hold", "error-word"),
    "cannot be seen": ("cannot be told from chance", "note-word"),
    "not tried": ("are not tried yet", "note-word"),
}
LEDGER = ("parameters", "GFLOPs", "exaFLOPs", "tpu_v3_core_days", "images_seen", "seconds")
IN_SHORT = (
    "seed",
    "steps",
    "top1",
    "fewshot_mean",
    "images_seen",
    "seconds",
)  # of a trial, after its factors


def study_page(found: Found) -> str:
    """found: study, shows, about, chosen, verdicts, figures, means, laws, rows, failed, total, commands,
    factors, published (names of tables), table (the address of the file with every number)."""
    parts = {
        "What the paper says, and what was found": claims(found["verdicts"]),
        "Figures": figures(found["figures"]),
        "Means over seeds": means(found["means"]),
        TITLE: study_sections(found.get("published", ())),
        "Fits": fits(found["laws"]),
        "Failed": failures(found["failed"]),
        "What was chosen": facts(found["chosen"]),
        "Every trial": every_trial(found),
        "Commands": commands(found["commands"]),
    }
    parts = {title: body for title, body in parts.items() if body}
    ids = {f"part-{i}": title for i, title in enumerate(parts)}
    body = "".join(section(title, parts[title], id) for id, title in ids.items())
    return page(f"Study: {found['study']}", top(found) + contents(ids) + body)


def top(found: Found) -> str:
    """The verdict, what was studied, and how much of the plan has been run."""
    told = element("h1", f"Study: {found['study']} ({found['shows']})")
    big, small = verdict(found["verdicts"])
    told = Markup(told + f'<p class="headline">{text(big)} <small>{text(small)}</small></p>\n')
    about = element("p", sentence(found["about"]) + ".")
    return f"<header>\n{told}{about}{progress(found)}</header>\n"


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def verdict(verdicts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How many of the paper's claims hold, and what becomes of the others."""
    total = len(verdicts)
    if not total:
        return "No claims to test", ""
    count = {outcome: sum(one["outcome"] == outcome for one in verdicts) for outcome in OUTCOMES}
    held, *others = OUTCOMES
    rest = [f"{count[one]} {OUTCOMES[one][0]}" for one in others if count[one]]
    holds = "holds" if count[held] == 1 else "hold"
    return f"{count[held]} of {total} claims {holds} at this scale", "; ".join(rest)


def progress(found: Found) -> Markup:
    """How much of the plan has been run."""
    done, failed, total = len(found["rows"]), len(found["failed"]), found["total"]
    if done == total:
        return note(f"All {total} trials are finished.")
    left = total - done - failed
    words = f"{done} of {total} trials are finished, {failed} failed, {left} are still to be run."
    return element("p", words, class_="status")


def claims(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    """Each claim with its outcome and what was measured."""
    told = ""
    for one in verdicts:
        css = OUTCOMES.get(one["outcome"], ("", "note-word"))[1]
        outcome = element("span", one["outcome"], class_=css)
        told += element("li", Markup(f"<b>{text(sentence(one['claim']))}</b>{outcome}{note(one['words'])}"))
    how = "Left minus right side of each claim, seed by seed; in brackets the mean's 95 % interval (t)."
    return Markup(element("ul", Markup(told), class_="claims") + note(how))


def figures(entries: Sequence[Mapping[str, Any]]) -> Markup | str:
    """Charts in one grid, and below them pictures."""
    drawn = [chart(entry) for entry in entries if "maps" not in entry]
    beside = element("div") if len(drawn) == 1 else ""  # so that one alone is not twice as large
    told = element("div", Markup("".join(drawn) + beside), class_="charts") if drawn else Markup("")
    return Markup(told + "".join(map_figure(entry) for entry in entries if "maps" in entry))


def chart(entry: Mapping[str, Any]) -> str:
    """Lines over numbers, or marks over settings, in the style of all charts."""
    entry = {**entry, "title": sentence(entry["title"])}
    if "bars" in entry:
        return dot_chart(entry["bars"], y_label=entry["y"], title=entry["title"], band=entry.get("band"),
                         band_name="BiT ResNets")  # fmt: skip
    lines = entry["lines"]
    return line_chart(
        {key: [(x, y) for x, y, _ in points] for key, points in lines.items()},
        x_label=entry["x"], y_label=entry["y"], log_x=entry["log_x"], points=True, percent=True,
        errors={key: [reach for _, _, reach in points] for key, points in lines.items()},
        title=entry["title"],
    )  # fmt: skip


def map_figure(entry: Mapping[str, Any]) -> Markup:
    """How alike position embeddings are, a picture for each setting."""
    told = ""
    for key, values in entry["maps"].items():
        drawn = image(similarity_picture(values), "image/png", f"{entry['title']}: {key}")
        told += element("figure", Markup(drawn + element("figcaption", name(key))))
    how = (
        "A small map for each patch, in its place: its cosine with every other, from -1 (dark) to 1 (light)."
    )
    return Markup(
        element("h3", sentence(entry["title"])) + note(how) + element("div", Markup(told), class_="maps")
    )


def means(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """The scores of each setting, and behind a click what a run of it costs."""
    scores = table({key: value for key, value in row.items() if key not in LEDGER} for row in rows)
    costs = [{key: value for key, value in row.items() if not key.endswith("%")} for row in rows]
    return Markup(scores + (details("What one run of each costs", table(costs)) if rows else ""))


def every_trial(found: Found) -> Markup:
    """The trials in short, and where all their numbers are."""
    rows, kept = found["rows"], (*found.get("factors", ("trial",)), *IN_SHORT)
    short = [{key: row.get(key) for key in kept} for row in rows]
    short = [{key: row[key] for key in kept if any(one[key] is not None for one in short)} for row in short]
    file = found.get("table")
    link = f'Every number: <a href="{text(file)}">{text(file)}</a>.' if file else ""
    return Markup(details(f"{len(rows)} trials", table(short)) + (note(Markup(link)) if link else ""))


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
    body: str = table({"trial": key, "error": one["error"]} for key, one in failed.items())
    for key, one in failed.items():
        if one.get("trace"):
            body += details(key, element("pre", one["trace"]))
    return Markup(body)
