"""Few-shot accuracy: regularised least squares from frozen features to {-1, 1}, in closed form (Sec. 4.1).

The conventions are the official ones: each feature standardised by the training images' mean and standard
deviation + 1e-5, a constant feature of 100 that the penalty hardly touches, targets 1 for an image's class
and -1 for the others. A feature that no training image varies in gets no weight and so has no say.
"""

# N training images, M test images, D features, C classes; R = D + 1 or N directions, whichever is fewer

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

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
