"""Verdicts on claims: whether the intervals of measured differences confirm or contradict them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import numpy as np

from vitkit.studies.curves import (
    Place,
    compute_ratios,
    crossing_place,
    curves_by_seed,
    paired_curves,
    score_at,
)
from vitkit.studies.differences import Estimate, best_value, by_seed, by_seed_at_best, estimate, group_rows
from vitkit.studies.folder import Row, select_rows
from vitkit.studies.power import MOST, Power, analyse
from vitkit.studies.study import Claim

SIMILAR_COMPUTE = 1.25  # ratio up to which two sides count as equal in compute
TWICE = 1.0  # the ratio of compute, as log2, whose detection a power analysis plans
HOLDS, FAILS, INCONCLUSIVE, NOT_TESTED = (
    "holds at this scale",
    "does not hold at this scale",
    "inconclusive",
    "not tested yet",
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
    words: str = ""  # the measurement, and what it takes to decide
    compute: tuple[float, float] | None = None  # mean exaFLOPs of pre-training, left and right
    power: Power | None = None  # of an undecided claim
    place: Place | None = None  # of a crossing, or how many times the data
    curve: tuple[tuple[float, Estimate], ...] = ()  # the differences along a column
    needed: str = ""  # the end of `words`: what it takes to decide

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_claim(claim: Claim, rows: Sequence[Row], score: str) -> Verdict:
    """Test a claim by the confidence interval of the difference, paired by seed."""
    measures = {"score": of_differences, "compute": of_differences, "crossing": of_crossing, "data": of_worth}
    return measures[claim.measure](claim, rows, claim.score or score)


def of_differences(claim: Claim, rows: Sequence[Row], score: str) -> Verdict:
    """The verdict on a difference of scores, or on a ratio of compute."""
    values = list(differences(claim, rows, score).values())
    if not values:
        finished = all(select_rows(rows, side) for side in (claim.left, claim.right or {}))
        if claim.measure == "compute" and finished:
            return Verdict(claim.text, INCONCLUSIVE, words="no accuracy is reached by both sides")
        missing = "these trials did not measure it" if finished else "no seed has finished on both sides"
        return Verdict(claim.text, NOT_TESTED, words=missing)
    e = estimate(values)
    compute = None if claim.measure == "compute" else compute_of(claim, rows, score)
    outcome = decide(e, *claim.limits)
    plan = analyse(e, *claim.limits, reference(claim)) if outcome == INCONCLUSIVE else None
    text, needed = describe(claim, e) + compute_note(compute), power_note(claim, e, plan)
    text += best_note(claim, rows, score)
    words = text + needed
    return Verdict(claim.text, outcome, e.mean, e.low, e.high, e.count, words, compute, plan, needed=needed)


def of_crossing(claim: Claim, rows: Sequence[Row], score: str) -> Verdict:
    """The verdict on two curves: the left one is below the right one at first, and above it at last."""
    x, values = paired_curves(rows, claim.left, claim.right or {}, claim.along, score)
    if len(x) < 2 or not len(values):
        return Verdict(claim.text, NOT_TESTED, words="no seed has finished two places of both sides")
    curve = tuple((at, estimate(values[:, i].tolist())) for i, at in enumerate(x))
    (_, first), (_, last) = curve[0], curve[-1]
    ends = [decide(negative(first), 0.0), decide(last, 0.0)]
    outcome = FAILS if FAILS in ends else HOLDS if set(ends) == {HOLDS} else INCONCLUSIVE
    place = crossing_place(x, values)
    names = [f"at {number(end)}" for end in (x[0], x[-1])]
    text = f"{interval(claim, first)} {names[0]} and {interval(claim, last)} {claim.unit} {names[1]}, "
    text += f"{count(last)}; they cross at {place_text(place, x)}"
    plans, needed = list[Power](), ""
    if outcome == INCONCLUSIVE:
        for e, sign, name in ((first, -1.0, names[0]), (last, 1.0, names[1])):
            toward = e if sign > 0 else negative(e)
            if decide(toward, 0.0) == INCONCLUSIVE and (plan := analyse(toward, *claim.limits, claim.margin)):
                needed += power_note(claim, e, plan, name, sign)
                plans.append(plan)
    widest = max(plans, key=lambda plan: plan.std, default=None)
    return Verdict(
        claim.text, outcome, last.mean, last.low, last.high, last.count, text + needed, None, widest, place,
        curve, needed,
    )  # fmt: skip


def of_worth(claim: Claim, rows: Sequence[Row], score: str) -> Verdict:
    """The verdict on how many times the data the left side is worth, on the curve of the right side."""
    level_rows = select_rows(rows, claim.left)
    start = next((row[claim.along] for row in level_rows if row.get(claim.along)), None)
    level = by_seed(level_rows, score)
    curves = curves_by_seed(select_rows(rows, claim.right or {}), claim.along, score)
    x = sorted(set().union(*curves.values()))
    seeds = sorted(seed for seed in level if set(x) <= set(curves.get(seed, {})))
    if start is None or len(x) < 2 or not seeds:
        return Verdict(claim.text, NOT_TESTED, words="no seed has finished both sides on two amounts of data")
    values = np.array([[curves[seed][at] - level[seed] for at in x] for seed in seeds])
    place = crossing_place(x, values).times(1 / start)
    e = estimate([level[seed] - score_at(curves[seed], claim.least * start) for seed in seeds])
    outcome = decide(e, 0.0)
    plan = analyse(e, 0.0, np.inf, claim.margin) if outcome == INCONCLUSIVE else None
    text = f"worth {place_text(place, [at / start for at in x])} times the data; "
    text += f"{describe(claim, e)} ahead of {claim.least:g} times the data"
    needed = power_note(claim, e, plan)
    curve = tuple((at / start, negative(estimate(values[:, i].tolist()))) for i, at in enumerate(x))
    words = text + needed
    return Verdict(
        claim.text, outcome, e.mean, e.low, e.high, e.count, words, None, plan, place, curve, needed
    )


def negative(e: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (e.high, e.low))
    return Estimate(-e.mean, e.std, low, high, e.count)


def compute_of(claim: Claim, rows: Sequence[Row], score: str) -> tuple[float, float] | None:
    """Mean exaFLOPs of pre-training of the two sides; None if unknown."""
    sides = []
    for side in (claim.left, claim.right):
        scored = [row for row in select_rows(rows, side or {}) if row.get(score) is not None]
        exaflops = [row["pretrain_exaFLOPs"] for row in scored if row.get("pretrain_exaFLOPs")]
        if not exaflops or side is None:
            return None
        sides.append(mean(exaflops))
    return sides[0], sides[1]


def compute_note(compute: tuple[float, float] | None) -> str:
    """A note if the compute of the two sides differs."""
    if compute is None or max(compute) <= SIMILAR_COMPUTE * min(compute):
        return ""
    left, right = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in compute)
    return f"; different compute: {left} against {right} exaFLOPs of pre-training"


def best_note(claim: Claim, rows: Sequence[Row], score: str) -> str:
    """The best value of each side, over all seeds, where each side is taken at its best."""
    if not claim.best or claim.right is None:
        return ""
    left, right = (
        best_value(select_rows(rows, side), claim.best, score) for side in (claim.left, claim.right)
    )
    return f"; best {claim.best}: {left} against {right}"


def decide(e: Estimate, least: float, most: float = np.inf) -> str:
    """The outcome of a claim whose difference should lie between two limits."""
    if e.low is None or e.high is None:
        return INCONCLUSIVE
    if e.high < least or e.low > most:
        return FAILS
    return HOLDS if e.low > least and e.high < most else INCONCLUSIVE


def describe(claim: Claim, e: Estimate) -> str:
    """The measured difference with its interval and the criterion, in one line."""
    unit = "times the compute at equal accuracy" if claim.measure == "compute" else claim.unit
    margin = 100 * claim.margin
    points = f"{margin:g} point{'s' * (margin != 1)}"
    criterion = {
        "above": "",
        "not below": f"; at most {points} less counts as good",
        "equal": f"; within {points} counts as equal",
    }[claim.relation]
    return f"{interval(claim, e)} {unit}, {count(e)}{criterion}"


def count(e: Estimate) -> str:
    return f"{e.count} seeds" if e.count > 1 else "1 seed; one seed has no interval"


def interval(claim: Claim, e: Estimate) -> str:
    """A mean with its interval."""
    if e.low is None or e.high is None:
        return format_value(claim, e.mean)
    return f"{format_value(claim, e.mean)} [{format_value(claim, e.low)}, {format_value(claim, e.high)}]"


def reference(claim: Claim) -> float:
    """The true difference for which a study of an undecided claim should have enough seeds."""
    if claim.relation != "above":
        return 0.0
    return TWICE if claim.measure == "compute" else claim.margin


def power_note(claim: Claim, e: Estimate, plan: Power | None, where: str = "", sign: float = 1.0) -> str:
    """What it takes to decide a claim: seeds for two sizes of the difference, and what these seeds show."""
    if plan is None:
        return ""
    measured, other = (
        f"more than {MOST:,}" if n is None else f"{n:,}" for n in (plan.if_measured, plan.if_reference)
    )
    value = format_value(claim, sign * plan.reference)
    place = f" {where}" if where else ""
    text = f"; to decide it{place} with 80 % power: {measured} seeds if the true value is the measured one, "
    text += f"{other} if it is {value}"
    if plan.detectable is None:
        return text
    return text + f"; {e.count} seeds would show {format_value(claim, sign * plan.detectable)}"


def place_text(place: Place, x: Sequence[float]) -> str:
    """A place with its interval, which may lie beyond the first or the last value measured."""

    def text(value: float | None) -> str:
        if not value:
            return f"> {number(x[-1])}" if value is None else f"< {number(x[0])}"
        return number(value)

    return f"{text(place.at)} [{text(place.low)}, {text(place.high)}]"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_value(claim: Claim, value: float) -> str:
    return f"{2**value:.2f}" if claim.measure == "compute" else f"{100 * value + 0.0:+.2f}"


def differences(claim: Claim, rows: Sequence[Row], score: str) -> dict[int, float]:
    """For each seed that has both sides: left minus right, or the difference of their gains."""
    if claim.measure == "compute":
        return compute_ratios(rows, claim.left, claim.right or {}, score)

    def scores(side: Mapping[str, Any]) -> dict[int, float]:
        chosen = select_rows(rows, side)
        if not claim.best:
            return by_seed(chosen, score)
        several = len(group_rows(chosen, [claim.best])) > 1  # with one value, nothing is chosen
        return by_seed_at_best(chosen, claim.best, score) if several else {}

    sides = [(1.0, claim.left)] + ([(-1.0, claim.right)] if claim.right is not None else [])
    if claim.baseline:
        sides += [(-1.0, claim.baseline[0]), (1.0, claim.baseline[1])]
    means = [(weight, scores(side)) for weight, side in sides]
    seeds = set.intersection(*(set(values) for _, values in means))
    return {seed: sum(weight * values[seed] for weight, values in means) for seed in sorted(seeds)}
