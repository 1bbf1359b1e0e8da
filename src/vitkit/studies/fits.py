"""Scaling laws: fits of scores over compute, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitkit.studies.differences import group_rows, student
from vitkit.studies.folder import Row


@dataclass(frozen=True)
class Law:
    """A fit y = scale * x^exponent (power) or y = scale + exponent * log10 x (log-linear).

    low, high: 95 % interval of the exponent, by Student's t.
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


@dataclass(frozen=True)
class Line:
    """A straight line by least squares."""

    slope: float
    intercept: float
    deviation: float  # of the points from it
    squares: float  # sum over x around their mean
    freedom: int


def straight_line(x: np.ndarray, y: np.ndarray) -> Line:
    slope, intercept = map(float, np.polyfit(x, y, 1))
    freedom, errors = len(x) - 2, float(((y - intercept - slope * x) ** 2).sum())
    squares = float(((x - x.mean()) ** 2).sum())
    return Line(slope, intercept, math.sqrt(errors / freedom), squares, freedom)


def law(x: Sequence[float], y: Sequence[float], kind: str = "power") -> Law | None:
    """Fit a law by least squares in log space; None if x has fewer than three distinct values."""
    xs = np.log(np.asarray(x, float)) if kind == "power" else np.log10(np.asarray(x, float))
    ys = np.log(np.asarray(y, float)) if kind == "power" else np.asarray(y, float)
    if len(set(x)) < 3 or not np.isfinite(ys).all():
        return None
    line = straight_line(xs, ys)
    margin = student(line.freedom) * line.deviation / math.sqrt(line.squares)
    total = float(((ys - ys.mean()) ** 2).sum())
    scale = math.exp(line.intercept) if kind == "power" else line.intercept
    r2 = 1 - line.deviation**2 * line.freedom / total if total else 1.0
    return Law(kind, scale, line.slope, line.slope - margin, line.slope + margin, r2, len(xs))


def prediction(
    x: Sequence[float], y: Sequence[float], at: float, count: int = 1
) -> tuple[float, float, float] | None:
    """What a power law says of the mean of `count` further values at x, with its 95 % prediction interval.

    The interval is that of a straight line in log space. None if the law cannot be fitted.
    """
    xs, ys = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    if len(set(x)) < 3 or not np.isfinite(ys).all():
        return None
    line, distance = straight_line(xs, ys), math.log(at) - float(xs.mean())
    error = line.deviation * math.sqrt(1 / count + 1 / len(xs) + distance**2 / line.squares)
    center, margin = line.intercept + line.slope * math.log(at), student(line.freedom) * error
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
