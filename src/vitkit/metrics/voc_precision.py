"""Pascal VOC's average precision at an IoU of 0.5."""

from collections.abc import Sequence

import numpy as np

from vitkit.metrics.overlaps import Detections, Objects, box_overlap

THRESHOLD = 0.5


def voc_ap50(
    images: Sequence[tuple[Detections, Objects]], classes: int, *, points: int | None = None, edge: float = 0
) -> np.ndarray:
    """(K,) average precision of each class, NaN without objects; difficult objects are those marked as crowd.

    points: None is the area under the curve (2010 and later), 11 the mean over eleven recalls (2007).
    edge: 1 if coordinates are of the first and the last pixel, as in VOC's files; 0 if edges are exclusive.
    Unlike in COCO's rules a detection looks only at the object that it overlaps most: if that is taken, the
    detection is wrong. A difficult object excuses a detection by its ordinary IoU.
    """
    return np.array([class_ap50(images, k, points, edge) for k in range(classes)])


def class_ap50(
    images: Sequence[tuple[Detections, Objects]], k: int, points: int | None, edge: float
) -> float:
    scores, hits, counted, total = [], [], [], 0
    for detections, objects in images:
        mine, its = detections.classes == k, objects.labels == k
        difficult = np.asarray(objects.crowd, bool)[its]
        total += int(np.count_nonzero(~difficult))
        boxes = np.asarray(detections.boxes, np.float64).reshape(-1, 4)[mine]
        others = np.asarray(objects.boxes, np.float64).reshape(-1, 4)[its]
        hit, count = match_to_truth(detections.scores[mine], boxes, others, difficult, edge)
        scores.append(detections.scores[mine])
        hits.append(hit)
        counted.append(count)
    if not total:
        return np.nan
    keep = np.concatenate(counted)
    order = np.argsort(-np.concatenate(scores)[keep], kind="stable")
    true = np.concatenate(hits)[keep][order].cumsum()
    return area_under(true, true / np.arange(1, len(true) + 1), total, points)


def match_to_truth(
    scores: np.ndarray, boxes: np.ndarray, others: np.ndarray, difficult: np.ndarray, edge: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of an image's detections of a class: whether each is right, and whether it counts at all."""
    right, counts = np.zeros(len(boxes), bool), np.ones(len(boxes), bool)
    if not len(others):
        return right, counts
    iou = box_overlap(boxes, others, np.zeros(len(others), bool), edge)
    free = ~difficult
    for d in np.argsort(-scores, kind="stable"):
        best = iou[d].argmax()
        if iou[d, best] < THRESHOLD:
            continue
        if difficult[best]:
            counts[d] = False
        else:
            right[d] = free[best]
            free[best] = False
    return right, counts


def area_under(true: np.ndarray, precision: np.ndarray, total: int, points: int | None) -> float:
    """From true positives and precision down to each detection. Recalls are compared as integers, exactly."""
    highest = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0)
    if points is None:
        gains = np.diff(true, prepend=0)
        return float((highest[:-1] * gains).sum() / total)
    needed = np.arange(points) * total  # recall >= p / (points - 1)
    return float(highest[np.searchsorted(true * (points - 1), needed)].mean())
