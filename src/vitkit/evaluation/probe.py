"""A linear probe on frozen features: logistic regression at many rates at once, the best one kept."""

# N training images, B of a batch, D features, C classes; K learning rates

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.evaluation.fewshot import Array, checked, spread

RATES = (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EPOCHS = 30
BATCH = 256
MOMENTUM = 0.9
HELD_OUT = 0.2
LOGITS = 2**24  # in memory at a time


@dataclass(frozen=True)
class Probe:
    """What a linear probe came to, and why this rate."""

    top1: float
    rate: float
    held_out: tuple[float, ...]  # accuracy of each rate on the part of train that was held out

    def to_json(self) -> dict[str, Any]:
        return {"top1": self.top1, "rate": self.rate, "held_out": list(self.held_out)}


@torch.no_grad()
def probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    rates: Sequence[float] = RATES,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> Probe:
    """Choose the rate on a fifth of each class of train, learn from all of train with it, test.

    Of equally good rates the smallest is chosen. Features are standardised as for few-shot accuracy.
    """
    if not rates or not all(0 < rate < float("inf") for rate in rates) or epochs < 1:
        raise Error(
            f"rates must be numbers above 0 and epochs at least 1, not {rates}, {epochs}",
            code="request.value",
        )
    train_x, train_y, test_x, test_y, classes = checked(train_x, train_y, test_x, test_y)
    mean, scale = (t.float().to(train_x.device) for t in spread(train_x.cpu().double()))
    train_x, test_x = ((x.float() - mean) / scale for x in (train_x, test_x))
    held = held_out(train_y.cpu().numpy(), seed).to(train_x.device)
    rates = sorted(rates)
    if not held.any():
        raise Error(
            "no class has two training images: none can be held out to choose a rate by",
            code="evaluation.unsupported",
        )
    weights = learn(train_x[~held], train_y[~held], classes, rates, epochs=epochs, seed=seed)
    found = share_right(weights, train_x[held], train_y[held])
    rate = rates[found.index(max(found))]
    weights = learn(train_x, train_y, classes, [rate], epochs=epochs, seed=seed)
    return Probe(share_right(weights, test_x, test_y)[0], rate, tuple(found))


def held_out(labels: np.ndarray, seed: int) -> Tensor:
    """(N,) true for a fifth of each class, at least one image and never its only one."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(members) > 1:
            held[members[: max(1, round(HELD_OUT * len(members)))]] = True
    return torch.from_numpy(held)


def learn(
    x: Tensor, y: Tensor, classes: int, rates: Sequence[float], *, epochs: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Weights (D, K, C) and biases (K, C) after SGD with momentum and a cosine from each rate to 0."""
    weight = x.new_zeros(x.shape[1], len(rates), classes)
    bias = x.new_zeros(len(rates), classes)
    speeds = [torch.zeros_like(weight), torch.zeros_like(bias)]
    factor = x.new_tensor(rates)[:, None]
    targets = F.one_hot(y, classes).to(x.dtype)
    generator = torch.Generator().manual_seed(seed)
    batches = [b for _ in range(epochs) for b in torch.randperm(len(x), generator=generator).split(BATCH)]
    for step, rows in enumerate(batches):
        rows = rows.to(x.device)
        here = x[rows]  # (B, D)
        off = (scores(here, weight, bias).softmax(-1) - targets[rows, None]) / len(rows)  # (B, K, C)
        slopes = ((here.mT @ off.flatten(1)).view_as(weight), off.sum(0))
        decay = 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        for value, speed, slope in zip((weight, bias), speeds, slopes, strict=True):
            speed.mul_(MOMENTUM).add_(slope)
            value.addcmul_(speed, factor, value=-decay)
    return weight, bias


def scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(B, K, C) of all classifiers, by one product."""
    return torch.addmm(bias.flatten(), x, weight.flatten(1)).unflatten(1, bias.shape)


def share_right(weights: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> list[float]:
    """Of each of the K classifiers."""
    weight, bias = weights
    right = torch.zeros(len(bias), dtype=torch.int64, device=x.device)
    size = max(1, LOGITS // bias.numel())
    for rows, labels in zip(x.split(size), y.split(size), strict=True):
        right += (scores(rows, weight, bias).argmax(2) == labels[:, None]).sum(0)
    return (right.double() / len(x)).tolist()
