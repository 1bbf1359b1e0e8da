"""From a table to means over seeds, fits with intervals, verdicts on claims, and figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitkit.inspection.embeddings import position_similarity
from vitkit.io.files import replace_file
from vitkit.report.figures import Point, draw_bars, draw_scores, draw_similarity, render
from vitkit.report.html import Number
from vitkit.runs.folder import MODEL
from vitkit.runs.page import rows as journal_rows
from vitkit.studies.folder import Row, chosen, folder_of
from vitkit.studies.study import Claim, Picture, Plan, Study
from vitkit.weights.load import load

STUDENT = (  # 97.5 % quantile of Student's t by degrees of freedom, from 1
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
SAMPLES = 1000  # of a bootstrap
LIKE = 1.25  # times the compute up to which two sides are compared without a word
HOLDS, FAILS, UNSEEN, UNTRIED = (
    "holds at this scale",
    "does not hold at this scale",
    "cannot be seen",
    "not tried",
)


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, with its standard deviation and its 95 % interval."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    count: int


def spread(values: Sequence[float]) -> Spread:
    """One value alone has no spread and no interval."""
    n = len(values)
    if n < 2:
        return Spread(values[0], None, None, None, n)
    middle, std = mean(values), stdev(values)
    reach = (STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96) * std / math.sqrt(n)
    return Spread(middle, std, middle - reach, middle + reach, n)


@dataclass(frozen=True)
class Law:
    """y = scale * x^exponent, or y = scale + exponent * log10 x; the exponent with a bootstrap interval."""

    kind: str
    scale: float
    exponent: float
    low: float
    high: float
    r2: float
    points: int

    def at(self, x: float) -> float:
        if self.kind == "power":
            return self.scale * x**self.exponent
        return self.scale + self.exponent * math.log10(x)


def law(x: Sequence[float], y: Sequence[float], kind: str = "power") -> Law | None:
    """A line through the logarithms, by least squares; None for fewer than three different x."""
    xs = np.log(np.asarray(x, float)) if kind == "power" else np.log10(np.asarray(x, float))
    ys = np.log(np.asarray(y, float)) if kind == "power" else np.asarray(y, float)
    if len(set(x)) < 3 or not np.isfinite(ys).all():
        return None
    slope, start = np.polyfit(xs, ys, 1)
    rest = ys - (start + slope * xs)
    total = float(((ys - ys.mean()) ** 2).sum())
    rng, slopes = np.random.default_rng(0), list[float]()
    while len(slopes) < SAMPLES:
        pick = rng.integers(0, len(xs), len(xs))
        if len(set(xs[pick])) > 1:
            slopes.append(np.polyfit(xs[pick], ys[pick], 1)[0])
    low, high = np.quantile(slopes, [0.025, 0.975])
    scale = math.exp(start) if kind == "power" else float(start)
    r2 = 1 - float((rest**2).sum()) / total if total else 1.0
    return Law(kind, scale, float(slope), float(low), float(high), r2, len(xs))


@dataclass(frozen=True)
class Verdict:
    """A claim beside what was measured."""

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


def judge(claim: Claim, rows: Sequence[Row], score: str) -> Verdict:
    """Whether a claim holds, by the interval of the difference; each seed is compared with itself."""
    score = claim.score or score
    found = list(differences(claim, rows, score).values())
    if not found and claim.measure == "compute" and all(chosen(rows, s) for s in (claim.left, claim.right)):
        return Verdict(claim.text, UNSEEN, words="there is no accuracy that both sides reach")
    if not found:
        return Verdict(claim.text, UNTRIED, words="no seed has finished both sides")
    s = spread(found)
    both = None if claim.measure == "compute" else compute_of(claim, rows, score)
    words = in_words(claim, s) + unlike(both)
    if s.low is None or s.high is None:
        return Verdict(claim.text, UNSEEN, s.mean, None, None, 1, f"{words}; one seed has no interval", both)
    outcome = decide(claim, s.low, s.high)
    return Verdict(claim.text, outcome, s.mean, s.low, s.high, s.count, words, both)


def compute_of(claim: Claim, rows: Sequence[Row], score: str) -> tuple[float, float] | None:
    """Mean exaFLOPs of pre-training of the two sides; None where they are not known."""
    sides = []
    for side in (claim.left, claim.right):
        scored = [row for row in chosen(rows, side) if row.get(score) is not None]
        found = [row["pretrain_exaFLOPs"] for row in scored if row.get("pretrain_exaFLOPs")]
        if not found:
            return None
        sides.append(mean(found))
    return sides[0], sides[1]


def unlike(both: tuple[float, float] | None) -> str:
    """In words, that two sides do not take about as much compute."""
    if both is None or max(both) <= LIKE * min(both):
        return ""
    left, right = (f"{one:,.0f}" if one >= 100 else f"{one:.3g}" for one in both)
    return f"; not of like compute: {left} against {right} exaFLOPs of pre-training"


def decide(claim: Claim, low: float, high: float) -> str:
    least = 0.0 if claim.says == "above" else -claim.margin
    most = claim.margin if claim.says == "equal" else math.inf
    if high < least or low > most:
        return FAILS
    return HOLDS if low > least and high < most else UNSEEN


def in_words(claim: Claim, s: Spread) -> str:
    reach = "" if s.low is None or s.high is None else f" [{number(claim, s.low)}, {number(claim, s.high)}]"
    what = {"score": "points", "compute": "times the compute at equal accuracy"}[claim.measure]
    margin = 100 * claim.margin
    points = f"{margin:g} point{'s' * (margin != 1)}"
    wanted = {
        "above": "",
        "not below": f"; at most {points} less is called as good",
        "equal": f"; within {points} is called equal",
    }
    return f"{number(claim, s.mean)}{reach} {what}, {s.count} seed{'s' * (s.count > 1)}{wanted[claim.says]}"


def number(claim: Claim, value: float) -> str:
    return f"{2**value:.2f}" if claim.measure == "compute" else f"{100 * value:+.2f}"


def differences(claim: Claim, rows: Sequence[Row], score: str) -> dict[int, float]:
    """For each seed that has both sides: left minus right, or the difference of their gains."""
    if claim.measure == "compute":
        return compute_ratios(claim, rows, score)
    sides = [(1.0, claim.left), (-1.0, claim.right)]
    if claim.since:
        sides += [(-1.0, claim.since[0]), (1.0, claim.since[1])]
    means = [(weight, by_seed(chosen(rows, factors), score)) for weight, factors in sides]
    seeds = set.intersection(*(set(found) for _, found in means))
    return {seed: sum(weight * found[seed] for weight, found in means) for seed in sorted(seeds)}


def by_seed(rows: Sequence[Row], score: str) -> dict[int, float]:
    seeds = {row["seed"] for row in rows if row.get(score) is not None}
    return {s: mean(r[score] for r in rows if r["seed"] == s and r.get(score) is not None) for s in seeds}


def compute_ratios(claim: Claim, rows: Sequence[Row], score: str) -> dict[int, float]:
    """For each seed: log2 of the right side's compute over the left's, at a score that both reach."""
    found = {}
    for seed in sorted({row["seed"] for row in rows}):
        left, right = (
            curve([r for r in chosen(rows, side) if r["seed"] == seed], score)
            for side in (claim.left, claim.right)
        )
        if left and right:
            low, high = max(left[0][1], right[0][1]), min(left[-1][1], right[-1][1])
            if low <= high:
                middle = (low + high) / 2
                found[seed] = math.log2(reached(right, middle) / reached(left, middle))
    return found


def curve(rows: Sequence[Row], score: str) -> list[tuple[float, float]]:
    """(compute, best score up to there), rising: what a family reaches for so much compute."""
    points = sorted((r["pretrain_exaFLOPs"], r[score]) for r in rows if r.get(score) is not None)
    risen: list[tuple[float, float]] = []
    for compute, value in points:
        if not risen or value > risen[-1][1]:
            risen.append((compute, value))
    return risen


def reached(points: Sequence[tuple[float, float]], score: float) -> float:
    """The compute at which a rising curve reaches a score, between its points by the logarithm."""
    values = [value for _, value in points]
    return float(np.exp(np.interp(score, values, [math.log(compute) for compute, _ in points])))


def laws(rows: Sequence[Row], factors: Sequence[str], score: str) -> list[dict[str, Any]]:
    """For each setting of the factors: the error as a power of compute, the score as a line over its log."""
    told: list[dict[str, Any]] = []
    scored = [row for row in rows if row.get(score) is not None and row[score] < 1]
    settings: Mapping[tuple[Any, ...], None] = dict.fromkeys(tuple(r[f] for f in factors) for r in scored)
    for setting in settings:
        part = chosen(scored, dict(zip(factors, setting, strict=True)))
        x = [row["pretrain_exaFLOPs"] for row in part]
        for kind, y in (("power", [1 - r[score] for r in part]), ("log-linear", [r[score] for r in part])):
            found = law(x, y, kind)
            if found:
                told.append(dict(zip(factors, setting, strict=True)) | asdict(found))
    return told


SCORES = {"top1": "top-1 accuracy", "fewshot_mean": "few-shot accuracy"}
AVERAGED = ("parameters", "GFLOPs", "exaFLOPs", "tpu_v3_core_days", "images_seen", "seconds")
Lines = dict[str, list[Point]]
Bars = dict[str, dict[str, tuple[float, float]]]


def factors_of(plan: Plan) -> list[str]:
    return list(dict.fromkeys(name for one in plan.trials for name in one.factors))


def settings(rows: Sequence[Row], factors: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each setting of some factors, in the order of the table."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in factors), []).append(row)
    return found


def means(rows: Sequence[Row], plan: Plan) -> list[Row]:
    """A row for each setting, over its seeds: scores with their spread, and what a run costs (Table 6)."""
    factors = factors_of(plan)
    told = []
    for setting, part in settings(rows, factors).items():
        line: Row = dict(zip(factors, setting, strict=True)) | {"seeds": len(part)}
        for score in SCORES:
            values = [row[score] for row in part if row[score] is not None]
            s = spread(values) if values else None
            line |= {score: s and s.mean, f"{score}_std": s and s.std}
        told.append(line | {name: mean(row[name] for row in part) for name in AVERAGED})
    return told


def label(setting: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in setting if value is not None) or "all"


def column(picture: Picture, study: Study) -> str:
    return study.score if picture.y == "score" else picture.y


def lines_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Lines:
    """For each line its points: x, the mean over seeds, their standard deviation."""
    y = column(picture, study)
    usable = [r for r in chosen(rows, picture.where) if r.get(y) is not None and r.get(picture.x) is not None]
    found: Lines = {}
    for setting, part in settings(usable, picture.lines).items():
        points = [
            (mean(r[picture.x] for r in group), mean(r[y] for r in group), deviation([r[y] for r in group]))
            for group in same_but_seed(part)
        ]
        found[label(setting)] = sorted(points)
    return found


def same_but_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in their seed alone."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["trial"].rpartition(",seed=")[0], []).append(row)
    return list(found.values())


def deviation(values: Sequence[float]) -> float:
    return spread(values).std or 0.0


def bars_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Bars:
    y = column(picture, study)
    usable = [row for row in chosen(rows, picture.where) if row.get(y) is not None]
    found: Bars = {}
    for (group,), part in settings(usable, [picture.x]).items():
        found[str(group)] = {
            label(setting): (mean(r[y] for r in some), deviation([r[y] for r in some]))
            for setting, some in settings(part, picture.lines).items()
        }
    return found


def band_of(picture: Picture, study: Study, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """By group the lowest and the highest mean of the settings that are shaded."""
    shaded = bars_of(replace(picture, where=picture.band), study, rows)
    ends = {group: [middle for middle, _ in some.values()] for group, some in shaded.items()}
    return {group: (min(some), max(some)) for group, some in ends.items()}


def histories(picture: Picture, study: Study, rows: Sequence[Row], out: Path) -> Lines:
    """For each setting the score as its runs went on, over seeds."""
    y = column(picture, study)
    found: Lines = {}
    for setting, part in settings(chosen(rows, picture.where), picture.lines).items():
        by_step: dict[int, list[float]] = {}
        for row in part:
            for step, value in history(folder_of(out, row["trial"]) / "metrics.jsonl", y):
                by_step.setdefault(step, []).append(value)
        found[label(setting)] = [(s, mean(v), deviation(v)) for s, v in sorted(by_step.items())]
    return found


def history(path: Path, name: str) -> list[tuple[int, float]]:
    return list({row["step"]: row[name] for row in journal_rows(path) if name in row}.items())


def similarities(picture: Picture, rows: Sequence[Row], out: Path) -> dict[str, np.ndarray]:
    """Fig. 10: how alike the position embeddings of places are, for the first seed of each setting.

    Models are large, and somebody may have deleted them: a setting that has none has no map.
    """
    found = {}
    for setting, part in settings(chosen(rows, picture.where), picture.lines).items():
        files = [folder_of(out, row["trial"]) / MODEL for row in part]
        if kept := [file for file in files if file.exists()]:
            found[label(setting)] = position_similarity(load(kept[0]))
    return found


def figures_of(study: Study, rows: Sequence[Row], out: Path) -> list[dict[str, Any]]:
    """Every picture of a study as figures/*.svg and *.png, and what a page needs to show it."""
    told: list[dict[str, Any]] = []
    for picture in study.pictures:
        if not chosen(rows, picture.where):
            continue
        y = SCORES.get(column(picture, study), column(picture, study))
        entry: dict[str, Any] = {"title": picture.title, "kind": picture.kind, "y": y, "log_x": picture.log_x}
        entry["x"] = picture.x_label or picture.x
        drawn: dict[str, Figure] = {}
        if picture.kind == "similarity":
            entry["maps"] = similarities(picture, rows, out)
            drawn = {key: draw_similarity(of, title=key) for key, of in entry["maps"].items()}
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
        stem = f"{study.name}-{len(told) + 1}"
        entry["files"] = {name: write_figure(f, out / "figures", stem, name) for name, f in drawn.items()}
        told.append(entry)
    return told


def write_figure(figure: Figure, folder: Path, stem: str, name: str) -> Path:
    """As .svg and .png; the path of the latter."""
    folder.mkdir(exist_ok=True)
    words = "".join(letter if letter.isalnum() else "-" for letter in name)
    path = folder / (f"{stem}-{words}.png" if words else f"{stem}.png")
    for kind in ("svg", "png"):
        write_bytes(path.with_suffix(f".{kind}"), render(figure, kind))
    return path


def write_bytes(path: Path, content: bytes) -> None:
    replace_file(path, lambda beside: beside.write_bytes(content))


def table6(line: Mapping[str, Any]) -> Row:
    """A row of the means as a page has it."""
    told: Row = {}
    for name, value in line.items():
        if name in SCORES:
            std = line[f"{name}_std"]
            reach = "" if std is None else f" ± {100 * std:.2f}"
            told[f"{SCORES[name]}, %"] = None if value is None else Number(f"{100 * value:.2f}{reach}")
        elif not name.endswith("_std"):
            told[name] = round(value, 1) if name == "seconds" else value
    return told
