"""Scaling laws: fits of scores over compute, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitkit.studies.differences import group_rows, student
from vitkit.studies.folder import Row

SAMPLES = 1000  # bootstrap samples


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


def prediction(
    x: Sequence[float], y: Sequence[float], at: float, count: int = 1
) -> tuple[float, float, float] | None:
    """What a power law says of the mean of `count` further values at x, with its 95 % prediction interval.

    The interval is that of a straight line in log space. None if the law cannot be fitted.
    """
    xs, ys = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    if len(set(x)) < 3 or not np.isfinite(ys).all():
        return None
    slope, intercept = np.polyfit(xs, ys, 1)
    residuals = ys - (intercept + slope * xs)
    freedom, distance = len(xs) - 2, math.log(at) - float(xs.mean())
    deviation = math.sqrt(float((residuals**2).sum()) / freedom)
    error = deviation * math.sqrt(
        1 / count + 1 / len(xs) + distance**2 / float(((xs - xs.mean()) ** 2).sum())
    )
    center, margin = float(intercept + slope * math.log(at)), student(freedom) * error
    return math.exp(center), math.exp(center - margin), math.exp(center + margin)


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
