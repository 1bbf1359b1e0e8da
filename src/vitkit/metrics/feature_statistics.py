"""Statistics that show whether features have collapsed: standard deviation and effective rank."""

# N images, D features

import torch
import torch.nn.functional as F
from torch import Tensor


def feature_std(x: Tensor) -> Tensor:
    """The standard deviation of features (N, D): 0 if all are equal, 1 if they point in all directions alike.

    Of L2-normalised features, and times the square root of D (Chen and He, 2021).
    """
    unit = F.normalize(x.float(), dim=1)
    return unit.std(dim=0, correction=0).mean() * x.shape[1] ** 0.5


def effective_rank(x: Tensor) -> float:
    """The effective rank of centred features (N, D): the exponential of the entropy of their singular values.

    As Roy and Vetterli (2007) define it: between 1 and min(N - 1, D); 0 if all features are equal.
    """
    centred = x.double() - x.double().mean(dim=0)
    values = torch.linalg.svdvals(centred)
    total = values.sum()
    if not total > 1e-12 * max(1.0, float(x.abs().max())):
        return 0.0
    share = values[values > 0] / total
    return float((-(share * share.log()).sum()).exp())
