"""Proportions of images: Wilson intervals, McNemar's test, and percentages with meaningful digits only."""

from collections.abc import Sequence
from math import ceil, log10, sqrt
from statistics import NormalDist

from vitkit.errors import Error

LEVEL = 0.95
SIGNIFICANT = 0.05
Interval = tuple[float, float]


def wilson(share: float, images: int, level: float = LEVEL) -> Interval:
    """The Wilson score interval of a proportion.

    Unlike bootstrap and normal intervals it has a non-zero width even if all or no images are correct: for 12
    of 12 it is 75.8 to 100 %.
    """
    if images < 1:
        raise Error("an interval needs at least one image, not 0", code="data.empty")
    z = NormalDist().inv_cdf((1 + level) / 2)
    scale = 1 + z * z / images
    middle = (share + z * z / (2 * images)) / scale
    half = z * sqrt(share * (1 - share) / images + z * z / (4 * images * images)) / scale
    return 0.0 if share == 0 else max(0.0, middle - half), 1.0 if share == 1 else min(1.0, middle + half)


def mean_interval(shares: Sequence[float], images: Sequence[int], level: float = LEVEL) -> Interval:
    """The interval of the mean of proportions of independent sets, by Zou and Donner's MOVER method.

    MOVER (method of variance estimates recovery) adds the squares of the Wilson half-widths.
    """
    ends = [wilson(share, count, level) for share, count in zip(shares, images, strict=True)]
    mean = sum(shares) / len(shares)
    below = sqrt(sum((share - low) ** 2 for share, (low, _) in zip(shares, ends, strict=True)))
    above = sqrt(sum((high - share) ** 2 for share, (_, high) in zip(shares, ends, strict=True)))
    return max(0.0, mean - below / len(shares)), min(1.0, mean + above / len(shares))


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided p-value of McNemar's exact test: how likely two equally good models differ at least as much.

    The arguments count the images that only the first, and only the second model classifies correctly.
    """
    total, tail, ways = first_only + second_only, 0, 1
    for k in range(min(first_only, second_only) + 1):
        tail, ways = tail + ways, ways * (total - k) // (k + 1)
    return min(1.0, 2 * tail / 2**total)  # integers, because floats would overflow


def paired_interval(first_only: int, second_only: int, images: int, level: float = LEVEL) -> Interval:
    """The interval of the second accuracy minus the first, measured on the same images.

    Bonett and Price (2012): Wald's interval after one image is added to both counts and two to all.
    """
    if images < 1:
        raise Error("an interval needs at least one image, not 0", code="data.empty")
    first, second = (first_only + 1) / (images + 2), (second_only + 1) / (images + 2)
    half = NormalDist().inv_cdf((1 + level) / 2) * sqrt(
        (first + second - (second - first) ** 2) / (images + 2)
    )
    return max(-1.0, second - first - half), min(1.0, second - first + half)


def decimals(images: int) -> int:
    """Decimal places that a single image can change: 0 up to 100 images, at most 2."""
    return min(2, max(0, ceil(log10(max(1, images))) - 2))


def percent(share: float | None, images: int) -> str:
    """A share with the decimals that its count supports; 0 % and 100 % are reserved for exactly 0 and 1."""
    if share is None:
        return "–"
    places = decimals(images)
    value = round(100 * share, places)
    if 0 < share < 1 and value in (0, 100):
        value = abs(value - 10.0**-places)
    return f"{value:.{places}f} %"


def span(interval: Sequence[float], images: int) -> str:
    """An interval with the same decimals: 65 to 99 %."""
    low, high = (f"{100 * end:.{decimals(images)}f}" for end in interval)
    return f"{low} to {high} %"


def with_interval(share: float, images: int) -> str:
    """92 % (95 % interval: 65 to 99 %)."""
    return f"{percent(share, images)} (95 % interval: {span(wilson(share, images), images)})"
