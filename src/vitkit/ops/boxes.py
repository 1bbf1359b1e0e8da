"""Boxes as tensors: their overlap, their two usual forms, and non-maximum suppression."""

# N boxes of one list, M of another; ... the same leading axes, such as a batch

import torch
from torch import Tensor

EPS = 1e-9  # of areas, so that an empty box has an overlap of 0 with all others
ROUNDS = 24  # of suppression: one box suppresses another, which then spares a third, and so on


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Centre, width and height (..., 4) to left, top, right and bottom."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Left, top, right and bottom (..., 4) to centre, width and height."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(first + last) / 2, last - first], dim=-1)


def box_area(boxes: Tensor) -> Tensor:
    """The areas (...) of boxes (..., 4); 0 of a box without a width or a height."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def overlap(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection and union (...) of boxes (..., 4), which broadcast."""
    first = torch.maximum(left[..., :2], right[..., :2])
    last = torch.minimum(left[..., 2:], right[..., 2:])
    shared = (last - first).clamp(min=0).prod(-1)
    return shared, box_area(left) + box_area(right) - shared


def box_iou(left: Tensor, right: Tensor) -> Tensor:
    """Intersection over union of each pair of boxes (..., N, 4) and (..., M, 4), (..., N, M)."""
    shared, union = overlap(left[..., :, None, :], right[..., None, :, :])
    return shared / union.clamp(min=EPS)


def paired_giou(left: Tensor, right: Tensor) -> Tensor:
    """Generalised IoU (...) of boxes (..., 4) with others of the same place, from -1 to 1."""
    shared, union = overlap(left, right)
    first = torch.minimum(left[..., :2], right[..., :2])
    last = torch.maximum(left[..., 2:], right[..., 2:])
    hull = (last - first).clamp(min=0).prod(-1)
    return shared / union.clamp(min=EPS) - (hull - union) / hull.clamp(min=EPS)


def generalized_iou(left: Tensor, right: Tensor) -> Tensor:
    """Generalised IoU of each pair of boxes (..., N, 4) and (..., M, 4), (..., N, M)."""
    return paired_giou(left[..., :, None, :], right[..., None, :, :])


def nms(boxes: Tensor, scores: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """The boxes (..., N, 4) that stay when each suppresses those of lower score (..., N) that overlap it.

    Returns the indices and the scores of `most` boxes, (..., most), by their score; rows that are missing
    have score 0. Shapes depend on nothing but shapes, so that exported graphs and CUDA graphs can hold it.

    In order of score, a box stays if no box that stays overlaps it by more than the threshold. Each round
    decides this for all boxes at once from the round before, and so for one more link of every chain of
    suppressions; chains are short, and a longer one than ROUNDS changes a box at its end.
    """
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    boxes = boxes.gather(-2, order[..., None].expand_as(boxes))
    count = boxes.shape[-2]
    higher = torch.ones(count, count, device=boxes.device).triu(1)  # row suppresses column
    suppresses = (box_iou(boxes, boxes) > threshold).to(higher.dtype) * higher
    stays = torch.ones_like(scores)
    for _ in range(min(ROUNDS, count)):
        stays = ((stays[..., None, :] @ suppresses)[..., 0, :] < 0.5).to(scores.dtype)
    kept, places = (scores * stays).topk(min(most, count), dim=-1)
    return order.gather(-1, places), kept
