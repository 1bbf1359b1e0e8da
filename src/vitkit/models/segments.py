"""From the masks and classes of queries to segments without overlap (panoptic), or to ranked instances."""

# Q queries, N kept ones, K classes; H, W pixels

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.models.feature_map import Size, cells_of, resized_maps

CONFIDENT = 0.8  # the least score of a query that becomes a segment
VISIBLE = 0.8  # the least share of its own mask that a segment keeps
BEST = 100  # instances of an image


@dataclass(frozen=True)
class Segments:
    """Parts of an image that do not overlap."""

    owner: Tensor  # (H, W) int64: the segment of each pixel, -1 for none
    classes: tuple[int, ...]  # of each segment
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Instances:
    """Objects of an image, best first; they may overlap."""

    masks: Tensor  # (N, H, W) bool
    classes: Tensor  # (N,) int64
    scores: Tensor  # (N,)


def masks_at_pixels(masks: Tensor, fit: Size, size: Size, cell: float) -> Tensor:
    """Logits of masks (Q, h, w) at the pixels of the original image, (Q, H, W).

    fit: the pixels of the view that the image covers; size: the image's own
    """
    h, w = cells_of(fit, cell)
    return resized_maps(masks[:, :h, :w], fit, size, cell)


def panoptic(
    masks: Tensor, classes: Tensor, stuff: Collection[int] = (), *, confident: float = CONFIDENT,
    visible: float = VISIBLE,
) -> Segments:  # fmt: skip
    """Segments from logits of masks (Q, H, W) and classes (Q, K + 1), as EoMT merges them.

    Queries that are sure of a class compete for each pixel by score times mask. A query keeps the pixels
    that it wins and that are in its own mask; it is left out if it wins too small a share of its mask.
    stuff: classes whose segments are one.
    """
    scores, labels = classes.float().softmax(-1).max(-1)
    keep = (labels != classes.shape[-1] - 1) & (scores > confident)
    scores, labels, shares = scores[keep], labels[keep], masks[keep].float().sigmoid()
    owner = torch.full(masks.shape[1:], -1, device=masks.device)
    if not len(scores):
        return Segments(owner, (), ())
    winner = (scores[:, None, None] * shares).argmax(0)
    kept: list[tuple[int, float]] = []
    first: dict[int, int] = {}  # the segment of each class of stuff
    for query, (label, score) in enumerate(zip(labels.tolist(), scores.tolist(), strict=True)):
        won, own = winner == query, shares[query] >= 0.5
        pixels, area = int(won.sum()), int(own.sum())
        if not area or not bool((won & own).any()) or pixels / area <= visible:
            continue
        number = first.get(label, len(kept))
        owner[won & own] = number
        if number == len(kept):
            kept.append((label, score))
        if label in stuff:
            first[label] = number
    return Segments(owner, tuple(label for label, _ in kept), tuple(score for _, score in kept))


def instances(masks: Tensor, classes: Tensor, best: int = BEST) -> Instances:
    """The best pairs of a query and a class, from logits of masks (Q, H, W) and classes (Q, K + 1).

    The score is the class's probability times the mean of the mask's inside of it. One query may give
    several instances, of different classes.
    """
    shares = classes.float().softmax(-1)[:, :-1]
    top = shares.flatten().topk(min(best, shares.numel()))
    queries, labels = top.indices // shares.shape[1], top.indices % shares.shape[1]
    inside = masks > 0
    sure = (masks.float().sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
    scores = top.values * sure[queries]
    order = scores.argsort(descending=True, stable=True)
    return Instances(inside[queries[order]], labels[order], scores[order])
