"""k nearest neighbours on frozen features: cosine similarity, votes weighted by a temperature."""

# N training images, M test images, D features, C classes

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.evaluation.fewshot import Array, checked

TEMPERATURE = 0.07
SIMILARITIES = 2**24  # in memory at a time


@torch.no_grad()
def neighbours(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    k: int = 20,
    temperature: float = TEMPERATURE,
) -> float:
    """The share of the test images whose k nearest training images vote for the right class.

    A vote weighs exp(similarity / temperature). Features of length 0 are similar to none, with 0. Of classes
    with equally many votes the first wins.
    """
    train_x, train_y, test_x, test_y, classes = checked(train_x, train_y, test_x, test_y)
    if not 1 <= k <= len(train_x):
        raise Error(
            f"{k} neighbours among {len(train_x)} training images; give 1 to {len(train_x)}",
            code="request.value",
        )
    if not 0 < temperature < float("inf"):
        raise Error(f"the temperature must be a number above 0, not {temperature}", code="request.value")
    known = unit(train_x)  # (N, D)
    right = 0
    for rows, labels in zip(*(t.split(max(1, SIMILARITIES // len(known))) for t in (test_x, test_y)),
                            strict=True):  # fmt: skip
        near = (unit(rows) @ known.mT).topk(k, dim=1)  # (M, k)
        weights = ((near.values - near.values[:, :1]) / temperature).exp()  # the nearest has 1
        votes = weights.new_zeros(len(rows), classes).scatter_add_(1, train_y[near.indices], weights)
        right += int((votes.argmax(1) == labels).sum())
    return right / len(test_x)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=1)
