"""Analysis of a study's table: means over seeds, scaling laws, verdicts on claims, and figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitkit.inspection.embeddings import position_similarity
from vitkit.io.files import replace_file
from vitkit.report.figure_style import render
from vitkit.report.figures import Point, draw_bars, draw_differences, draw_scores, draw_similarity
from vitkit.report.html import Number
from vitkit.runs.folder import MODEL
from vitkit.runs.page import rows as journal_rows
from vitkit.studies.differences import Estimate, by_seed, changes_from_base, estimate
from vitkit.studies.folder import Row, select_rows, trial_folder
from vitkit.studies.study import Claim, Picture, Plan, Study
from vitkit.weights.load import load

SAMPLES = 1000  # bootstrap samples
SIMILAR_COMPUTE = 1.25  # ratio up to which two sides count as equal in compute
HOLDS, FAILS, INCONCLUSIVE, NOT_TESTED = (
    "holds at this scale",
    "does not hold at this scale",
    "cannot be seen",
    "not tried",
)


@dataclass(frozen=True)
class Law:
    """A fit y = scale * x^exponent (power) or y = scale + exponent * log10 x (log-linear).

    low, high: bootstrap interval of the exponent.
    """

    kind: str
    scale: float
    exponent: float
    low: float
    high: float
    r2: float
    points: int

    def predict(self, x: float) -> float:
        if self.kind == "power":
            return self.scale * x**self.exponent
        return self.scale + self.exponent * math.log10(x)


def law(x: Sequence[float], y: Sequence[float], kind: str = "power") -> Law | None:
    """Fit a law by least squares in log space; None if x has fewer than three distinct values."""
    xs = np.log(np.asarray(x, float)) if kind == "power" else np.log10(np.asarray(x, float))
    ys = np.log(np.asarray(y, float)) if kind == "power" else np.asarray(y, float)
    if len(set(x)) < 3 or not np.isfinite(ys).all():
        return None
    slope, intercept = np.polyfit(xs, ys, 1)
    residuals = ys - (intercept + slope * xs)
    total = float(((ys - ys.mean()) ** 2).sum())
    rng, slopes = np.random.default_rng(0), list[float]()
    while len(slopes) < SAMPLES:
        sample = rng.integers(0, len(xs), len(xs))
        if len(set(xs[sample])) > 1:
            slopes.append(np.polyfit(xs[sample], ys[sample], 1)[0])
    low, high = np.quantile(slopes, [0.025, 0.975])
    scale = math.exp(intercept) if kind == "power" else float(intercept)
    r2 = 1 - float((residuals**2).sum()) / total if total else 1.0
    return Law(kind, scale, float(slope), float(low), float(high), r2, len(xs))


@dataclass(frozen=True)
class Verdict:
    """A claim with its outcome and the measured difference."""

    claim: str
    outcome: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    words: str = ""
    compute: tuple[float, float] | None = None  # mean exaFLOPs of pre-training, left and right

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_claim(claim: Claim, rows: Sequence[Row], score: str) -> Verdict:
    """Test a claim by the confidence interval of the difference, paired by seed."""
    score = claim.score or score
    values = list(differences(claim, rows, score).values())
    if not values:
        sides = (claim.left, claim.right)
        if claim.measure == "compute" and all(select_rows(rows, side) for side in sides):
            return Verdict(claim.text, INCONCLUSIVE, words="no accuracy is reached by both sides")
        return Verdict(claim.text, NOT_TESTED, words="no seed has finished on both sides")
    e = estimate(values)
    compute = None if claim.measure == "compute" else compute_of(claim, rows, score)
    text = describe(claim, e) + compute_note(compute)
    if e.low is None or e.high is None:
        text += "; one seed has no interval"
        return Verdict(claim.text, INCONCLUSIVE, e.mean, None, None, 1, text, compute)
    outcome = decide(claim, e.low, e.high)
    return Verdict(claim.text, outcome, e.mean, e.low, e.high, e.count, text, compute)


def compute_of(claim: Claim, rows: Sequence[Row], score: str) -> tuple[float, float] | None:
    """Mean exaFLOPs of pre-training of the two sides; None if unknown."""
    sides = []
    for side in (claim.left, claim.right):
        scored = [row for row in select_rows(rows, side) if row.get(score) is not None]
        exaflops = [row["pretrain_exaFLOPs"] for row in scored if row.get("pretrain_exaFLOPs")]
        if not exaflops:
            return None
        sides.append(mean(exaflops))
    return sides[0], sides[1]


def compute_note(compute: tuple[float, float] | None) -> str:
    """A note if the compute of the two sides differs."""
    if compute is None or max(compute) <= SIMILAR_COMPUTE * min(compute):
        return ""
    left, right = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in compute)
    return f"; different compute: {left} against {right} exaFLOPs of pre-training"


def decide(claim: Claim, low: float, high: float) -> str:
    """The outcome of a claim, given the interval of the difference."""
    least = 0.0 if claim.relation == "above" else -claim.margin
    most = claim.margin if claim.relation == "equal" else math.inf
    if high < least or low > most:
        return FAILS
    return HOLDS if low > least and high < most else INCONCLUSIVE


def describe(claim: Claim, e: Estimate) -> str:
    """The measured difference with its interval and the criterion, in one line."""
    interval = ""
    if e.low is not None and e.high is not None:
        interval = f" [{format_value(claim, e.low)}, {format_value(claim, e.high)}]"
    unit = {"score": "points", "compute": "times the compute at equal accuracy"}[claim.measure]
    margin = 100 * claim.margin
    points = f"{margin:g} point{'s' * (margin != 1)}"
    criterion = {
        "above": "",
        "not below": f"; at most {points} less counts as good",
        "equal": f"; within {points} counts as equal",
    }[claim.relation]
    seeds = f"{e.count} seed{'s' * (e.count > 1)}"
    return f"{format_value(claim, e.mean)}{interval} {unit}, {seeds}{criterion}"


def format_value(claim: Claim, value: float) -> str:
    return f"{2**value:.2f}" if claim.measure == "compute" else f"{100 * value:+.2f}"


def differences(claim: Claim, rows: Sequence[Row], score: str) -> dict[int, float]:
    """For each seed that has both sides: left minus right, or the difference of their gains."""
    if claim.measure == "compute":
        return compute_ratios(claim, rows, score)
    sides = [(1.0, claim.left), (-1.0, claim.right)]
    if claim.baseline:
        sides += [(-1.0, claim.baseline[0]), (1.0, claim.baseline[1])]
    means = [(weight, by_seed(select_rows(rows, factors), score)) for weight, factors in sides]
    seeds = set.intersection(*(set(values) for _, values in means))
    return {seed: sum(weight * values[seed] for weight, values in means) for seed in sorted(seeds)}


def compute_ratios(claim: Claim, rows: Sequence[Row], score: str) -> dict[int, float]:
    """For each seed: log2 of the right side's compute over the left's, at a score that both reach."""
    ratios = {}
    for seed in sorted({row["seed"] for row in rows}):
        left, right = (
            curve([r for r in select_rows(rows, side) if r["seed"] == seed], score)
            for side in (claim.left, claim.right)
        )
        if left and right:
            low, high = max(left[0][1], right[0][1]), min(left[-1][1], right[-1][1])
            if low <= high:
                middle = (low + high) / 2
                ratios[seed] = math.log2(compute_at(right, middle) / compute_at(left, middle))
    return ratios


def curve(rows: Sequence[Row], score: str) -> list[tuple[float, float]]:
    """(compute, best score up to there), strictly increasing: the Pareto front of a family."""
    points = sorted((r["pretrain_exaFLOPs"], r[score]) for r in rows if r.get(score) is not None)
    front: list[tuple[float, float]] = []
    for compute, value in points:
        if not front or value > front[-1][1]:
            front.append((compute, value))
    return front


def compute_at(points: Sequence[tuple[float, float]], score: float) -> float:
    """The compute at which an increasing curve reaches a score, interpolated on a log scale."""
    values = [value for _, value in points]
    return float(np.exp(np.interp(score, values, [math.log(compute) for compute, _ in points])))


def laws(rows: Sequence[Row], factors: Sequence[str], score: str) -> list[dict[str, Any]]:
    """For each setting of the factors: fits of the error (power) and the score (log-linear) to compute."""
    fits: list[dict[str, Any]] = []
    scored = [row for row in rows if row.get(score) is not None and row[score] < 1]
    for values, group in group_rows(scored, factors).items():
        x = [row["pretrain_exaFLOPs"] for row in group]
        for kind, y in (("power", [1 - r[score] for r in group]), ("log-linear", [r[score] for r in group])):
            fit = law(x, y, kind)
            if fit:
                fits.append(dict(zip(factors, values, strict=True)) | asdict(fit))
    return fits


SCORES = {
    "top1": "top-1 accuracy", "fewshot_mean": "few-shot accuracy", "knn": "k-NN accuracy",
    "probe": "linear-probe accuracy",
}  # fmt: skip
AVERAGED = ("parameters", "GFLOPs", "exaFLOPs", "tpu_v3_core_days", "images_seen", "seconds")
Lines = dict[str, list[Point]]
Bars = dict[str, dict[str, tuple[float, float]]]


def factors_of(plan: Plan) -> list[str]:
    return list(dict.fromkeys(name for trial in plan.trials for name in trial.factors))


def group_rows(rows: Sequence[Row], factors: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows grouped by their values of some factors, in the order of the table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in factors), []).append(row)
    return groups


def means(rows: Sequence[Row], plan: Plan) -> list[Row]:
    """One row for each setting: mean and deviation of the scores over seeds, and mean costs (Table 6)."""
    factors = factors_of(plan)
    lines = []
    for setting, group in group_rows(rows, factors).items():
        line: Row = dict(zip(factors, setting, strict=True)) | {"seeds": len(group)}
        for score in (name for name in SCORES if name in group[0]):
            values = [row[score] for row in group if row[score] is not None]
            e = estimate(values) if values else None
            line |= {score: e and e.mean, f"{score}_std": e and e.std}
        lines.append(line | {name: mean(row[name] for row in group) for name in AVERAGED})
    return lines


def label(setting: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in setting if value is not None) or "all"


def column(picture: Picture, study: Study) -> str:
    return study.score if picture.y == "score" else picture.y


def lines_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Lines:
    """The points of each line: x, mean over seeds, standard deviation."""
    x, y = picture.x, column(picture, study)
    usable = [r for r in select_rows(rows, picture.where) if r.get(y) is not None and r.get(x) is not None]
    lines: Lines = {}
    for setting, group in group_rows(usable, picture.lines).items():
        points = [
            (mean(r[x] for r in seeds), mean(r[y] for r in seeds), deviation([r[y] for r in seeds]))
            for seeds in group_seeds(group)
        ]
        lines[label(setting)] = sorted(points)
    return lines


def group_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows that differ only in their seed."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["trial"].rpartition(",seed=")[0], []).append(row)
    return list(groups.values())


def deviation(values: Sequence[float]) -> float:
    return estimate(values).std or 0.0


def bars_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Bars:
    """For each value of x, the mean and deviation of each setting."""
    y = column(picture, study)
    usable = [row for row in select_rows(rows, picture.where) if row.get(y) is not None]
    bars: Bars = {}
    for (x,), group in group_rows(usable, [picture.x]).items():
        bars[str(x)] = {
            label(setting): (mean(r[y] for r in seeds), deviation([r[y] for r in seeds]))
            for setting, seeds in group_rows(group, picture.lines).items()
        }
    return bars


def band_of(picture: Picture, study: Study, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """For each value of x, the lowest and highest mean of the shaded settings."""
    shaded = bars_of(replace(picture, where=picture.band), study, rows)
    centers = {x: [center for center, _ in bars.values()] for x, bars in shaded.items()}
    return {x: (min(values), max(values)) for x, values in centers.items()}


def histories(picture: Picture, study: Study, rows: Sequence[Row], out: Path) -> Lines:
    """The score of each setting over training steps, averaged over seeds."""
    y = column(picture, study)
    lines: Lines = {}
    for setting, group in group_rows(select_rows(rows, picture.where), picture.lines).items():
        by_step: dict[int, list[float]] = {}
        for row in group:
            for step, value in history(trial_folder(out, row["trial"]) / "metrics.jsonl", y):
                by_step.setdefault(step, []).append(value)
        lines[label(setting)] = [(s, mean(v), deviation(v)) for s, v in sorted(by_step.items())]
    return lines


def history(path: Path, name: str) -> list[tuple[int, float]]:
    return list({row["step"]: row[name] for row in journal_rows(path) if name in row}.items())


def similarities(picture: Picture, rows: Sequence[Row], out: Path) -> dict[str, np.ndarray]:
    """Fig. 10: similarity of the position embeddings, for the first seed of each setting.

    Users may delete the large model files; a setting without one is left out.
    """
    maps = {}
    for setting, group in group_rows(select_rows(rows, picture.where), picture.lines).items():
        files = [trial_folder(out, row["trial"]) / MODEL for row in group]
        if existing := [file for file in files if file.exists()]:
            maps[label(setting)] = position_similarity(load(existing[0]))
    return maps


def figures_of(study: Study, rows: Sequence[Row], out: Path) -> list[dict[str, Any]]:
    """Draw all figures of a study as figures/*.svg and *.png; return what the page shows of each."""
    entries: list[dict[str, Any]] = []
    for picture in study.pictures:
        if not select_rows(rows, picture.where):
            continue
        y = SCORES.get(column(picture, study), column(picture, study))
        entry: dict[str, Any] = {"title": picture.title, "kind": picture.kind, "y": y, "log_x": picture.log_x}
        entry["x"] = picture.x_label or picture.x
        drawn: dict[str, Figure] = {}
        if picture.kind == "similarity":
            entry["maps"] = similarities(picture, rows, out)
            drawn = {key: draw_similarity(values, title=key) for key, values in entry["maps"].items()}
        elif picture.kind == "differences":
            entry["differences"] = dots = dots_of(changes_from_base(study, rows), picture.x)
            if not dots:  # only the base has finished
                continue
            drawn = {"": draw_differences(dots, x_label=f"{y}, points", title=picture.title)}
        elif picture.kind == "bars":
            shaded = band_of(picture, study, rows) if picture.band else {}
            entry |= {"bars": (bars := bars_of(picture, study, rows)), "band": shaded}
            drawn = {"": draw_bars(bars, y_label=y, title=picture.title, band=shaded)}
        else:
            lines = (
                histories(picture, study, rows, out)
                if picture.kind == "history"
                else lines_of(picture, study, rows)
            )
            entry["lines"] = lines
            drawn = {"": draw_scores(lines, x_label=entry["x"], y_label=y, title=picture.title,
                                    log_x=picture.log_x)}  # fmt: skip
        stem = f"{study.name}-{len(entries) + 1}"
        entry["files"] = {name: write_figure(f, out / "figures", stem, name) for name, f in drawn.items()}
        entries.append(entry)
    return entries


def dots_of(changes: Sequence[Mapping[str, Any]], factor: str) -> Bars:
    """For each change, the mean difference on each data set and its deviation over seeds."""
    return {
        entry[factor]: {data: (e["mean"], e["std"] or 0.0) for data, e in entry["data"].items()}
        for entry in changes
    }


def write_figure(figure: Figure, folder: Path, stem: str, name: str) -> Path:
    """Write a figure as .svg and .png; return the path of the .png."""
    folder.mkdir(exist_ok=True)
    slug = "".join(letter if letter.isalnum() else "-" for letter in name)
    path = folder / (f"{stem}-{slug}.png" if slug else f"{stem}.png")
    for kind in ("svg", "png"):
        write_bytes(path.with_suffix(f".{kind}"), render(figure, kind))
    return path


def write_bytes(path: Path, content: bytes) -> None:
    replace_file(path, lambda beside: beside.write_bytes(content))


def means_row(line: Mapping[str, Any]) -> Row:
    """A row of the means as the page shows it."""
    row: Row = {}
    for name, value in line.items():
        if name in SCORES:
            std = line[f"{name}_std"]
            deviation = "" if std is None else f" ± {100 * std:.2f}"
            row[f"{SCORES[name]}, %"] = None if value is None else Number(f"{100 * value:.2f}{deviation}")
        elif not name.endswith("_std"):
            row[name] = round(value, 1) if name == "seconds" else value
    return row
