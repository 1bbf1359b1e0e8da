"""The loss of a set of predicted masks (MaskFormer, EoMT): each true mask is matched with one query.

Masks are compared at points that cover the image evenly, shifted at random for each image, object and
prediction. Training draws the shifts as a function of the seed, the step and each image's place in its batch.
"""

# B batch, Q queries, T objects of an image with padding, K classes, P points; H, W pixels; h, w cells

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.models.dense.set_loss import total_weight
from vitkit.ops.batched_assignment import assign
from vitkit.ops.points import even_points, sample, sample_each, sample_own, sample_owners
from vitkit.ops.precision import without_autocast

Prediction = tuple[Tensor, Tensor]  # logits of masks (B, Q, h, w) and of classes (B, Q, K + 1)


@dataclass(frozen=True, kw_only=True)
class MaskCriterion:
    """The weights of the losses, which also weigh the costs of matching, and how points are drawn."""

    points: int = 12_544  # 112 x 112, as Mask2Former
    oversample: float = 3.0  # times as many points are drawn, of which the most uncertain are kept
    importance: float = 0.75  # share of points that are kept for being uncertain; the others are uniform
    mask: float = 5.0
    dice: float = 5.0
    classes: float = 2.0
    no_object: float = 0.1  # weight of queries without an object in the loss of the classes

    def counts(self, labels: Tensor, queries: int) -> dict[str, Tensor]:
        """What the losses of images with objects of these classes (B, T) are divided by."""
        return {"masks": (labels >= 0).sum(), "class_weight": total_weight(labels, queries, self.no_object)}

    def __call__(
        self, predictions: Sequence[Prediction], owner: Tensor, labels: Tensor,
        counts: Mapping[str, Tensor] | None = None, shifts: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The sum over all predictions of "mask_loss", "dice_loss" and "class_loss", and "loss", their sum.

        owner   (B, H, W) whole numbers: the object of each pixel, or a number that is none's
        labels  (B, T): the class of each object, T <= Q; -1 for padding
        counts  of the whole batch of a step; None: of these images
        shifts  (B, predictions, T + 1, 2) from 0 to 1: how far the points are moved at which the mask of each
                object is compared, the last for those of the matching; None: random numbers
        """
        predictions = [(mask.float(), classes.float()) for mask, classes in predictions]
        real = labels >= 0
        counts = self.counts(labels, predictions[0][1].shape[1]) if counts is None else counts
        if shifts is None:
            b, t = labels.shape
            shifts = torch.rand(b, len(predictions), t + 1, 2, device=labels.device)
        columns = self.matched(predictions, owner, labels, shifts[:, :, -1])
        total: dict[str, Tensor] = {}
        for number, ((mask, classes), own) in enumerate(zip(predictions, columns, strict=True)):
            losses = self.mask_losses(mask, owner, own, real, shifts[:, number, :-1])
            losses = {name: value / counts["masks"].clamp(min=1) for name, value in losses.items()}
            entropy = class_loss(classes, labels, own, self.no_object)
            losses["class_loss"] = self.classes * entropy / counts["class_weight"]
            total = {name: value + total.get(name, 0.0) for name, value in losses.items()}
        return {"loss": sum(total.values(), total["class_loss"].new_zeros(()))} | total

    @torch.no_grad()
    def matched(
        self, predictions: Sequence[Prediction], owner: Tensor, labels: Tensor, shifts: Tensor
    ) -> Sequence[Tensor]:
        """The query of each object, (B, T), for each prediction; padding gets queries that are left over.

        shifts  (B, predictions, 2) of the points
        """
        costs = [
            self.costs(*prediction, owner, labels, shifts[:, number])
            for number, prediction in enumerate(predictions)
        ]
        real = (labels >= 0).repeat(len(predictions), 1)
        return assign(torch.cat(costs), real).split(len(labels))

    def costs(self, masks: Tensor, classes: Tensor, owner: Tensor, labels: Tensor, shifts: Tensor) -> Tensor:
        """The cost of each object for each query, (B, T, Q), at points that all masks of an image share."""
        points = shifted(even_points(self.points, masks.device), shifts)
        with without_autocast(masks.device):  # products over thousands of points
            return pairwise_costs(
                sample(masks, points), sample_owners(owner, points, labels.shape[1]), classes, labels,
                weights=(self.mask, self.dice, self.classes),
            )  # fmt: skip

    def mask_losses(
        self, masks: Tensor, owner: Tensor, columns: Tensor, real: Tensor, shifts: Tensor
    ) -> dict[str, Tensor]:
        """The summed losses of matched masks at points of their own, whose shifts are (B, T, 2)."""
        index = columns[..., None, None].expand(-1, -1, *masks.shape[2:])
        own = masks.gather(1, index).flatten(0, 1)  # (B T, h, w)
        with torch.no_grad():
            points = self.uncertain_points(own, shifts.flatten(0, 1))
            target = sample_own(owner, points.unflatten(0, real.shape)).flatten(0, 1)
        logits = sample_each(own, points)
        counted = real.flatten()
        return {
            "mask_loss": self.mask * (binary_loss(logits, target) * counted).sum(),
            "dice_loss": self.dice * (dice_loss(logits, target) * counted).sum(),
        }

    def uncertain_points(self, masks: Tensor, shifts: Tensor) -> Tensor:
        """Points (N, P, 2) for masks (N, h, w): of many those with logits nearest to 0, and others.

        shifts  (N, 2) of the points
        """
        many, uncertain = int(self.points * self.oversample), int(self.points * self.importance)
        points = shifted(even_points(many + self.points - uncertain, masks.device), shifts)
        drawn, uniform = points[:, :many], points[:, many:]
        best = sample(masks[:, None], drawn)[:, 0].abs().topk(uncertain, dim=1, largest=False).indices
        chosen = drawn.gather(1, best[..., None].expand(-1, -1, 2))
        return torch.cat([chosen, uniform], dim=1)


def shifted(points: Tensor, shifts: Tensor) -> Tensor:
    """Points (P, 2) in the unit square, moved by shifts (N, 2) around its edges: (N, P, 2)."""
    moved = points + shifts[:, None]
    return moved - moved.floor()


def pairwise_costs(
    logits: Tensor, target: Tensor, classes: Tensor, labels: Tensor, *, weights: tuple[float, float, float]
) -> Tensor:
    """The cost (B, T, Q) of masks and classes, from logits (B, Q, P) and true masks (B, T, P) at points."""
    mask, dice, of_class = weights
    positive, negative = F.softplus(-logits), F.softplus(logits)  # (B, Q, P)
    binary = (target @ positive.mT + (1 - target) @ negative.mT) / logits.shape[-1]
    share = logits.sigmoid()
    sizes = target.sum(-1)[:, :, None] + share.sum(-1)[:, None]
    overlap = 1 - (2 * target @ share.mT + 1) / (sizes + 1)
    index = labels.clamp(min=0)[:, None].expand(-1, classes.shape[1], -1)
    probability = classes.softmax(-1).gather(2, index).mT  # (B, T, Q)
    return mask * binary + dice * overlap - of_class * probability


def binary_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of each mask, (N,): the mean over its points, (N, P)."""
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)


def dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    """1 - dice of each mask, (N,), with 1 added to both of its parts."""
    share = logits.sigmoid()
    return 1 - (2 * (share * target).sum(1) + 1) / (share.sum(1) + target.sum(1) + 1)


def class_loss(logits: Tensor, labels: Tensor, columns: Tensor, no_object: float) -> Tensor:
    """The weighted sum of the cross-entropy of all queries; those without an object have the last class.

    logits (B, Q, K + 1), labels (B, T), columns (B, T): the query of each object
    """
    none = logits.shape[-1] - 1
    target = torch.full(logits.shape[:2], none, device=logits.device, dtype=torch.int64)
    target = target.scatter(1, columns, torch.where(labels >= 0, labels, none))
    weight = torch.where(target == none, no_object, 1.0)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    return (losses * weight).sum()


def objects_of_classes(mask: Tensor, classes: int, most: int) -> tuple[Tensor, Tensor]:
    """A class mask (B, H, W) uint8 as objects, one for each class that an image has: owner and labels.

    Numbers from `classes` on, such as 255, are no object. most: see `largest_objects`
    """
    numbers = torch.arange(classes, device=mask.device).expand(len(mask), -1)
    owner = torch.where(mask < classes, mask.long(), -1)
    return largest_objects(owner, torch.where(pixels_of(owner, classes) > 0, numbers, -1), most)


def largest_objects(owner: Tensor, labels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most so many objects of each image: those with the most pixels.

    owner (B, H, W): the object of each pixel, or -1; labels (B, T): their classes, -1 for padding. The pixels
    of other objects belong to none.
    """
    t = labels.shape[1]
    if t <= most:
        return owner, labels
    largest = pixels_of(owner, t).masked_fill(labels < 0, 0).topk(most, dim=1)
    kept = torch.where(largest.values > 0, labels.gather(1, largest.indices), -1)
    numbers = torch.full((len(owner), t + 1), -1, dtype=torch.int64, device=owner.device)
    numbers.scatter_(1, largest.indices, torch.arange(most, device=owner.device).expand(len(owner), -1))
    return numbers.gather(1, places_of(owner, t)).view_as(owner), kept


def places_of(owner: Tensor, objects: int) -> Tensor:
    """The object of each pixel, (B, H W) int64, with the number after the last in place of -1."""
    flat = owner.flatten(1).long()
    return torch.where(flat < 0, objects, flat)


def pixels_of(owner: Tensor, objects: int) -> Tensor:
    """How many pixels each object of an image has, (B, objects)."""
    flat = places_of(owner, objects)
    counts = torch.zeros(len(owner), objects + 1, dtype=torch.int64, device=owner.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))[:, :objects]
