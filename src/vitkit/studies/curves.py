"""Curves of scores over compute or data: where they cross, and what lies between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.studies.differences import by_seed, group_rows
from vitkit.studies.folder import Row, select_rows

SAMPLES = 4000  # bootstrap samples


@dataclass(frozen=True)
class Place:
    """A place on an axis with its 95 % interval: 0 is before its first point, None behind its last one."""

    at: float | None
    low: float | None
    high: float | None

    def times(self, factor: float) -> "Place":
        at, low, high = (None if x is None else factor * x for x in (self.at, self.low, self.high))
        return Place(at, low, high)


def crossing(x: Sequence[float], differences: Sequence[float]) -> float:
    """From which x on the differences stay above zero, interpolated over log x.

    0 if they are above everywhere, infinity if the last one is not.
    """
    below = [i for i, value in enumerate(differences) if value <= 0]
    if not below:
        return 0.0
    last = below[-1]
    if last == len(x) - 1:
        return math.inf
    low, high = differences[last], differences[last + 1]
    share = -low / (high - low)
    return math.exp((1 - share) * math.log(x[last]) + share * math.log(x[last + 1]))


def crossing_place(x: Sequence[float], differences: np.ndarray) -> Place:
    """The crossing of the mean differences, (seeds, x), with its interval by a bootstrap over seeds."""
    at = crossing(x, differences.mean(0).tolist())
    if len(differences) < 2:
        return Place(finite(at), 0.0, None)
    places = sorted(crossing(x, sample.tolist()) for sample in seed_samples(differences))
    low, high = places[round(0.025 * (SAMPLES - 1))], places[round(0.975 * (SAMPLES - 1))]
    return Place(finite(at), finite(low), finite(high))


def finite(x: float) -> float | None:
    return None if math.isinf(x) else x


def seed_samples(values: np.ndarray) -> np.ndarray:
    """Samples of the mean of (seeds, k) values by a bootstrap over seeds, (SAMPLES, k).

    Seeds get random normal weights, and each sample is divided by a random chi: at each of the k points, the
    samples have Student's t distribution, like all other intervals. To draw seeds with replacement instead
    gives intervals that are far too narrow for three or five of them.
    """
    seeds, rng = len(values), np.random.default_rng(0)
    center = values.mean(0)
    weights = rng.standard_normal((SAMPLES, seeds))
    scale = np.sqrt(rng.chisquare(seeds - 1, (SAMPLES, 1)) / (seeds - 1))
    return center + weights @ (values - center) / math.sqrt(seeds * (seeds - 1)) / scale


def curves_by_seed(rows: Sequence[Row], along: str, score: str) -> dict[int, dict[float, float]]:
    """For each seed: the score at each value of a column."""
    curves: dict[int, dict[float, float]] = {}
    for (x,), group in group_rows(rows, [along]).items():
        if x is not None:
            for seed, value in by_seed(group, score).items():
                curves.setdefault(seed, {})[x] = value
    return curves


def paired_curves(
    rows: Sequence[Row], left: Mapping[str, object], right: Mapping[str, object], along: str, score: str
) -> tuple[list[float], np.ndarray]:
    """The common values of a column, and the differences left minus right there, (seeds, x).

    A seed counts if it has all values that any seed has on both sides.
    """
    sides = [curves_by_seed(select_rows(rows, side), along, score) for side in (left, right)]
    x = sorted(set.intersection(*(set().union(*side.values()) for side in sides)))
    seeds = sorted(
        s for s in sides[0].keys() & sides[1].keys() if all(set(x) <= set(side[s]) for side in sides)
    )
    values = [[sides[0][seed][at] - sides[1][seed][at] for at in x] for seed in seeds]
    return x, np.array(values).reshape(len(seeds), len(x))


def score_at(curve: Mapping[float, float], x: float) -> float:
    """The score of a curve at x, interpolated over log x; beyond its ends, that of the nearest end."""
    points = sorted(curve.items())
    return float(np.interp(math.log(x), [math.log(at) for at, _ in points], [y for _, y in points]))


def compute_ratios(
    rows: Sequence[Row], left: Mapping[str, object], right: Mapping[str, object], score: str
) -> dict[int, float]:
    """For each seed: log2 of the right side's compute over the left's, at a score that both reach."""
    ratios = {}
    for seed in sorted({row["seed"] for row in rows}):
        first, second = (
            front([r for r in select_rows(rows, side) if r["seed"] == seed], score) for side in (left, right)
        )
        if first and second:
            low, high = max(first[0][1], second[0][1]), min(first[-1][1], second[-1][1])
            if low <= high:
                middle = (low + high) / 2
                ratios[seed] = math.log2(compute_at(second, middle) / compute_at(first, middle))
    return ratios


def front(rows: Sequence[Row], score: str) -> list[tuple[float, float]]:
    """(compute, best score up to there), strictly increasing: the Pareto front of a family."""
    points = sorted((r["pretrain_exaFLOPs"], r[score]) for r in rows if r.get(score) is not None)
    best: list[tuple[float, float]] = []
    for compute, value in points:
        if not best or value > best[-1][1]:
            best.append((compute, value))
    return best


def compute_at(points: Sequence[tuple[float, float]], score: float) -> float:
    """The compute at which an increasing curve reaches a score, interpolated on a log scale."""
    values = [value for _, value in points]
    return float(np.exp(np.interp(score, values, [math.log(compute) for compute, _ in points])))
