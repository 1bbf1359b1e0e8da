"""COCO's average precision and recall of boxes or masks, precision-recall curves and the confusion."""

# N images, K classes, A = 4 sizes, T = 10 thresholds of the IoU, D detections

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from vitkit.errors import Error
from vitkit.metrics.matching import SIZES, TAKEN, THRESHOLDS, Matching, match
from vitkit.metrics.overlaps import Overlap

RECALLS = np.linspace(0, 1, 101)  # at which precision is read
LIMITS = (1, 10, 100)  # detections of a class in an image that count for the average recall
ALL, SMALL, MEDIUM, LARGE = range(4)
EPSILON = np.spacing(1)  # as in COCO's code, where it avoids 0 / 0


@dataclass(frozen=True)
class Curve:
    """Precision and recall of a class at an IoU of 0.5, down to each score, without those on crowds."""

    scores: np.ndarray  # falling, without repetition
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray

    @property
    def best(self) -> tuple[float | None, float]:
        """The highest score threshold with the best F1 (None without a true positive), and this F1."""
        if not self.f1.any():
            return None, 0.0
        place = int(self.f1.argmax())
        return float(self.scores[place]), float(self.f1[place])


@dataclass(frozen=True)
class DetectionMetrics:
    """COCO's twelve numbers; None if there are no objects that count.

    ap             average precision: the mean over ten thresholds of the IoU, 101 recalls, and the classes
                   that have objects. ap50 and ap75 are at one threshold; by size: of objects up to 32 x 32,
                   from there to 96 x 96, and from there on, pixels of area
    ar_100         average recall: the mean over thresholds and classes with at most 100 detections of a
                   class in an image; also with 10 and 1, and by size
    class_ap       (K,) of each class, NaN without objects; class_ap50 the same at 0.5
    objects        (K,) that count: without crowds; class_images (K,) images that have any
    """

    images: int
    loss: float
    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ar_1: float | None
    ar_10: float | None
    ar_100: float | None
    ar_small: float | None
    ar_medium: float | None
    ar_large: float | None
    class_ap: np.ndarray
    class_ap50: np.ndarray
    objects: np.ndarray
    class_images: np.ndarray
    curves: tuple[Curve, ...]

    def __repr__(self) -> str:
        return f"DetectionMetrics(images={self.images}, ap={self.ap}, ap50={self.ap50}, loss={self.loss:.4f})"

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """`threshold` of a class: the score with the best F1 at an IoU of 0.5."""
        names = ("images", "loss", "ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar_1", "ar_10",
                 "ar_100", "ar_small", "ar_medium", "ar_large")  # fmt: skip
        per_class = {}
        for k, name in enumerate(classes):
            threshold, f1 = self.curves[k].best
            per_class[name] = {
                "ap": number(self.class_ap[k]), "ap50": number(self.class_ap50[k]),
                "objects": int(self.objects[k]), "images": int(self.class_images[k]), "f1": f1,
                "threshold": threshold,
            }  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"per_class": per_class}


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if np.isnan(value) else float(value)


def mean(values: np.ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else None


def detection_metrics(overlaps: Sequence[Overlap], classes: int, loss: float = nan) -> DetectionMetrics:
    """The metrics of all images, in the order of the data set, which decides between equal scores."""
    if not overlaps:
        raise Error("there are no images to evaluate on", code="data.empty")
    matching = match(overlaps, classes)
    ap, ar = precision_and_recall(matching, classes)
    counts = ~matching.crowd
    pairs = np.unique(np.stack([matching.labels, matching.object_images])[:, counts], axis=1)
    return DetectionMetrics(
        images=len(overlaps), loss=loss, ap=mean(ap[:, ALL]), ap50=mean(ap[:, ALL, 0]),
        ap75=mean(ap[:, ALL, 5]), ap_small=mean(ap[:, SMALL]), ap_medium=mean(ap[:, MEDIUM]),
        ap_large=mean(ap[:, LARGE]), ar_1=mean(ar[:, ALL, :, 0]), ar_10=mean(ar[:, ALL, :, 1]),
        ar_100=mean(ar[:, ALL, :, 2]), ar_small=mean(ar[:, SMALL, :, 2]),
        ar_medium=mean(ar[:, MEDIUM, :, 2]), ar_large=mean(ar[:, LARGE, :, 2]),
        class_ap=ap[:, ALL].mean(1), class_ap50=ap[:, ALL, 0],
        objects=np.bincount(matching.labels[counts], minlength=classes),
        class_images=np.bincount(pairs[0], minlength=classes), curves=curves(matching, classes),
    )  # fmt: skip


def precision_and_recall(matching: Matching, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Average precision (K, A, T), and recall at each limit (K, A, T, 3); NaN without objects that count."""
    ap = np.full((classes, len(SIZES), len(THRESHOLDS)), np.nan)
    ar = np.full((*ap.shape, len(LIMITS)), np.nan)
    right, wrong = matching.right, matching.wrong
    order = np.lexsort((-matching.scores, matching.classes))  # stable: equal scores keep their order
    first = np.searchsorted(matching.classes[order], np.arange(classes + 1))
    for k in range(classes):
        rows = order[first[k] : first[k + 1]]
        objects = (~matching.skipped[matching.labels == k]).sum(0)  # (A,)
        for a in np.flatnonzero(objects):
            hits, misses = right[rows, a].T, wrong[rows, a].T  # (T, D of this class)
            ap[k, a] = average_precision(hits, misses, objects[a])
            for m, limit in enumerate(LIMITS):
                ar[k, a, :, m] = hits[:, matching.ranks[rows] < limit].sum(1) / objects[a]
    return ap, ar


def average_precision(hits: np.ndarray, misses: np.ndarray, objects: int) -> np.ndarray:
    """(T,) from whether each detection, by falling score, is a true or a false positive, (T, D).

    The precision at a recall is the highest at this recall or a greater one, and 0 where none is reached.
    """
    if not hits.shape[1]:
        return np.zeros(len(hits))
    true, false = hits.cumsum(1).astype(np.float64), misses.cumsum(1)
    precision = true / (false + true + EPSILON)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    precision = np.append(precision, np.zeros((len(hits), 1)), axis=1)
    places = np.stack([np.searchsorted(row / objects, RECALLS) for row in true])
    return np.take_along_axis(precision, places, 1).mean(1)


def curves(matching: Matching, classes: int) -> tuple[Curve, ...]:
    """The curve of each class; without objects its recall is 0."""
    right, wrong = matching.right[:, ALL, 0], matching.wrong[:, ALL, 0]
    objects = np.bincount(matching.labels[~matching.crowd], minlength=classes)
    result = []
    for k in range(classes):
        rows = np.flatnonzero((matching.classes == k) & (right | wrong))
        rows = rows[np.argsort(-matching.scores[rows], kind="stable")]
        true, scores = right[rows].cumsum(), matching.scores[rows]
        last = np.append(scores[1:] != scores[:-1], True)[: len(rows)]  # the last of equal scores
        true, shown, total = true[last], np.arange(1, len(rows) + 1)[last], max(1, objects[k])
        result.append(Curve(scores[last], true / shown, true / total, 2 * true / (shown + total)))
    return tuple(result)


def detection_confusion(overlaps: Sequence[Overlap], classes: int, threshold: float) -> np.ndarray:
    """(K + 1, K + 1) int64 at an IoU of 0.5: rows are true classes, columns detected; the last is background.

    Detections with a score below `threshold` are left out. The diagonal holds COCO's true positives. Of the
    other detections each takes, by falling score, the free object of any class that it overlaps most; what
    is left on both sides is paired with the background. Detections on a crowd are left out.
    """
    matching = match(overlaps, classes)
    confusion = np.zeros((classes + 1, classes + 1), np.int64)
    free = ~matching.crowd
    used = (matching.scores >= threshold) & (matching.state[:, ALL, 0] == TAKEN)
    free[matching.partner[used]] = False
    np.add.at(confusion, (matching.classes[used], matching.classes[used]), 1)
    first = first_object = 0
    for image in overlaps:
        mine = free[first_object : first_object + len(image.labels)]  # a view: what is taken stays taken
        for d in np.flatnonzero((image.scores >= threshold) & ~used[first : first + len(image.scores)]):
            near = image.iou[d] * (mine & (image.iou[d] >= THRESHOLDS[0]))
            if near.any():
                confusion[image.labels[near.argmax()], image.classes[d]] += 1
                mine[near.argmax()] = False
            elif not (image.crowd & (image.iou[d] >= THRESHOLDS[0])).any():
                confusion[classes, image.classes[d]] += 1
        first, first_object = first + len(image.scores), first_object + len(image.labels)
    np.add.at(confusion, (matching.labels[free], classes), 1)
    return confusion
