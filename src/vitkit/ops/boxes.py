"""Boxes: corners and centres, IoU and generalised IoU, and greedy non-maximum suppression of static shape."""

# B images, N and M boxes; a box is (x0, y0, x1, y1), and ... are any leading dimensions

import torch
from torch import Tensor
from torch._higher_order_ops import while_loop

from vitkit.ops import fused


def corners(boxes: Tensor) -> Tensor:
    """(..., 4) of (x0, y0, x1, y1) from (centre x, centre y, width, height)."""
    centre, size = boxes.split(2, dim=-1)
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def centres(boxes: Tensor) -> Tensor:
    """(..., 4) of (centre x, centre y, width, height) from (x0, y0, x1, y1)."""
    low, high = boxes.split(2, dim=-1)
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def box_area(boxes: Tensor) -> Tensor:
    """(...): zero where a right edge is not to the right of its left edge, or a bottom not below its top."""
    x0, y0, x1, y1 = boxes.unbind(-1)
    return (x1 - x0).clamp(min=0) * (y1 - y0).clamp(min=0)


def paired_iou(first: Tensor, second: Tensor) -> Tensor:
    """The IoU of each box with the one at the same place; the leading dimensions are broadcast.

    It is 0 if neither box has an area.
    """
    intersection, union = intersection_and_union(first, second)
    return ratio(intersection, union)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """(..., N, M) from (..., N, 4) and (..., M, 4)."""
    return paired_iou(first[..., :, None, :], second[..., None, :, :])


def paired_generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """IoU minus the share of the smallest box around both that neither covers: from -1 to 1.

    It has a gradient also where the boxes do not overlap. Rezatofighi et al., 2019.
    """
    intersection, union = intersection_and_union(first, second)
    around = box_area(
        torch.cat(
            [torch.minimum(first[..., :2], second[..., :2]), torch.maximum(first[..., 2:], second[..., 2:])],
            dim=-1,
        )
    )
    return ratio(intersection, union) - ratio(around - union, around)


def generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """(..., N, M) from (..., N, 4) and (..., M, 4)."""
    return paired_generalized_iou(first[..., :, None, :], second[..., None, :, :])


def intersection_and_union(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The areas, coordinate by coordinate: tensors of pairs of numbers would be several times slower."""
    (left, top, right, bottom), (x0, y0, x1, y1) = first.unbind(-1), second.unbind(-1)
    width = (torch.minimum(right, x1) - torch.maximum(left, x0)).clamp(min=0)
    height = (torch.minimum(bottom, y1) - torch.maximum(top, y0)).clamp(min=0)
    intersection = width * height
    return intersection, box_area(first) + box_area(second) - intersection


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 with a gradient of 0 where the whole is 0."""
    positive = whole > 0
    return part * positive / torch.where(positive, whole, torch.ones_like(whole))


def nms(
    boxes: Tensor, scores: Tensor, threshold: float, most: int, classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Greedy non-maximum suppression: (B, most) rows by falling score, and (B, most) whether there is one.

    boxes (B, N, 4), scores (B, N), classes (B, N). A box is dropped if its IoU with a kept box of a higher
    score is greater than `threshold`; of equal scores the first comes first. Boxes with a score of -inf are
    left out. Only boxes of the same class suppress each other; comparing classes is exact, unlike moving each
    class to an area of its own, which rounds the coordinates. Rows that are missing at the end are 0.

    The answer is exactly that of the loop over all sorted boxes that stops after `most`. Each turn takes the
    best box that is left and strikes out those it suppresses, so the number of turns, and all shapes, are
    fixed: there is no synchronisation, and it can be captured and exported. Memory grows with N squared.
    """
    keeps = box_iou(boxes, boxes) <= threshold  # (B, N, N): row i says which boxes survive box i
    if classes is not None:
        keeps = keeps | (classes[..., :, None] != classes[..., None, :])
    place = torch.arange(boxes.shape[-2], device=boxes.device)
    keeps = keeps & (place[:, None] != place)  # a box that is taken is no longer left, also one of no area
    rows, best_scores = (
        nms_loop_in_graph(scores, keeps, most) if fused.EXPORTING else nms_loop(scores, keeps, most)
    )
    exists = best_scores > float("-inf")
    return rows * exists, exists


def nms_loop(scores: Tensor, keeps: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The rows (B, most) that the steps of `nms` take, and their scores; -inf where none was left."""
    left, rows, best_scores = scores, [], []
    for _ in range(most):
        left, best, score = nms_step(left, keeps)
        rows.append(best)
        best_scores.append(score)
    return torch.cat(rows, dim=-1), torch.cat(best_scores, dim=-1)


def nms_loop_in_graph(scores: Tensor, keeps: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """`nms_loop` as one loop of a graph: a hundred steps one after the other would take a minute."""

    def unfinished(turn: Tensor, left: Tensor, rows: Tensor, best_scores: Tensor, keeps: Tensor) -> Tensor:
        return turn < most

    def next_step(
        turn: Tensor, left: Tensor, rows: Tensor, best_scores: Tensor, keeps: Tensor
    ) -> tuple[Tensor, ...]:
        left, best, score = nms_step(left, keeps)
        here = torch.arange(most, device=turn.device) == turn
        rows, best_scores = torch.where(here, best, rows), torch.where(here, score, best_scores)
        return turn + 1, left, rows, best_scores, keeps.clone()

    first = torch.zeros((), dtype=torch.int64, device=scores.device)
    empty = scores.new_zeros(len(scores), most)
    state = (first, scores, empty.long(), empty, keeps)
    _, _, rows, best_scores, _ = while_loop(unfinished, next_step, state)
    return rows, best_scores


def nms_step(left: Tensor, keeps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores (B, N) that a turn of `nms` leaves, the row (B, 1) that it takes, and its score."""
    best = left.argmax(dim=-1, keepdim=True)  # the first of the highest; 0 if none is left
    row = keeps.gather(-2, best[..., None].expand(-1, -1, keeps.shape[-1]))  # (B, 1, N)
    return (
        torch.where(row.squeeze(-2), left, torch.full_like(left, float("-inf"))),
        best,
        left.gather(-1, best),
    )
