"""Curves of scores over compute."""

import math
from collections.abc import Sequence

import numpy as np

from vitkit.studies.folder import Row


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
