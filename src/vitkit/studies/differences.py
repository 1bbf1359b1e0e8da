"""Means over seeds with their intervals, and the difference of each change from the base of a study."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from vitkit.studies.folder import Row, select_rows
from vitkit.studies.study import Study

STUDENT = (  # 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table by its expansion around the normal quantile."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard deviation and 95 % interval."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    count: int

    @property
    def outcome(self) -> str:
        """What the interval says about a difference."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "inconclusive"
        return "better" if self.low > 0 else "worse"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its interval by Student's t; a single value has no deviation and no interval."""
    n = len(values)
    if n < 2:
        return Estimate(values[0], None, None, None, n)
    center, std = mean(values), stdev(values)
    margin = student(n - 1) * std / math.sqrt(n)
    return Estimate(center, std, center - margin, center + margin, n)


def by_seed(rows: Sequence[Row], score: str) -> dict[int, float]:
    """The mean score of each seed."""
    seeds = {row["seed"] for row in rows if row.get(score) is not None}
    return {s: mean(r[score] for r in rows if r["seed"] == s and r.get(score) is not None) for s in seeds}


def by_seed_at_best(rows: Sequence[Row], factor: str, score: str) -> dict[int, float]:
    """The score of each seed at the best value of a factor, such as the learning rate.

    The value is chosen by the mean of the other seeds, so that the choice does not flatter the score.
    """
    values = {value: by_seed(group, score) for (value,), group in group_rows(rows, [factor]).items()}
    seeds = set.intersection(*(set(scores) for scores in values.values())) if values else set[int]()
    chosen = {}
    for seed in seeds:
        others = sorted(seeds - {seed}) or [seed]
        best = max(values, key=lambda value: mean(values[value][other] for other in others))
        chosen[seed] = values[best][seed]
    return chosen


def best_value(rows: Sequence[Row], factor: str, score: str) -> Any:
    """The value of a factor with the best mean score."""
    groups = group_rows([row for row in rows if row.get(score) is not None], [factor])
    return max(groups, key=lambda value: mean(row[score] for row in groups[value]))[0]


def changes_from_base(study: Study, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each change, the difference of its score from the base: on each data set and on average.

    Differences are paired by seed. The average is over the data sets on which the change was run, and over
    the seeds that have all of them. The best change comes first.
    """
    (factor, base), entries = next(iter(study.base.items())), list[dict[str, Any]]()
    for change in dict.fromkeys(row[factor] for row in rows if row[factor] != base):
        paired: dict[str, dict[int, float]] = {}
        for data in dict.fromkeys(row["data"] for row in rows):
            left, right = (
                by_seed(select_rows(rows, {factor: value, "data": data}), study.score)
                for value in (change, base)
            )
            if common := sorted(left.keys() & right.keys()):
                paired[data] = {seed: left[seed] - right[seed] for seed in common}
        complete = set.intersection(*map(set, paired.values())) if paired else set[int]()
        if complete:
            average = estimate([mean(by[seed] for by in paired.values()) for seed in sorted(complete)])
            each = {data: asdict(estimate(list(by.values()))) for data, by in paired.items()}
            entries.append(
                {factor: change, "outcome": average.outcome, "mean": asdict(average), "data": each}
            )
    return sorted(entries, key=lambda entry: -entry["mean"]["mean"])


def group_rows(rows: Sequence[Row], factors: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows grouped by their values of some factors, in the order of the table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in factors), []).append(row)
    return groups
