"""The losses of RF-DETR: every group of queries and every layer is matched with the objects on its own."""

# B batch, G groups of queries, Q queries of a group, M rows of objects (class -1: not used), C classes

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.batched_assignment import match
from vitkit.ops.boxes import corners, generalized_iou, paired_generalized_iou, paired_iou

EPS = 1e-8  # of probabilities whose logarithm is taken
LEAST = 0.01  # target of a match without overlap


@dataclass(frozen=True, kw_only=True)
class GroupSetLoss:
    """The weights of the parts of a match and of the loss, as published.

    The class of a match learns a target between its own score and its overlap with the object.
    """

    of_class: float = 1.0
    of_distance: float = 5.0  # L1, of centre, width and height as shares of the image; also of a match
    of_overlap: float = 2.0  # generalised IoU; also of a match
    match_class: float = 2.0  # focal cost of the class in a match
    alpha: float = 0.25  # of the focal cost, and share of the score in a target
    gamma: float = 2.0  # of the focal cost, and power of the score in the loss of what is not matched

    def counts(self, classes: Tensor, predictions: int = 0) -> dict[str, Tensor]:
        """What the losses of images with objects of these classes (B, M) are divided by."""
        return {"objects": (classes >= 0).sum()}

    def __call__(
        self, outputs: Mapping[str, Tensor], true: Tensor, classes: Tensor,
        counts: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The loss, summed over all layers and the proposals, and its parts in the last layer.

        outputs         of RfDetr.train_outputs
        true, classes   (B, M, 4), as centre, width and height in shares of the image, and (B, M)
        counts          of the whole batch of a step; None: of these images
        """
        if not true.shape[1]:  # no image has an object
            true, classes = true.new_zeros(len(true), 1, 4), classes.new_full((len(classes), 1), -1)
        true = true.float()
        proposed = (outputs["proposal_logits"], outputs["proposal_boxes"])
        stages = [proposed, *zip(outputs["logits"], outputs["boxes"], strict=True)]
        stages = [(logits.float(), boxes.float()) for logits, boxes in stages]
        rows = self.match(stages, true, classes)
        count = (counts or self.counts(classes))["objects"].clamp(min=1)
        parts = [
            self.parts(*stage, true, classes, row, count) for stage, row in zip(stages, rows, strict=True)
        ]
        weights = {"class_loss": self.of_class, "distance_loss": self.of_distance,
                   "overlap_loss": self.of_overlap}  # fmt: skip
        total = torch.stack([weight * part[name] for part in parts for name, weight in weights.items()]).sum()
        return {"loss": total} | parts[-1]

    @torch.no_grad()
    def match(self, stages: list[tuple[Tensor, Tensor]], true: Tensor, classes: Tensor) -> list[Tensor]:
        """The object of each query, (B, G, Q) for each stage: its row, or -1."""
        costs = [self.cost(*stage, true, classes) for stage in stages]
        if len({cost.shape[2] for cost in costs}) > 1:  # on small maps there are fewer proposals than queries
            return [matched(cost, classes >= 0) for cost in costs]
        together = matched(torch.cat(costs), (classes >= 0).repeat(len(costs), 1))
        return list(together.chunk(len(costs)))

    def cost(self, logits: Tensor, boxes: Tensor, true: Tensor, classes: Tensor) -> Tensor:
        """The cost (B, G, Q, M) of each query, with logits and boxes (B, G, Q, ...), for each object."""
        true = true[:, None]
        index = classes.clamp(min=0)[:, None, None, :].expand(*logits.shape[:3], -1)
        chance = logits.sigmoid().gather(-1, index)
        right = -self.alpha * (1 - chance) ** self.gamma * (chance + EPS).log()
        wrong = -(1 - self.alpha) * chance**self.gamma * (1 - chance + EPS).log()
        distance = torch.cdist(boxes, true.expand(-1, boxes.shape[1], -1, -1), p=1)
        shared = generalized_iou(corners(boxes), corners(true))
        return self.match_class * (right - wrong) + self.of_distance * distance - self.of_overlap * shared

    def parts(
        self, logits: Tensor, boxes: Tensor, true: Tensor, classes: Tensor, rows: Tensor, objects: Tensor
    ) -> dict[str, Tensor]:
        """The losses of one stage for a match (B, G, Q), each divided by the objects of all groups."""
        count = objects * rows.shape[1]
        logits, boxes, rows = logits.flatten(1, 2), boxes.flatten(1, 2), rows.flatten(1)
        matched, rows = rows >= 0, rows.clamp(min=0)
        mine = true.gather(1, rows[..., None].expand(-1, -1, 4))  # (B, G Q, 4)
        labels = classes.gather(1, rows).clamp(min=0)[..., None]

        chance = logits.sigmoid()
        score = chance.detach().gather(2, labels)[..., 0]
        shared = paired_iou(corners(boxes.detach()), corners(mine))
        target = score**self.alpha * shared ** (1 - self.alpha)
        target = target.clamp(min=LEAST)[..., None]
        numbers = torch.arange(logits.shape[-1], device=logits.device)
        positive = (labels == numbers) & matched[..., None]  # (B, G Q, C)
        yes = torch.where(positive, target, 0.0)
        no = torch.where(positive, 1 - target, chance**self.gamma)
        entropy = -yes * F.logsigmoid(logits) - no * F.logsigmoid(-logits)

        distance = (boxes - mine).abs().sum(-1)
        separation = 1 - paired_generalized_iou(corners(boxes), corners(mine))
        return {
            "class_loss": entropy.sum() / count,
            "distance_loss": torch.where(matched, distance, 0.0).sum() / count,
            "overlap_loss": torch.where(matched, separation, 0.0).sum() / count,
        }


def matched(costs: Tensor, real: Tensor) -> Tensor:
    """The object of each query (B, G, Q) at the least cost (B, G, Q, M), or -1; real: objects (B, M)."""
    groups = costs.shape[1]
    rows = match(costs.flatten(0, 1), real.repeat_interleave(groups, dim=0))
    return rows.unflatten(0, (-1, groups))
