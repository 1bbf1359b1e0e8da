"""Shares of counted images: Wilson intervals, a paired test, and as many digits as the count supports."""

from collections.abc import Sequence
from math import ceil, log10, sqrt
from statistics import NormalDist

from vitkit.errors import Error

LEVEL = 0.95
SIGNIFICANT = 0.05
Interval = tuple[float, float]


def wilson(share: float, images: int, level: float = LEVEL) -> Interval:
    """The Wilson score interval of a share of so many images.

    Unlike the bootstrap and the usual normal interval it has a width where all images are right, or none:
    12 of 12 are 75.8 to 100 %.
    """
    if images < 1:
        raise Error("an interval needs one image at least, not 0", code="data.empty")
    z = NormalDist().inv_cdf((1 + level) / 2)
    scale = 1 + z * z / images
    middle = (share + z * z / (2 * images)) / scale
    half = z * sqrt(share * (1 - share) / images + z * z / (4 * images * images)) / scale
    return 0.0 if share == 0 else max(0.0, middle - half), 1.0 if share == 1 else min(1.0, middle + half)


def mean_interval(shares: Sequence[float], images: Sequence[int], level: float = LEVEL) -> Interval:
    """The interval of the mean of shares of different sets: their Wilson half-widths add up as variances do.

    (Zou and Donner's method of variance estimates recovery.)
    """
    ends = [wilson(share, count, level) for share, count in zip(shares, images, strict=True)]
    mean = sum(shares) / len(shares)
    below = sqrt(sum((share - low) ** 2 for share, (low, _) in zip(shares, ends, strict=True)))
    above = sqrt(sum((high - share) ** 2 for share, (_, high) in zip(shares, ends, strict=True)))
    return max(0.0, mean - below / len(shares)), min(1.0, mean + above / len(shares))


def mcnemar(first_only: int, second_only: int) -> float:
    """McNemar's exact p-value, two-sided: how likely two equally good models differ at least so unevenly.

    The arguments count the images that only the first, and only the second of two models has right.
    """
    total, tail, ways = first_only + second_only, 0, 1
    for k in range(min(first_only, second_only) + 1):
        tail, ways = tail + ways, ways * (total - k) // (k + 1)
    return min(1.0, 2 * tail / 2**total)  # of integers, which do not overflow


def decimals(images: int) -> int:
    """Digits behind the point that one image more or less would change: 0 up to 100 images, at most 2."""
    return min(2, max(0, ceil(log10(max(1, images))) - 2))


def percent(share: float | None, images: int) -> str:
    """A share with the digits that its count supports; 100 % and 0 % only where all or none are right."""
    if share is None:
        return "–"
    places = decimals(images)
    shown = round(100 * share, places)
    if 0 < share < 1 and shown in (0, 100):
        shown = abs(shown - 10.0**-places)
    return f"{shown:.{places}f} %"


def span(interval: Sequence[float], images: int) -> str:
    """An interval with the same digits: 65 to 99 %."""
    low, high = (f"{100 * end:.{decimals(images)}f}" for end in interval)
    return f"{low} to {high} %"


def with_interval(share: float, images: int) -> str:
    """92 % (95 % interval: 65 to 99 %)."""
    return f"{percent(share, images)} (95 % interval: {span(wilson(share, images), images)})"
