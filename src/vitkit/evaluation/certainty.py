"""How far a classifier's numbers can be trusted: calibration error, bootstrap confidence interval."""

# N images; Q bins

import numpy as np
import torch
from torch import Tensor

BINS = 15
RESAMPLES = 10_000


def calibration_error(confidence: Tensor, right: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: the sum over bins of (share of images) |accuracy - mean confidence|.

    confidence (N,) is the probability of what was said, right (N,) whether it was so. The bins have equal
    width: the q-th of Q holds the confidences in ((q-1)/Q, q/Q], the first one 0 too.
    """
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    place = torch.bucketize(confidence.double().contiguous(), edges)
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, place, right.double() - confidence.double())  # N_q (accuracy - confidence) of each
    return float(gaps.abs().sum()) / len(right)


def interval(
    right: Tensor, *, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of (N,) zeros and ones.

    A resample draws N of the images with replacement, so its number of ones is binomial with the share found:
    that number is drawn at once. Neither the order of the images nor the number of processes matters. Where
    all images are right, or none, the bootstrap knows of no spread, and both ends are the share itself.
    """
    n, ones = len(right), int(right.sum())
    if not n:
        raise ValueError("no image, so no interval")
    means = np.random.default_rng(seed).binomial(n, ones / n, resamples) / n
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
