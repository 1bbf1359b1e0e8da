"""The HTML report of a study: the paper's claims and the measurements, figures, costs and trials."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.report.charts import charts, dot_chart, line_chart
from vitkit.report.difference_chart import difference_chart
from vitkit.report.html import Number, commands, facts, fill, page, picture
from vitkit.report.literature import PUBLISHED, study_section
from vitkit.report.overlay import similarity_picture

Study = Mapping[str, Any]
OUTCOMES = {  # outcome of a claim: singular and plural verb for the summary, CSS class
    "holds at this scale": ("holds", "hold", "right-word"),
    "does not hold at this scale": ("does not hold", "do not hold", "error-word"),
    "inconclusive": ("is inconclusive", "are inconclusive", "note-word"),
    "not tested yet": ("is not tested yet", "are not tested yet", "note-word"),
}
LEDGER = ("parameters", "GFLOPs", "exaFLOPs", "tpu_v3_core_days", "images_seen", "seconds")
MAIN_COLUMNS = (  # of the table of trials, after the factors
    "seed",
    "steps",
    "top1",
    "fewshot_mean",
    "knn",
    "probe",
    "images_seen",
    "seconds",
)
LAWS = {
    "power": "error = scale · exaFLOPs^exponent",
    "log-linear": "accuracy = scale + exponent · log10 exaFLOPs",
}


def study_page(study: Study) -> str:
    """Keys of study: study, shows, about, chosen, verdicts, changes, figures, means, laws, rows, failed,
    total, commands, factors, published (names of tables), table (URL of the file with all numbers)."""
    sections = {
        "Paper claims and results": claims(study["verdicts"]),
        "Differences from the base recipe": differences(study.get("changes", ())),
        "Figures": figures(study["figures"]),
        "Means over seeds": means(study["means"]),
        PUBLISHED: study_section(study.get("published", ())),
        "Scaling laws": scaling_laws(study["laws"]),
        "Predictions and results": predictions(study.get("predictions")),
        "Failed trials": failures(study["failed"]),
        "Settings": facts(study["chosen"]),
        "All trials": trials(study),
        "Time": time_use(study.get("time", {})),
        "Commands": commands(study["commands"]),
    }
    return page(f"Study: {study['study']}", header(study), sections)


def header(study: Study) -> Markup:
    """The verdict, the subject of the study, and its progress."""
    title = f"Study: {study['study']} ({study['shows']})"
    counts = len(study["rows"]), len(study["failed"]), study["total"]
    changes = study.get("changes", ())
    big, small = changes_verdict(changes) if changes else verdict(study["verdicts"])
    values = title, big, small, capitalized(study["about"]), *counts
    return fill("study.html", "header", *values)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdict(verdicts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How many of the paper's claims hold, and the outcomes of the others."""
    total = len(verdicts)
    if not total:
        return "No claims to test", ""
    count = {outcome: sum(row["outcome"] == outcome for row in verdicts) for outcome in OUTCOMES}
    verbs = {outcome: OUTCOMES[outcome][0 if count[outcome] == 1 else 1] for outcome in OUTCOMES}
    confirmed, *others = OUTCOMES
    rest = [f"{count[outcome]} {verbs[outcome]}" for outcome in others if count[outcome]]
    return f"{count[confirmed]} of {total} claims {verbs[confirmed]} at this scale", "; ".join(rest)


def changes_verdict(changes: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How many changes are better than the base recipe, and the outcomes of the others."""
    count = {word: sum(row["outcome"] == word for row in changes) for word in ("worse", "inconclusive")}
    better = len(changes) - sum(count.values())
    rest = [f"{n} {'is' if n == 1 else 'are'} {word}" for word, n in count.items() if n]
    verb = "is" if better == 1 else "are"
    return f"{better} of {len(changes)} changes {verb} better than the base recipe", "; ".join(rest)


def differences(changes: Sequence[Mapping[str, Any]]) -> Markup:
    """The difference of each change from the base recipe, on each data set and on average."""
    return fill("study.html", "differences", difference_rows(changes)) if changes else Markup()


def difference_rows(changes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table of the changes: their differences in points, with intervals."""
    sets = list(dict.fromkeys(data for row in changes for data in row["data"]))
    return [
        {"change": row["change"], "mean": points(row["mean"]), "outcome": row["outcome"]}
        | {data: points(row["data"].get(data)) for data in sets}
        for row in changes
    ]


def points(difference: Mapping[str, Any] | None) -> Number:
    """A difference of shares in points, with its interval if it has one."""
    if difference is None:
        return Number("–")
    values = [difference[key] for key in ("mean", "low", "high") if difference[key] is not None]
    center, *ends = (f"{round(100 * value, 2) + 0.0:+.2f}" for value in values)  # 0.0: no -0.00
    return Number(f"{center} [{', '.join(ends)}]" if ends else center)


def claims(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    """Each claim with its outcome and the measurement."""
    if not verdicts:
        return Markup()
    rows = []
    for row in verdicts:
        *_, css = OUTCOMES.get(row["outcome"], ("note-word",))
        rows.append((capitalized(row["claim"]), row["outcome"], css, row["words"]))
    return fill("study.html", "claims", rows)


def figures(entries: Sequence[Mapping[str, Any]]) -> Markup:
    """A grid of charts, followed by similarity maps."""
    chart_figures = [chart(entry) for entry in entries if "maps" not in entry]
    maps = [
        (capitalized(entry["title"]),
         [(picture(similarity_picture(values), "image/png", f"{entry['title']}: {key}"), key)
          for key, values in entry["maps"].items()])
        for entry in entries if "maps" in entry
    ]  # fmt: skip
    if not entries:
        return Markup()
    return fill("study.html", "figures", charts(*chart_figures) if chart_figures else "", maps)


def chart(entry: Mapping[str, Any]) -> Markup:
    """A line chart over a numeric factor, or a dot chart over settings."""
    title = capitalized(entry["title"])
    if "differences" in entry:
        return difference_chart(entry["differences"], x_label=f"{entry['y']}, points", title=title)
    if "bars" in entry:
        return dot_chart(entry["bars"], y_label=entry["y"], title=title, band=entry.get("band"),
                         band_name="BiT ResNets")  # fmt: skip
    lines = entry["lines"]
    return line_chart(
        {key: [(x, y) for x, y, _ in points] for key, points in lines.items()},
        x_label=entry["x"], y_label=entry["y"], log_x=entry["log_x"], points=True, percent=True,
        errors={key: [error for _, _, error in points] for key, points in lines.items()}, title=title,
    )  # fmt: skip


def means(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """The scores of each setting, and a collapsed table of its cost per run."""
    scores = [{key: value for key, value in row.items() if key not in LEDGER} for row in rows]
    costs = [{key: value for key, value in row.items() if not key.endswith("%")} for row in rows]
    return fill("study.html", "means", scores, costs)


def trials(study: Study) -> Markup:
    """The main columns of all trials, and a link to the full table."""
    rows, candidates = study["rows"], (*study.get("factors", ("trial",)), *MAIN_COLUMNS)
    columns = [key for key in candidates if any(row.get(key) is not None for row in rows)]
    main_rows = [{key: row.get(key) for key in columns} for row in rows]
    return fill("study.html", "trials", main_rows, study.get("table"))


def scaling_laws(laws: Sequence[Mapping[str, Any]]) -> Markup:
    if not laws:
        return Markup()
    rows = []
    for law in laws:
        group = {k: v for k, v in law.items() if k not in ("kind", "scale", "exponent", "low", "high", "r2")}
        points = group.pop("points")
        fit = {"law": LAWS[law["kind"]], "scale": f"{law['scale']:.4g}", "exponent": f"{law['exponent']:.4f}"}
        fit |= {"95 % interval": f"{law['low']:.4f} to {law['high']:.4f}", "R²": f"{law['r2']:.3f}"}
        rows.append(group | fit | {"points": points})
    return fill("study.html", "scaling_laws", rows)


def predictions(stored: Mapping[str, Any] | None) -> Markup:
    """Scores predicted before their trials started, beside what was measured."""
    if not stored:
        return Markup()
    rows = []
    for entry in stored["compared"]:
        low, center, high = (f"{100 * entry[key]:.2f}" for key in ("low", "predicted", "high"))
        value, inside = entry["measured"], entry["inside"]
        rows.append(
            entry["setting"]
            | {"exaFLOPs": entry["exaFLOPs"], "predicted, %": Number(f"{center} [{low}, {high}]"),
               "measured, %": Number("–" if value is None else f"{100 * value:.2f}"),
               "inside": "–" if inside is None else "yes" if inside else "no"}
        )  # fmt: skip
    return fill("study.html", "predictions", rows, stored["made"], stored["digest"], stored["changed"])


def time_use(values: Mapping[str, str]) -> Markup:
    """Where the time of the study went."""
    return fill("study.html", "time_use", facts(values)) if values else Markup()


def failures(failed: Mapping[str, Mapping[str, str]]) -> Markup:
    if not failed:
        return Markup()
    rows = [{"trial": key, "error": trial["error"]} for key, trial in failed.items()]
    traces = [(key, trial["trace"]) for key, trial in failed.items() if trial.get("trace")]
    return fill("study.html", "failures", rows, traces)
