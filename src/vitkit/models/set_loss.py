"""The losses of set prediction (DETR, YOLOS): each object is matched with one prediction, at the least cost.

Matching runs on the CPU, so a step with it reads from the GPU and cannot be captured in a CUDA graph.
"""

# B batch, Q predictions, M rows of objects (those that are not used have class -1), K classes

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.assignment import linear_assignment
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
        cost = self.cost(outputs["logits"], outputs["boxes"].float(), true, classes)
        costs = cost.nan_to_num(0.0, 1e10, -1e10).cpu().numpy()
        used = (classes >= 0).cpu().numpy()
        rows = np.full(costs.shape[:2], -1)
        for row, one, real in zip(rows, costs, used, strict=True):
            columns = np.flatnonzero(real)
            predictions, objects = linear_assignment(one[:, columns])
            row[predictions] = columns[objects]
        return torch.from_numpy(rows).to(cost.device)

    def __call__(self, outputs: dict[str, Tensor], true: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """The loss and its parts, of all predictions of a batch at once.

        outputs         "logits" (B, Q, K + 1), the last one of no object, and "boxes" (B, Q, 4)
        true, classes   (B, M, 4), as centre, width and height in shares of the image, and (B, M)
        """
        logits, boxes = outputs["logits"].float(), outputs["boxes"].float()
        if not true.shape[1]:  # no image has an object
            true, classes = true.new_zeros(len(true), 1, 4), classes.new_full((len(classes), 1), -1)
        true = true.float()
        rows = self.match(outputs, true, classes)
        return self.value(logits, boxes, true, classes, rows)

    def value(
        self, logits: Tensor, boxes: Tensor, true: Tensor, classes: Tensor, rows: Tensor
    ) -> dict[str, Tensor]:
        """The losses for a match (B, Q)."""
        matched, rows = rows >= 0, rows.clamp(min=0)
        count = (classes >= 0).sum().clamp(min=1)
        nothing = logits.shape[-1] - 1
        targets = torch.where(matched, classes.gather(1, rows), nothing)
        weight = torch.where(matched, 1.0, self.no_object)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        mine = true.gather(1, rows[..., None].expand(-1, -1, 4))  # (B, Q, 4)
        distance = (boxes - mine).abs().sum(-1)
        overlap = paired_generalized_iou(corners(boxes), corners(mine))
        parts = {
            "class_loss": (entropy * weight.flatten()).sum() / weight.sum(),
            "distance_loss": torch.where(matched, distance, 0.0).sum() / count,
            "overlap_loss": torch.where(matched, 1 - overlap, 0.0).sum() / count,
        }
        weights = (self.of_class, self.of_distance, self.of_overlap)
        total = torch.stack([w * part for w, part in zip(weights, parts.values(), strict=True)]).sum()
        return {"loss": total} | parts
