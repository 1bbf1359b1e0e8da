"""The losses of set prediction (DETR, YOLOS): each object is matched with one prediction of least cost."""

# B batch, Q predictions, M rows of objects (those that are not used have class -1), K classes

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.batched_assignment import match
from vitkit.ops.boxes import corners, generalized_iou, paired_generalized_iou


@dataclass(frozen=True, kw_only=True)
class SetLoss:
    """The weights of the parts of a match and of the loss, as in DETR."""

    of_class: float = 1.0
    of_distance: float = 5.0  # L1, of centre, width and height as shares of the image
    of_overlap: float = 2.0  # generalised IoU
    no_object: float = 0.1  # weight of predictions without an object in the cross-entropy

    def cost(self, logits: Tensor, boxes: Tensor, true: Tensor, classes: Tensor) -> Tensor:
        """The cost (..., Q, M) of each prediction for each object.

        logits, boxes   (..., Q, K + 1) and (..., Q, 4) as centre, width and height
        true, classes   (..., M, 4), and (..., M)
        """
        chance = logits.float().softmax(-1)
        index = classes.clamp(min=0)[..., None, :].expand(*chance.shape[:-1], -1)
        distance = (boxes[..., :, None, :] - true[..., None, :, :]).abs().sum(-1)
        overlap = generalized_iou(corners(boxes), corners(true))
        total = self.of_distance * distance - self.of_class * chance.gather(-1, index)
        return total - self.of_overlap * overlap

    @torch.no_grad()
    def match(self, outputs: dict[str, Tensor], true: Tensor, classes: Tensor) -> Tensor:
        """The object of each prediction, (B, Q): its row, or -1."""
        return match(self.cost(outputs["logits"], outputs["boxes"].float(), true, classes), classes >= 0)

    def counts(self, classes: Tensor, predictions: int) -> dict[str, Tensor]:
        """What the losses of images with objects of these classes (B, M) are divided by."""
        weight = total_weight(classes, predictions, self.no_object)
        return {"objects": (classes >= 0).sum(), "class_weight": weight}

    def __call__(
        self, outputs: dict[str, Tensor], true: Tensor, classes: Tensor,
        counts: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The loss and its parts, of all predictions of a batch at once.

        outputs         "logits" (B, Q, K + 1), the last one of no object, and "boxes" (B, Q, 4)
        true, classes   (B, M, 4), as centre, width and height in shares of the image, and (B, M)
        counts          of the whole batch of a step; None: of these images
        """
        logits, boxes = outputs["logits"].float(), outputs["boxes"].float()
        if not true.shape[1]:  # no image has an object
            true, classes = true.new_zeros(len(true), 1, 4), classes.new_full((len(classes), 1), -1)
        true = true.float()
        rows = self.match(outputs, true, classes)
        counts = self.counts(classes, logits.shape[1]) if counts is None else counts
        return self.value(logits, boxes, true, classes, rows, counts)

    def value(
        self, logits: Tensor, boxes: Tensor, true: Tensor, classes: Tensor, rows: Tensor,
        counts: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The losses for a match (B, Q)."""
        matched, rows = rows >= 0, rows.clamp(min=0)
        count = counts["objects"].clamp(min=1)
        nothing = logits.shape[-1] - 1
        targets = torch.where(matched, classes.gather(1, rows), nothing)
        weight = torch.where(matched, 1.0, self.no_object)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        mine = true.gather(1, rows[..., None].expand(-1, -1, 4))  # (B, Q, 4)
        distance = (boxes - mine).abs().sum(-1)
        overlap = paired_generalized_iou(corners(boxes), corners(mine))
        parts = {
            "class_loss": (entropy * weight.flatten()).sum() / counts["class_weight"],
            "distance_loss": torch.where(matched, distance, 0.0).sum() / count,
            "overlap_loss": torch.where(matched, 1 - overlap, 0.0).sum() / count,
        }
        weights = (self.of_class, self.of_distance, self.of_overlap)
        total = torch.stack([w * part for w, part in zip(weights, parts.values(), strict=True)]).sum()
        return {"loss": total} | parts


def total_weight(classes: Tensor, predictions: int, no_object: float) -> Tensor:
    """The sum of the weights of all predictions in a cross-entropy, where each object (B, M) has its own."""
    matched = (classes >= 0).sum(1).clamp(max=predictions).sum()
    return matched + no_object * (len(classes) * predictions - matched)
