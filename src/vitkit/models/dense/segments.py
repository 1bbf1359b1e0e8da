"""From the masks and classes of queries to segments without overlap (panoptic), or to ranked instances."""

# Q queries, N kept ones, K classes; H, W pixels

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.models.dense.feature_map import Size, axes_at_pixels, cells_of, resized_maps

CONFIDENT = 0.8  # the minimum score of a query that becomes a segment
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
    queries, labels, scores = best_pairs(classes, best)
    return ranked(queries, labels, scores, *inside_of(masks))


def instances_at_pixels(
    masks: Tensor, classes: Tensor, fit: Size, size: Size, cell: float, best: int = BEST
) -> Instances:
    """`instances` at the pixels of the original image, (N, H, W), from logits of masks (Q, h, w).

    fit, size: see `masks_at_pixels`
    """
    queries, labels, scores = best_pairs(classes, best)
    used, rows = queries.unique(return_inverse=True)
    inside = torch.zeros(len(used), *size, dtype=torch.bool, device=masks.device)
    sure = torch.zeros(len(used), device=masks.device)
    for number, (place, part, mean) in enumerate(parts_at_pixels(masks[used], fit, size, cell)):
        inside[number][place], sure[number] = part, mean
    return ranked(rows, labels, scores, inside, sure)


def parts_at_pixels(
    masks: Tensor, fit: Size, size: Size, cell: float
) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
    """Of each mask the rows and columns of the original image that hold it, and there `inside_of`.

    A pixel is in no mask if none of the cells around it is, so only the others are computed, for one mask at
    a time: of a large image they are many. masks: logits (Q, h, w); fit, size: see `masks_at_pixels`
    """
    h, w = cells_of(fit, cell)
    masks = masks[:, :h, :w]
    down, across = axes_at_pixels(fit, size, cell)
    spans = zip(touched((masks > 0).any(2), down), touched((masks > 0).any(1), across), strict=True)
    for mask, (rows, columns) in zip(masks, spans, strict=True):
        if rows.start == rows.stop:
            yield (rows, columns), mask.new_zeros(0, 0, dtype=torch.bool), mask.new_zeros(())
            continue
        inside, sure = inside_of(resized_maps(mask[None], fit, size, cell, rows, columns))
        yield (rows, columns), inside[0], sure[0]


def touched(cells: Tensor, axis: tuple[Tensor, Tensor, Tensor]) -> list[slice]:
    """For each row of cells (Q, l) the pixels along this axis that lie next to any True one."""
    number = torch.arange(1, cells.shape[1] + 1, device=cells.device)
    last = (cells * number).amax(1).cpu() - 1
    first = cells.shape[1] - (cells * number.flip(0)).amax(1).cpu()
    before, after = (part.contiguous() for part in axis[:2])
    starts = torch.searchsorted(after, first).tolist()
    stops = torch.searchsorted(before, last, right=True).tolist()
    return [slice(a, max(a, b)) if a < axis[0].numel() else slice(0, 0)
            for a, b in zip(starts, stops, strict=True)]  # fmt: skip


def best_pairs(classes: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of a query and a class with the highest probabilities: query, class, probability, (N,)."""
    shares = classes.float().softmax(-1)[:, :-1]
    top = shares.flatten().topk(min(best, shares.numel()))
    return top.indices // shares.shape[1], top.indices % shares.shape[1], top.values


def inside_of(masks: Tensor) -> tuple[Tensor, Tensor]:
    """The pixels of each mask, (Q, H, W) bool, and the mean probability of these, (Q,)."""
    inside = masks > 0
    return inside, (masks.float().sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)


def ranked(queries: Tensor, labels: Tensor, scores: Tensor, inside: Tensor, sure: Tensor) -> Instances:
    """The pairs in the order of their scores, each the product of the class's and the mask's."""
    scores = scores * sure[queries]
    order = scores.argsort(descending=True, stable=True)
    return Instances(inside[queries[order]], labels[order], scores[order])
