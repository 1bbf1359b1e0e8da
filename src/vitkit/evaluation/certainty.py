"""How far a classifier's numbers can be trusted: calibration error, confidence interval."""

# N images; Q bins

import torch
from torch import Tensor

from vitkit.proportions import LEVEL, Interval, wilson

BINS = 15


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


def interval(right: Tensor, *, level: float = LEVEL) -> Interval:
    """The Wilson interval of the mean of (N,) zeros and ones."""
    return wilson(int(right.sum()) / max(1, len(right)), len(right), level)
