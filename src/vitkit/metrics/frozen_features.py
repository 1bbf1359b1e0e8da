"""What frozen features are worth: few-shot least squares (Sec. 4.1), nearest neighbours, a linear probe."""

# N training images, M test images, D features, C classes; R = D + 1 or N directions, whichever is fewer
# N training images, M test images, D features, C classes
# N training images, B of a batch, D features, C classes; K learning rates

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error

L2 = 2.0**10
GRID = tuple(2.0**power for power in range(-10, 20))
CONSTANT = 100.0
EPSILON = 1e-5
ROWS = 8192  # test images at a time, in double precision
Array = Tensor | np.ndarray


class Frozen(NamedTuple):
    """Features and labels of training and test images, checked; labels are numbers from 0 without gaps."""

    train_x: Tensor  # (N, D)
    train_y: Tensor  # (N,)
    test_x: Tensor  # (M, D)
    test_y: Tensor  # (M,)
    classes: int


class Solution(NamedTuple):
    """The weights for every penalty at once: left @ diag(1 / (values + l2)) @ right."""

    left: Tensor  # (D + 1, R)
    values: Tensor  # (R,)
    right: Tensor  # (R, C)


def fewshot(train_x: Array, train_y: Array, test_x: Array, test_y: Array, l2: float = L2) -> float:
    """The share of the test images that is right, learned in closed form from features (N, D) and labels."""
    return fewshot_grid(train_x, train_y, test_x, test_y, (l2,))[0]


def fewshot_grid(
    train_x: Array, train_y: Array, test_x: Array, test_y: Array, grid: Sequence[float] = GRID
) -> list[float]:
    """The same for many penalties, at the price of one: a single eigendecomposition serves them all."""
    if not all(0 < l2 < float("inf") for l2 in grid):
        raise Error(
            f"l2 must be a number above 0, not {', '.join(f'{l2:g}' for l2 in grid)}", code="request.value"
        )
    train_x, train_y, test_x, test_y, classes = checked(train_x, train_y, test_x, test_y)
    x = train_x.cpu().double()
    mean, scale = spread(x)
    targets = 2.0 * F.one_hot(train_y.cpu(), classes).double() - 1
    solution = solve(with_constant((x - mean) / scale), targets)
    weights = [solution.right / (solution.values + l2)[:, None] for l2 in grid]  # (R, C), after the left side
    alone = len(grid) == 1  # then a single product for each image is less than two
    left = solution.left @ weights[0] if alone else solution.left
    device = test_x.device if test_x.is_cuda else "cpu"  # others may not have double precision
    inward = (left[:-1] / scale[:, None]).to(device)  # from features as they are, not standardised
    constant = (CONSTANT * left[-1] - mean / scale @ left[:-1]).to(device)
    weights, labels = [weight.to(device) for weight in weights], test_y.to(device)
    right = torch.zeros(len(grid), dtype=torch.int64, device=device)
    for at in range(0, len(test_x), ROWS):
        inside = test_x[at : at + ROWS].to(device).double() @ inward + constant  # (M, C) alone, else (M, R)
        for i, weight in enumerate(weights):
            scores = inside if alone else inside @ weight
            right[i] += (scores.argmax(1) == labels[at : at + ROWS]).sum()
    return (right.double() / len(test_x)).tolist()


def solve(x: Tensor, y: Tensor) -> Solution:
    """The W that minimise |X W - Y|^2 + l2 |W|^2, by whichever form has the smaller matrix."""
    return dual(x, y) if x.shape[0] < x.shape[1] else primal(x, y)


def primal(x: Tensor, y: Tensor) -> Solution:
    """W = (X'X + l2)^-1 X'Y."""
    values, vectors = torch.linalg.eigh(x.mT @ x)
    return Solution(vectors, values.clamp(min=0), vectors.mT @ (x.mT @ y))


def dual(x: Tensor, y: Tensor) -> Solution:
    """W = X' (XX' + l2)^-1 Y."""
    values, vectors = torch.linalg.eigh(x @ x.mT)
    return Solution(x.mT @ vectors, values.clamp(min=0), vectors.mT @ y)


def spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and divisor of each feature; infinite where all are equal, so that no rounding speaks there."""
    same = (x == x[0]).all(0)
    return x.mean(0), (x.std(0, correction=0) + EPSILON).masked_fill(same, float("inf"))


def with_constant(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=CONSTANT)


def checked(train_x: Array, train_y: Array, test_x: Array, test_y: Array) -> Frozen:
    """What may be learned from, or an error that says what is wrong with it."""
    xs = {"train": torch.as_tensor(train_x), "test": torch.as_tensor(test_x)}
    ys = {"train": torch.as_tensor(train_y), "test": torch.as_tensor(test_y)}
    for part, x in xs.items():
        y = ys[part]
        if x.ndim != 2 or not x.is_floating_point() or y.shape != x.shape[:1] or y.is_floating_point():
            shapes = f"{x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
            raise Error(
                f"{part}: give float features (images, width) and a class number each, not {shapes}",
                code="request.value",
            )
        if not x.numel():
            raise Error(f"{part}: no features of any image", code="data.empty")
        wrong = (~x.isfinite()).any(1)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise Error(
                f"{part}: the features of {int(wrong.sum())} of {len(x)} images are not finite numbers, "
                f"the first those of image {first}; the model or its weights are broken",
                code="weights.values",
            )
    if xs["train"].shape[1] != xs["test"].shape[1]:
        raise Error(
            f"features of width {xs['train'].shape[1]} to train, {xs['test'].shape[1]} to test",
            code="request.value",
        )
    known, train_labels = ys["train"].unique(return_inverse=True)
    if len(known) < 2:
        raise Error(
            f"every training image is of class {int(known[0])}; at least two classes are needed",
            code="data.classes",
        )
    strange = sorted(set(ys["test"].unique().tolist()) - set(known.tolist()))
    if strange:
        raise Error(
            f"classes {strange[:5]} are in the test images but not in the training images",
            code="data.classes",
        )
    if not (xs["train"] != xs["train"][0]).any():
        raise Error(
            "the features of all training images are the same: the model does not distinguish any images",
            code="evaluation.unsupported",
        )
    test_labels = torch.searchsorted(known, ys["test"].contiguous())
    return Frozen(xs["train"], train_labels, xs["test"], test_labels, len(known))


def choose_shots(
    labels: np.ndarray,
    shots: int,
    *,
    seed: int = 0,
    usable: np.ndarray | None = None,
    names: Sequence[str] = (),
) -> np.ndarray:
    """(C, shots): of each class so many images by number; with one seed, fewer shots lie within more.

    Each class is shuffled by default_rng(seed), one after the other. usable (N,): where false, an image is
    passed over.
    """
    if shots < 1:
        raise Error(f"shots must be at least 1, not {shots}", code="request.value")
    rng = np.random.default_rng(seed)
    short = labels.astype(np.min_scalar_type(labels.max(initial=0)))  # two bytes are sorted in no time
    order = np.argsort(short, kind="stable")  # not a search for each class, of which there may be 21,000
    known, starts = np.unique(short[order], return_index=True)
    chosen = np.empty((len(known), shots), dtype=np.int64)
    for row, (start, stop) in enumerate(pairwise([*starts, len(order)])):
        members = rng.permutation(order[start:stop])
        members = members if usable is None else members[usable[members]]
        if len(members) < shots:
            name = repr(names[known[row]]) if len(names) else known[row]
            raise Error(
                f"class {name} has {len(members)} usable training images, fewer than {shots} shots",
                code="evaluation.unsupported",
            )
        chosen[row] = members[:shots]
    return chosen


def best_l2(accuracies: np.ndarray) -> int:
    """The column of a table (data sets, penalties) with the best mean rank over its rows.

    Equal accuracies share their ranks; of equal mean ranks the higher mean accuracy counts, then the stronger
    penalty.
    """
    higher = (accuracies[:, None, :] > accuracies[:, :, None]).sum(2)
    equal = (accuracies[:, None, :] == accuracies[:, :, None]).sum(2)
    ranks = (higher + (equal - 1) / 2).mean(0)
    best = np.lexsort((-np.arange(len(ranks)), -accuracies.mean(0), ranks))
    return int(best[0])


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
