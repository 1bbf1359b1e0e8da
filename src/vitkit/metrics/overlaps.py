"""Input of detection metrics: the IoU of each detection with each object of an image, by boxes or masks."""

# N detections and M objects of an image

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vitkit.errors import Error

MOST = 100  # detections of a class in an image that count; COCO's rule


def no_boxes() -> np.ndarray:
    return np.zeros((0, 4))


@dataclass(frozen=True)
class Detections:
    """The detections in one image, in any order, in pixels of the original image."""

    boxes: np.ndarray = field(default_factory=no_boxes)  # (N, 4) of (x0, y0, x1, y1), edges exclusive
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (N,)
    classes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (N,)
    masks: np.ndarray | None = None  # (N, H, W) bool, to compare masks instead of boxes


class Objects(Protocol):
    """The annotated objects of one image; data.targets.Target is one of these."""

    @property
    def boxes(self) -> np.ndarray: ...  # (M, 4), as above
    @property
    def labels(self) -> np.ndarray: ...  # (M,) class numbers
    @property
    def crowd(self) -> np.ndarray: ...  # (M,) bool: a region in which detections do not count
    @property
    def areas(self) -> np.ndarray: ...  # (M,) of the object, by which it is small, medium or large
    @property
    def instances(self) -> np.ndarray | None: ...  # (M, H, W) bool


@dataclass(frozen=True)
class Overlap:
    """An image without its pixels: detections by falling score, at most 100 of a class, and objects."""

    scores: np.ndarray  # (N,)
    classes: np.ndarray  # (N,)
    areas: np.ndarray  # (N,)
    ranks: np.ndarray  # (N,) place among the detections of the class
    labels: np.ndarray  # (M,)
    crowd: np.ndarray  # (M,)
    object_areas: np.ndarray  # (M,)
    iou: np.ndarray  # (N, M) float64; with a crowd, the share of the detection that it covers


COLUMNS: dict[str, Any] = {  # of a flattened image
    "scores": np.float64, "classes": np.int64, "areas": np.float64, "ranks": np.int64, "labels": np.int64,
    "crowd": bool, "object_areas": np.float64, "iou": np.float64,
}  # fmt: skip


def overlap(detections: Detections, objects: Objects) -> Overlap:
    """Compare by masks if the detections have masks, otherwise by boxes."""
    order = np.argsort(-np.asarray(detections.scores, np.float64), kind="stable")
    ranks = class_ranks(detections.classes[order])
    order, ranks = order[ranks < MOST], ranks[ranks < MOST]
    crowd = np.asarray(objects.crowd, bool)
    if detections.masks is None:
        boxes = np.asarray(detections.boxes, np.float64).reshape(-1, 4)[order]
        areas = box_areas(boxes)
        iou = box_overlap(boxes, np.asarray(objects.boxes, np.float64).reshape(-1, 4), crowd)
    else:
        masks = detections.masks[order]
        areas = mask_areas(masks)
        if objects.instances is None or objects.instances.shape[1:] != masks.shape[1:]:
            shape = None if objects.instances is None else objects.instances.shape[1:]
            raise Error(
                f"the detections have masks of {masks.shape[1:]} pixels, the annotations of {shape}",
                code="evaluation.unsupported",
            )
        iou = mask_overlap(masks, areas, objects.instances, crowd)
    return Overlap(
        scores=np.asarray(detections.scores, np.float64)[order],
        classes=np.asarray(detections.classes, np.int64)[order], areas=areas, ranks=ranks,
        labels=np.asarray(objects.labels, np.int64), crowd=crowd,
        object_areas=np.asarray(objects.areas, np.float64), iou=iou,
    )  # fmt: skip


def flattened(image: Overlap) -> np.ndarray:
    """All numbers of an image as one row of float64, which processes can exchange."""
    parts = [np.asarray(getattr(image, name), np.float64).ravel() for name in COLUMNS]
    return np.concatenate([[len(image.scores), len(image.labels)], *parts])


def restored(row: np.ndarray) -> tuple[Overlap, np.ndarray]:
    """The image at the beginning of a row, and the rest of the row."""
    n, m = int(row[0]), int(row[1])
    lengths = [n, n, n, n, m, m, m, n * m]
    *parts, rest = np.split(row[2:], np.cumsum(lengths))
    fields = {name: part.astype(kind) for (name, kind), part in zip(COLUMNS.items(), parts, strict=True)}
    return Overlap(**fields | {"iou": fields["iou"].reshape(n, m)}), rest


def class_ranks(classes: np.ndarray) -> np.ndarray:
    """(N,) how many earlier ones have the same class."""
    order = np.argsort(classes, kind="stable")
    ordered = classes[order]
    ranks = np.empty(len(classes), np.int64)
    ranks[order] = np.arange(len(classes)) - np.searchsorted(ordered, ordered)
    return ranks


def box_areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def box_overlap(boxes: np.ndarray, others: np.ndarray, crowd: np.ndarray, edge: float = 0) -> np.ndarray:
    """(N, M) in float64. edge: 1 if coordinates are those of the first and last pixel, as in Pascal VOC."""
    (left, top, right, bottom), (x0, y0, x1, y1) = boxes.T[:, :, None], others.T[:, None]
    width = (np.minimum(right, x1) - np.maximum(left, x0) + edge).clip(0)
    height = (np.minimum(bottom, y1) - np.maximum(top, y0) + edge).clip(0)
    areas = (right - left + edge) * (bottom - top + edge)
    return quotient(width * height, areas, (x1 - x0 + edge) * (y1 - y0 + edge), crowd)


def mask_overlap(masks: np.ndarray, areas: np.ndarray, others: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """(N, M) in float64, from boolean masks (N, H, W) and (M, H, W), compared in the box of each of the M."""
    intersection = np.zeros((len(masks), len(others)))
    for column, other in enumerate(others):
        rows, columns = np.flatnonzero(other.any(1)), np.flatnonzero(other.any(0))
        if len(rows):
            box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
            intersection[:, column] = mask_areas(masks[:, *box] & other[box])
    return quotient(intersection, areas[:, None], mask_areas(others), crowd)


def mask_areas(masks: np.ndarray) -> np.ndarray:
    """(N,) float64 from (N, H, W) bool; one after the other, which is several times as fast as along axes."""
    return np.array([np.count_nonzero(mask) for mask in masks], np.float64)


def quotient(
    intersection: np.ndarray, areas: np.ndarray, other_areas: np.ndarray, crowd: np.ndarray
) -> np.ndarray:
    whole = np.where(crowd, areas, areas + other_areas - intersection)
    return np.divide(intersection, whole, out=np.zeros_like(intersection), where=intersection > 0)
