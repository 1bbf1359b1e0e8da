"""What a table says: means over seeds, fits with intervals, and whether a claim holds at this scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from vitkit.studies.study import Claim
from vitkit.studies.table import Row, chosen

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
