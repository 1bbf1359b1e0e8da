"""The losses of FCOS, and which object each location learns.

Shapes are static and nothing is read back from a GPU, so that a step can be captured in a CUDA graph.
"""

# B batch, N locations of all levels, M rows of boxes (those that are not used have class -1), K classes

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.models.dense.pyramid_detector import boxes_at
from vitkit.ops.boxes import paired_generalized_iou

RADIUS = 1.5  # strides from an object's centre within which locations learn it
LONGEST = 8.0  # strides from a location to the farthest side of an object, beyond which the next level has it
ALPHA, GAMMA = 0.25, 2.0  # of the focal loss
FAR = 1e12  # an area above all others


def assign(locations: Tensor, strides: Tensor, boxes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The object of each location: its row of the boxes (B, N), and whether there is one (B, N).

    A location learns the objects whose box it is in, whose centre is near in both directions, and whose
    farthest side is at a distance of its level: the levels share all distances. Of several, the smallest.

    locations, strides   (N, 2) and (N,) in pixels; levels are those of one stride, and each doubles it
    boxes, classes       (B, M, 4) in pixels, and (B, M)
    """
    sides = distances_to(locations, boxes)  # (B, N, M, 4)
    centres = (boxes[:, None, :, :2] + boxes[:, None, :, 2:]) / 2  # (B, 1, M, 2)
    from_centre = (locations[:, None] - centres).abs().amax(-1)  # (B, N, M)
    farthest = sides.amax(-1)
    first, last = strides == strides.min(), strides == strides.max()
    least = torch.where(first, 0.0, LONGEST / 2 * strides)[:, None]
    most = torch.where(last, torch.inf, LONGEST * strides)[:, None]
    fits = (sides.amin(-1) > 0) & (from_centre < RADIUS * strides[:, None])
    fits &= (farthest > least) & (farthest <= most) & (classes >= 0)[:, None]
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None]  # (B, 1, M)
    smallest, rows = torch.where(fits, areas, FAR).min(-1)
    return rows, smallest < FAR


def positives(locations: Tensor, strides: Tensor, boxes: Tensor, classes: Tensor) -> Tensor:
    """How many locations have an object to learn, in all images together."""
    return assign(locations, strides, *with_a_row(boxes, classes))[1].sum()


def with_a_row(boxes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes (B, M, 4) and classes (B, M) with a row that is not used in place of none."""
    if boxes.shape[1]:
        return boxes.float(), classes
    return boxes.new_zeros(len(boxes), 1, 4).float(), classes.new_full((len(boxes), 1), -1)


def distances_to(locations: Tensor, boxes: Tensor) -> Tensor:
    """From each location to the left, top, right and bottom of each box, (B, N, M, 4)."""
    places, boxes = locations[:, None], boxes[:, None]
    return torch.cat([places - boxes[..., :2], boxes[..., 2:] - places], dim=-1)


def centreness_of(sides: Tensor) -> Tensor:
    """1 (...) in the middle of a box and 0 at its edges, from the distances (..., 4) to its sides."""
    across, down = sides[..., 0::2], sides[..., 1::2]
    ratio = across.amin(-1) * down.amin(-1) / (across.amax(-1) * down.amax(-1)).clamp(min=1e-9)
    return ratio.clamp(min=0).sqrt()


def focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The focal loss of each logit, whose target is 0 or 1."""
    chance = logits.sigmoid()
    wrong = torch.where(targets > 0, 1 - chance, chance)
    weight = torch.where(targets > 0, ALPHA, 1 - ALPHA)
    return weight * wrong**GAMMA * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def fcos_loss(
    outputs: dict[str, Tensor], boxes: Tensor, classes: Tensor, count: Tensor | None = None
) -> dict[str, Tensor]:
    """The loss and its three parts, each summed over locations and divided by those that have an object.

    outputs          of `Fcos.train_outputs`
    boxes, classes   (B, M, 4) in pixels of the images, and (B, M), -1 in rows that are not used
    count            of locations with an object in the whole batch of a step; None: of those in these images
    """
    locations, strides, logits = outputs["locations"], outputs["strides"], outputs["logits"].float()
    boxes, classes = with_a_row(boxes, classes)
    rows, positive = assign(locations, strides, boxes, classes)
    count = (positive.sum() if count is None else count).clamp(min=1)
    labels = classes.gather(1, rows)  # (B, N)
    numbers = torch.arange(logits.shape[-1], device=logits.device)
    targets = ((labels[..., None] == numbers) & positive[..., None]).to(logits.dtype)
    true = boxes.gather(1, rows[..., None].expand(-1, -1, 4))  # (B, N, 4)
    sides = torch.cat([locations - true[..., :2], true[..., 2:] - locations], dim=-1)
    predicted = boxes_at(locations, strides, outputs["distances"].float())
    of_box = 1 - paired_generalized_iou(predicted / strides[:, None], true / strides[:, None])
    of_centre = F.binary_cross_entropy_with_logits(
        outputs["centreness"].float(), centreness_of(sides).clamp(max=1), reduction="none"
    )
    parts = {
        "class_loss": focal_loss(logits, targets).sum() / count,
        "box_loss": torch.where(positive, of_box, 0.0).sum() / count,
        "centre_loss": torch.where(positive, of_centre, 0.0).sum() / count,
    }
    return {"loss": torch.stack([*parts.values()]).sum()} | parts
