"""Likely wrong labels: confident learning (Northcutt et al. 2021) on out-of-fold predictions."""

# N images, D features, C classes

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.errors import Error
from vitkit.metrics.frozen_features import L2, for_raw_features, mean_and_scale, solve, with_constant

FOLDS = 5
ROWS = 8192  # images that are scored at a time, in double precision
SCALES = np.exp(np.linspace(-3, 5, 81))  # inverse temperatures that are tried
SAMPLE = 20_000  # images on which the temperature is fitted


@dataclass(frozen=True)
class LabelErrors:
    """The images whose label is likely wrong, the most certain first, and the answers that say so."""

    rows: np.ndarray  # (M,) row numbers of the images
    suggested: np.ndarray  # (M,) the class that the answers prefer
    probability: np.ndarray  # (M,) of the suggested class
    accuracy: float  # share of all images whose label is the most probable class


def label_errors(x: np.ndarray, labels: np.ndarray, *, seed: int = 0, folds: int = FOLDS) -> LabelErrors:
    """Likely wrong labels of features (N, D) with class numbers (N,).

    Images of classes with fewer images than folds are trained on, but not reported.
    """
    known, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(known) < 2:
        raise Error("wrong labels can be found among two or more classes only", code="data.classes")
    probabilities = calibrated(out_of_fold_scores(x, numbers, folds=folds, seed=seed), numbers)
    rows, suggested = confident_errors(probabilities, numbers)
    enough = counts[numbers[rows]] >= folds
    rows, suggested = rows[enough], suggested[enough]
    accuracy = float((probabilities.argmax(1) == numbers).mean())
    return LabelErrors(rows, known[suggested], probabilities[rows, suggested], accuracy)


def fold_numbers(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """(N,): the fold of each image; each class is divided evenly."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    starts = np.searchsorted(labels[order], labels[order])  # the first place of the same class
    numbers = np.empty(len(labels), dtype=np.int64)
    numbers[order] = (np.arange(len(labels)) - starts) % folds
    return numbers


def out_of_fold_scores(
    x: np.ndarray, labels: np.ndarray, *, l2: float = L2, folds: int = FOLDS, seed: int = 0
) -> np.ndarray:
    """(N, C) float32: the scores of each image by a ridge regression on the images of the other folds."""
    classes, numbers = int(labels.max()) + 1, fold_numbers(labels, folds, seed)
    scores = np.empty((len(x), classes), dtype=np.float32)
    for fold in range(folds):
        held_out, rest = np.flatnonzero(numbers == fold), np.flatnonzero(numbers != fold)
        inputs = torch.from_numpy(x[rest]).double()
        targets = 2.0 * F.one_hot(torch.from_numpy(labels[rest]), classes).double() - 1
        mean, scale = mean_and_scale(inputs)
        solution = solve(with_constant((inputs - mean) / scale), targets)
        weights = solution.left @ (solution.right / (solution.values + l2)[:, None])  # (D + 1, C)
        weight, bias = for_raw_features(weights, mean, scale)
        for start in range(0, len(held_out), ROWS):
            part = held_out[start : start + ROWS]
            scores[part] = (torch.from_numpy(x[part]).double() @ weight + bias).numpy()
    return scores


def calibrated(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Probabilities (N, C): the softmax of the scores at the temperature with the highest likelihood."""
    rows = np.linspace(0, len(labels) - 1, min(len(labels), SAMPLE)).astype(np.int64)
    sample, own = scores[rows], labels[rows]

    def loss(scale: float) -> float:
        chosen = softmax(sample, scale)[np.arange(len(own)), own]
        return -float(np.log(np.maximum(chosen, 1e-30)).mean())

    return softmax(scores, min(SCALES, key=loss))


def softmax(scores: np.ndarray, scale: float) -> np.ndarray:
    values = scores * np.float32(scale)
    values -= values.max(1, keepdims=True)
    np.exp(values, out=values)
    values /= values.sum(1, keepdims=True)
    return values


def confident_errors(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of likely wrong labels, the most certain first, and the most probable class of each.

    The confident joint counts an image for the most probable class whose probability reaches the mean over
    the images with that label. As many images as it counts for another class than their label are reported:
    those whose own label has the lowest probability, if it is not the most probable class.
    """
    rows = np.arange(len(labels))
    own = probabilities[rows, labels]
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    thresholds = np.bincount(labels, own, probabilities.shape[1]) / np.maximum(counts, 1)
    reached = (probabilities >= thresholds) & (counts > 0)
    confident = np.where(reached, probabilities, -1.0).argmax(1)
    errors = int((reached.any(1) & (confident != labels)).sum())
    lowest = np.argsort(own, kind="stable")[:errors]
    suggested = probabilities[lowest].argmax(1)
    wrong = suggested != labels[lowest]
    return lowest[wrong], suggested[wrong]
