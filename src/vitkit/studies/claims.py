"""Verdicts on claims: whether the intervals of measured differences confirm or contradict them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from vitkit.studies.curves import compute_at, curve
from vitkit.studies.differences import Estimate, by_seed, estimate
from vitkit.studies.folder import Row, select_rows
from vitkit.studies.study import Claim

SIMILAR_COMPUTE = 1.25  # ratio up to which two sides count as equal in compute
HOLDS, FAILS, INCONCLUSIVE, NOT_TESTED = (
    "holds at this scale",
    "does not hold at this scale",
    "cannot be seen",
    "not tried",
)


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
