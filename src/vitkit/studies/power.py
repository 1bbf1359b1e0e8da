"""Power analysis: how many seeds it takes to decide a claim, from the measured spread of its differences."""

import math
from dataclasses import dataclass

import numpy as np

from vitkit.studies.differences import Estimate, student

POWER = 0.8  # probability of deciding the claim that a study should have
MOST = 1000  # seeds
POINTS = 400  # of the numerical integral


@dataclass(frozen=True)
class Power:
    """What it takes to decide a claim that is still undecided.

    A number of seeds is None if even MOST of them are too few.
    """

    std: float  # of the paired differences
    detectable: float | None  # smallest true difference that the seeds at hand show; None for "equal"
    if_measured: int | None  # seeds, if the true difference is the measured one
    reference: float  # another true difference, of the size that matters
    if_reference: int | None


def analyse(e: Estimate, least: float, most: float, reference: float) -> Power | None:
    """The power analysis of a measured mean difference; None without a spread.

    least, most: a claim holds if the interval lies between them, and fails if it lies outside.
    """
    if not e.std:
        return None
    return Power(
        std=e.std,
        detectable=least + detectable(e.std, e.count) if math.isinf(most) else None,
        if_measured=seeds_needed(e.mean, e.std, least, most),
        reference=reference,
        if_reference=seeds_needed(reference, e.std, least, most),
    )


def power(mean: float, std: float, seeds: int, least: float = 0.0, most: float = math.inf) -> float:
    """The probability that the 95 % interval of so many paired differences lies inside or outside the limits.

    The differences are normal with this mean and deviation. The probability is integrated over the measured
    deviation, which varies like chi / sqrt(df). With one limit this is the power of a t-test (noncentral t).
    """
    freedom, error = seeds - 1, std / math.sqrt(seeds)
    ratios, weights = deviations(freedom)
    half = student(freedom) * error * ratios  # of the interval
    inside = normal((most - half - mean) / error) - normal((least + half - mean) / error)
    below, above = normal((least - half - mean) / error), 1 - normal((most + half - mean) / error)
    return float(weights @ (inside.clip(0) + below + above))


def deviations(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """Ratios of a measured to the true standard deviation, and their probabilities."""
    reach = 6 / math.sqrt(2 * freedom)
    low = max(0.0, 1 - reach)
    ratios = low + (np.arange(POINTS) + 0.5) * (1 + 1.2 * reach - low) / POINTS
    logs = (freedom - 1) * np.log(ratios) - freedom * ratios**2 / 2
    weights = np.exp(logs - logs.max())
    return ratios, weights / weights.sum()


def normal(values: np.ndarray) -> np.ndarray:
    """The distribution function of the normal distribution."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])


def seeds_needed(mean: float, std: float, least: float = 0.0, most: float = math.inf) -> int | None:
    """The smallest number of seeds that decides with probability POWER; None if MOST are too few."""
    enough = 2
    while power(mean, std, enough, least, most) < POWER:
        if enough >= MOST:
            return None
        enough = min(2 * enough, MOST)
    too_few = max(1, enough // 2)
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        decided = power(mean, std, middle, least, most) >= POWER
        too_few, enough = (too_few, middle) if decided else (middle, enough)
    return enough


def detectable(std: float, seeds: int) -> float:
    """The smallest true difference from a limit that so many seeds show with probability POWER."""
    low, high = 0.0, std
    while power(high, std, seeds) < POWER:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, std, seeds) >= POWER else (middle, high)
    return high
