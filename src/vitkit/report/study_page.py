"""The page of a study: the paper's claims and what was measured, figures, costs, every trial."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.report.charts import charts, dot_chart, line_chart
from vitkit.report.html import commands, facts, fill, page, picture
from vitkit.report.literature import PUBLISHED, study_section
from vitkit.report.overlay import similarity_picture

Study = Mapping[str, Any]
OUTCOMES = {  # of a claim: what is shown, how one and how several are counted, the class of the word
    "holds at this scale": ("holds at this scale", "holds", "hold", "right-word"),
    "does not hold at this scale": (
        "does not hold at this scale",
        "does not hold",
        "do not hold",
        "error-word",
    ),
    "cannot be seen": ("inconclusive", "is inconclusive", "are inconclusive", "note-word"),
    "not tried": ("not tested yet", "is not tested yet", "are not tested yet", "note-word"),
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
LAWS = {
    "power": "error = scale · exaFLOPs^exponent",
    "log-linear": "accuracy = scale + exponent · log10 exaFLOPs",
}


def study_page(study: Study) -> str:
    """study: study, shows, about, chosen, verdicts, figures, means, laws, rows, failed, total, commands,
    factors, published (names of tables), table (the address of the file with every number)."""
    sections = {
        "Claims of the paper, and results": claims(study["verdicts"]),
        "Figures": figures(study["figures"]),
        "Means over seeds": means(study["means"]),
        PUBLISHED: study_section(study.get("published", ())),
        "Fitted laws": fits(study["laws"]),
        "Failed trials": failures(study["failed"]),
        "Settings": facts(study["chosen"]),
        "All trials": trials(study),
        "Commands": commands(study["commands"]),
    }
    return page(f"Study: {study['study']}", header(study), sections)


def header(study: Study) -> Markup:
    """The verdict, what was studied, and how much of the plan has been run."""
    title = f"Study: {study['study']} ({study['shows']})"
    counts = len(study["rows"]), len(study["failed"]), study["total"]
    values = title, *verdict(study["verdicts"]), sentence(study["about"]), *counts
    return fill("study.html", "header", *values)


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def verdict(verdicts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How many of the paper's claims hold, and what becomes of the others."""
    total = len(verdicts)
    if not total:
        return "No claims to test", ""
    count = {outcome: sum(one["outcome"] == outcome for one in verdicts) for outcome in OUTCOMES}
    verbs = {outcome: OUTCOMES[outcome][1 if count[outcome] == 1 else 2] for outcome in OUTCOMES}
    held, *others = OUTCOMES
    rest = [f"{count[one]} {verbs[one]}" for one in others if count[one]]
    return f"{count[held]} of {total} claims {verbs[held]} at this scale", "; ".join(rest)


def claims(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    """Each claim with its outcome and what was measured."""
    rows = []
    for one in verdicts:
        shown, *_, css = OUTCOMES.get(one["outcome"], (one["outcome"], "note-word"))
        rows.append((sentence(one["claim"]), shown, css, one["words"]))
    return fill("study.html", "claims", rows)


def figures(entries: Sequence[Mapping[str, Any]]) -> Markup:
    """Charts in one grid, and below them pictures."""
    drawn = [chart(entry) for entry in entries if "maps" not in entry]
    maps = [
        (sentence(entry["title"]),
         [(picture(similarity_picture(values), "image/png", f"{entry['title']}: {key}"), key)
          for key, values in entry["maps"].items()])
        for entry in entries if "maps" in entry
    ]  # fmt: skip
    return fill("study.html", "figures", charts(*drawn) if drawn else "", maps) if entries else Markup()


def chart(entry: Mapping[str, Any]) -> Markup:
    """Lines over numbers, or marks over settings, in the style of all charts."""
    title = sentence(entry["title"])
    if "bars" in entry:
        return dot_chart(entry["bars"], y_label=entry["y"], title=title, band=entry.get("band"),
                         band_name="BiT ResNets")  # fmt: skip
    lines = entry["lines"]
    return line_chart(
        {key: [(x, y) for x, y, _ in points] for key, points in lines.items()},
        x_label=entry["x"], y_label=entry["y"], log_x=entry["log_x"], points=True, percent=True,
        errors={key: [reach for _, _, reach in points] for key, points in lines.items()}, title=title,
    )  # fmt: skip


def means(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """The scores of each setting, and behind a click what a run of it costs."""
    scores = [{key: value for key, value in row.items() if key not in LEDGER} for row in rows]
    costs = [{key: value for key, value in row.items() if not key.endswith("%")} for row in rows]
    return fill("study.html", "means", scores, costs)


def trials(study: Study) -> Markup:
    """The trials in short, and where all their numbers are."""
    rows, kept = study["rows"], (*study.get("factors", ("trial",)), *IN_SHORT)
    short = [{key: row.get(key) for key in kept} for row in rows]
    short = [{key: row[key] for key in kept if any(one[key] is not None for one in short)} for row in short]
    return fill("study.html", "trials", short, study.get("table"))


def fits(laws: Sequence[Mapping[str, Any]]) -> Markup:
    if not laws:
        return Markup()
    rows = []
    for one in laws:
        named = {k: v for k, v in one.items() if k not in ("kind", "scale", "exponent", "low", "high", "r2")}
        points = named.pop("points")
        law = {"law": LAWS[one["kind"]], "scale": f"{one['scale']:.4g}", "exponent": f"{one['exponent']:.4f}"}
        law |= {"95 % interval": f"{one['low']:.4f} to {one['high']:.4f}", "R²": f"{one['r2']:.3f}"}
        rows.append(named | law | {"points": points})
    return fill("study.html", "fits", rows)


def failures(failed: Mapping[str, Mapping[str, str]]) -> Markup:
    if not failed:
        return Markup()
    rows = [{"trial": key, "error": one["error"]} for key, one in failed.items()]
    traces = [(key, one["trace"]) for key, one in failed.items() if one.get("trace")]
    return fill("study.html", "failures", rows, traces)
