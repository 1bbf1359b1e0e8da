"""Evaluation of frozen features: few-shot least squares (Sec. 4.1), k nearest neighbours, a linear probe."""

# N training images, M test images, B images per batch, D features, C classes, K learning rates
# R = min(D + 1, N): the rank of the least-squares problem

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error

L2 = 2.0**10
GRID = tuple(2.0**power for power in range(-10, 20))
SCALES = tuple(2.0 ** (power / 2) for power in range(-4, 13))  # of logits, from 1/4 to 64
HEAD_GRID = tuple(2.0**power for power in range(8, 13))  # below 256, leave-one-out misleads for a few images
HEAD_L2 = 2.0**9  # where a class has one image and leave-one-out says nothing
CONSTANT = 100.0
EPSILON = 1e-5
ROWS = 8192  # test images processed at a time, in double precision
Array = Tensor | np.ndarray


class FeatureSplits(NamedTuple):
    """Validated features and labels of training and test images; labels are 0 to C - 1."""

    train_x: Tensor  # (N, D)
    train_y: Tensor  # (N,)
    test_x: Tensor  # (M, D)
    test_y: Tensor  # (M,)
    classes: int


class Solution(NamedTuple):
    """The ridge regression weights as a function of l2: left @ diag(1 / (values + l2)) @ right."""

    left: Tensor  # (D + 1, R)
    values: Tensor  # (R,)
    right: Tensor  # (R, C)


def fewshot(train_x: Array, train_y: Array, test_x: Array, test_y: Array, l2: float = L2) -> float:
    """Test accuracy of a linear classifier fitted in closed form to features (N, D) and labels (N,)."""
    return fewshot_grid(train_x, train_y, test_x, test_y, (l2,))[0]


def fewshot_grid(
    train_x: Array, train_y: Array, test_x: Array, test_y: Array, grid: Sequence[float] = GRID
) -> list[float]:
    """Test accuracies for many values of l2 from a single eigendecomposition."""
    if not all(0 < l2 < float("inf") for l2 in grid):
        raise Error(
            f"l2 must be a number above 0, not {', '.join(f'{l2:g}' for l2 in grid)}", code="request.value"
        )
    train_x, train_y, test_x, test_y, classes = validated(train_x, train_y, test_x, test_y)
    x = train_x.cpu().double()
    mean, scale = mean_and_scale(x)
    targets = 2.0 * F.one_hot(train_y.cpu(), classes).double() - 1
    solution = solve(with_constant((x - mean) / scale), targets)
    weights = [solution.right / (solution.values + l2)[:, None] for l2 in grid]  # (R, C) each
    single = len(grid) == 1  # then one product per image is cheaper than two
    left = solution.left @ weights[0] if single else solution.left
    device = test_x.device if test_x.is_cuda else "cpu"  # other devices may lack double precision
    projection, bias = (part.to(device) for part in for_raw_features(left, mean, scale))
    weights, labels = [weight.to(device) for weight in weights], test_y.to(device)
    correct = torch.zeros(len(grid), dtype=torch.int64, device=device)
    for start in range(0, len(test_x), ROWS):
        rows = slice(start, start + ROWS)
        projected = test_x[rows].to(device).double() @ projection + bias  # (M, C) if single, else (M, R)
        for i, weight in enumerate(weights):
            logits = projected if single else projected @ weight
            correct[i] += (logits.argmax(1) == labels[rows]).sum()
    return (correct.double() / len(test_x)).tolist()


class LinearHead(NamedTuple):
    """A linear classifier of features, and its accuracy on images that it was not fitted to."""

    weight: Tensor  # (C, D) float32
    bias: Tensor  # (C,)
    l2: float
    accuracy: float  # leave-one-out
    images: int  # that it was fitted to


def ridge_head(x: Tensor, y: Tensor, classes: int, grid: Sequence[float] = ()) -> LinearHead:
    """Ridge regression from features (N, D) to labels (N,), as logits of a softmax.

    The features are centred and divided by `head_scale`.

    The penalty and the scale of the logits are those with the lowest cross-entropy of the leave-one-out
    predictions, which ridge regression has in closed form: y - (y - prediction) / (1 - leverage). With one
    image of a class, the penalty is HEAD_L2. grid: the penalties to choose from.
    """
    single = bool(y.bincount().eq(1).any())  # a class with one image
    grid = grid or ((HEAD_L2,) if single else HEAD_GRID)
    x, targets = x.cpu().double(), 2.0 * F.one_hot(y.cpu(), classes).double() - 1
    mean, scale = head_scale(x, common=single)
    rows = with_constant((x - mean) / scale)
    solution = solve(rows, targets)
    fitted = rows @ solution.left  # (N, R)
    basis = fitted / solution.values.clamp(min=1e-12) if len(rows) < rows.shape[1] else fitted
    best: tuple[float, float, float, float] | None = None  # cross-entropy, l2, scale of logits, accuracy
    for l2 in grid:
        shrunk = 1 / (solution.values + l2)
        leverage = ((fitted * basis) @ shrunk).clamp(max=1 - 1e-9)
        predicted = (fitted * shrunk) @ solution.right
        left_out = targets - (targets - predicted) / (1 - leverage)[:, None]
        accuracy = float((left_out.argmax(1) == y.cpu()).double().mean())
        for factor in SCALES:
            loss = float(F.cross_entropy(factor * left_out, y.cpu()))
            if best is None or loss < best[0]:
                best = loss, l2, factor, accuracy
    assert best is not None
    _, l2, factor, accuracy = best
    weights = factor * solution.left @ (solution.right / (solution.values + l2)[:, None])  # (D + 1, C)
    weight, bias = for_raw_features(weights, mean, scale)
    return LinearHead(weight.T.float(), bias.float(), l2, accuracy, len(x))


def solve(x: Tensor, y: Tensor) -> Solution:
    """Minimise |X W - Y|^2 + l2 |W|^2 in the form with the smaller matrix."""
    return dual(x, y) if x.shape[0] < x.shape[1] else primal(x, y)


def primal(x: Tensor, y: Tensor) -> Solution:
    """W = (X'X + l2)^-1 X'Y."""
    values, vectors = torch.linalg.eigh(x.mT @ x)
    return Solution(vectors, values.clamp(min=0), vectors.mT @ (x.mT @ y))


def dual(x: Tensor, y: Tensor) -> Solution:
    """W = X' (XX' + l2)^-1 Y."""
    values, vectors = torch.linalg.eigh(x @ x.mT)
    return Solution(x.mT @ vectors, values.clamp(min=0), vectors.mT @ y)


def mean_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and divisor of each feature; constant features are divided by infinity, which removes them."""
    constant = (x == x[0]).all(0)
    return x.mean(0), (x.std(0, correction=0) + EPSILON).masked_fill(constant, float("inf"))


def head_scale(x: Tensor, *, common: bool) -> tuple[Tensor, Tensor]:
    """Mean and divisor of each feature, for a head: the geometric mean of its own deviation and a common one.

    The common deviation is that of all features together. Divided by its own alone, a feature of little
    variance would count as much as the others. common: the common deviation alone, for classes of one image,
    where the own ones are too uncertain. Constant features are divided by infinity.
    """
    mean, own = mean_and_scale(x)
    together = (x - mean).square().mean().sqrt() + EPSILON
    divisor = together.expand_as(own) if common else (own * together).sqrt()
    return mean, divisor.masked_fill(own.isinf(), float("inf"))


def with_constant(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=CONSTANT)


def for_raw_features(weights: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(D + 1, C) weights of standardised features with the constant, as weight (D, C) and bias (C,) of x."""
    return weights[:-1] / scale[:, None], CONSTANT * weights[-1] - mean / scale @ weights[:-1]


def validated(train_x: Array, train_y: Array, test_x: Array, test_y: Array) -> FeatureSplits:
    """Check shapes, values and classes, and renumber the labels without gaps."""
    xs = {"train": torch.as_tensor(train_x), "test": torch.as_tensor(test_x)}
    ys = {"train": torch.as_tensor(train_y), "test": torch.as_tensor(test_y)}
    for part, x in xs.items():
        y = ys[part]
        if x.ndim != 2 or not x.is_floating_point() or y.shape != x.shape[:1] or y.is_floating_point():
            shapes = f"{x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
            raise Error(
                f"{part}: expected float features (images, width) and class indices (images), got {shapes}",
                code="request.value",
            )
        if not x.numel():
            raise Error(f"{part}: there are no features", code="data.empty")
        not_finite = (~x.isfinite()).any(1)
        if not_finite.any():
            first = int(not_finite.nonzero()[0])
            raise Error(
                f"{part}: the features of {int(not_finite.sum())} of {len(x)} images are not finite, "
                f"starting with image {first}; check the weights of the model",
                code="weights.values",
            )
    if xs["train"].shape[1] != xs["test"].shape[1]:
        raise Error(
            f"training features have width {xs['train'].shape[1]}, test features {xs['test'].shape[1]}",
            code="request.value",
        )
    known, train_labels = ys["train"].unique(return_inverse=True)
    if len(known) < 2:
        raise Error(
            f"all training images have class {int(known[0])}; at least two classes are needed",
            code="data.classes",
        )
    unknown = sorted(set(ys["test"].unique().tolist()) - set(known.tolist()))
    if unknown:
        raise Error(
            f"classes {unknown[:5]} are in the test images but not in the training images",
            code="data.classes",
        )
    if not (xs["train"] != xs["train"][0]).any():
        raise Error(
            "all training images have the same features: the model does not distinguish them",
            code="evaluation.unsupported",
        )
    test_labels = torch.searchsorted(known, ys["test"].contiguous())
    return FeatureSplits(xs["train"], train_labels, xs["test"], test_labels, len(known))


def choose_shots(
    labels: np.ndarray,
    shots: int,
    *,
    seed: int = 0,
    usable: np.ndarray | None = None,
    names: Sequence[str] = (),
) -> np.ndarray:
    """(C, shots): indices of random images of each class.

    One default_rng(seed) shuffles the classes in order, so fewer shots with the same seed are a subset of
    more. usable (N,): images where it is false are skipped.
    """
    if shots < 1:
        raise Error(f"shots must be at least 1, not {shots}", code="request.value")
    rng = np.random.default_rng(seed)
    compact = labels.astype(np.min_scalar_type(labels.max(initial=0)))  # small integers use radix sort
    order = np.argsort(compact, kind="stable")  # one sort is faster than a search for each of 21,000 classes
    known, starts = np.unique(compact[order], return_index=True)
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
    """The column of a table (data sets, l2 values) with the best mean rank over its rows.

    Equal accuracies share their rank. Ties go to the higher mean accuracy, then to the larger l2.
    """
    higher = (accuracies[:, None, :] > accuracies[:, :, None]).sum(2)
    equal = (accuracies[:, None, :] == accuracies[:, :, None]).sum(2)
    ranks = (higher + (equal - 1) / 2).mean(0)
    best = np.lexsort((-np.arange(len(ranks)), -accuracies.mean(0), ranks))
    return int(best[0])


TEMPERATURE = 0.07
SIMILARITIES = 2**24  # computed at a time


def neighbours(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    k: int = 20,
    temperature: float = TEMPERATURE,
) -> float:
    """Test accuracy of a k-nearest-neighbour classifier with cosine similarity."""
    correct = neighbours_correct(train_x, train_y, test_x, test_y, k, temperature)
    return int(correct.sum()) / len(correct)


@torch.no_grad()
def neighbours_correct(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    k: int = 20,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """(M,) bool: which test images a k-nearest-neighbour classifier with cosine similarity gets right.

    A vote has the weight exp(similarity / temperature). All-zero features have similarity 0 to everything.
    Ties go to the first class.
    """
    train_x, train_y, test_x, test_y, classes = validated(train_x, train_y, test_x, test_y)
    if not 1 <= k <= len(train_x):
        raise Error(
            f"{k} neighbours with {len(train_x)} training images; give 1 to {len(train_x)}",
            code="request.value",
        )
    if not 0 < temperature < float("inf"):
        raise Error(f"the temperature must be a number above 0, not {temperature}", code="request.value")
    train = unit_length(train_x)  # (N, D)
    parts, chunk = [], max(1, SIMILARITIES // len(train))
    for rows, labels in zip(test_x.split(chunk), test_y.split(chunk), strict=True):
        nearest = (unit_length(rows) @ train.mT).topk(k, dim=1)  # (M, k)
        weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()  # the nearest has 1
        votes = weights.new_zeros(len(rows), classes).scatter_add_(1, train_y[nearest.indices], weights)
        parts.append(votes.argmax(1) == labels)
    return torch.cat(parts)


def unit_length(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=1)


RATES = (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EPOCHS = 30
BATCH = 256
MOMENTUM = 0.9
HELD_OUT = 0.2
LOGITS = 2**24  # computed at a time


@dataclass(frozen=True)
class Probe:
    """Test accuracy of a linear probe and the learning rate it uses."""

    top1: float
    rate: float
    held_out: tuple[float, ...]  # accuracy of each learning rate on the held-out part of train
    correct: Tensor = field(compare=False, repr=False)  # (M,) bool: which test images are right

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
    """Choose the learning rate on a held-out fifth of each class, train on all of train with it, and test.

    Ties go to the smallest rate. Features are standardised as for few-shot accuracy.
    """
    if not rates or not all(0 < rate < float("inf") for rate in rates) or epochs < 1:
        raise Error(
            f"rates must be numbers above 0 and epochs at least 1, not {rates}, {epochs}",
            code="request.value",
        )
    train_x, train_y, test_x, test_y, classes = validated(train_x, train_y, test_x, test_y)
    mean, scale = (t.float().to(train_x.device) for t in mean_and_scale(train_x.cpu().double()))
    train_x, test_x = ((x.float() - mean) / scale for x in (train_x, test_x))
    val = held_out_mask(train_y.cpu().numpy(), seed).to(train_x.device)
    rates = sorted(rates)
    if not val.any():
        raise Error(
            "no class has two training images, so none can be held out to choose the learning rate",
            code="evaluation.unsupported",
        )
    weights = train_linear(train_x[~val], train_y[~val], classes, rates, epochs=epochs, seed=seed)
    val_accuracies = probe_accuracies(weights, train_x[val], train_y[val])
    rate = rates[val_accuracies.index(max(val_accuracies))]
    weights = train_linear(train_x, train_y, classes, [rate], epochs=epochs, seed=seed)
    correct = probe_correct(weights, test_x, test_y)[:, 0]
    return Probe(int(correct.sum()) / len(correct), rate, tuple(val_accuracies), correct)


def held_out_mask(labels: np.ndarray, seed: int) -> Tensor:
    """(N,): true for a fifth of each class; at least one image, but never the only one."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(len(labels), dtype=bool)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(members) > 1:
            mask[members[: max(1, round(HELD_OUT * len(members)))]] = True
    return torch.from_numpy(mask)


def train_linear(
    x: Tensor, y: Tensor, classes: int, rates: Sequence[float], *, epochs: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Train K classifiers by SGD with momentum and cosine decay: weights (D, K, C) and biases (K, C)."""
    weight = x.new_zeros(x.shape[1], len(rates), classes)
    bias = x.new_zeros(len(rates), classes)
    velocities = [torch.zeros_like(weight), torch.zeros_like(bias)]
    rate = x.new_tensor(rates)[:, None]
    targets = F.one_hot(y, classes).to(x.dtype)
    generator = torch.Generator().manual_seed(seed)
    batches = [b for _ in range(epochs) for b in torch.randperm(len(x), generator=generator).split(BATCH)]
    for step, rows in enumerate(batches):
        rows = rows.to(x.device)
        batch = x[rows]  # (B, D)
        error = (linear(batch, weight, bias).softmax(-1) - targets[rows, None]) / len(rows)  # (B, K, C)
        gradients = ((batch.mT @ error.flatten(1)).view_as(weight), error.sum(0))
        decay = 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        for parameter, velocity, gradient in zip((weight, bias), velocities, gradients, strict=True):
            velocity.mul_(MOMENTUM).add_(gradient)
            parameter.addcmul_(velocity, rate, value=-decay)
    return weight, bias


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits (B, K, C) of all classifiers in one matrix product."""
    return torch.addmm(bias.flatten(), x, weight.flatten(1)).unflatten(1, bias.shape)


def probe_accuracies(weights: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> list[float]:
    """The accuracy of each of the K classifiers."""
    return (probe_correct(weights, x, y).sum(0).cpu().double() / len(x)).tolist()


def probe_correct(weights: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """(M, K) bool: which images each of the K classifiers gets right."""
    weight, bias = weights
    size = max(1, LOGITS // bias.numel())
    parts = zip(x.split(size), y.split(size), strict=True)
    return torch.cat([linear(rows, weight, bias).argmax(2) == labels[:, None] for rows, labels in parts])
