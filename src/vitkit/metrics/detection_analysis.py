"""Detection metrics with what explains them: confusion, kinds of errors, and the result of each image."""

# N images, K classes, D detections and O objects of all images

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any

import numpy as np

from vitkit.metrics.detection import (
    ALL,
    RECALLS,
    Curve,
    DetectionMetrics,
    detection_confusion,
    detection_metrics,
)
from vitkit.metrics.detection_errors import DetectionErrors, detection_errors
from vitkit.metrics.matching import FREE, TAKEN, match
from vitkit.metrics.overlaps import MOST, Detections, Objects, Overlap, class_ranks, overlap

MOST_CLASSES = 1000  # with more classes the JSON omits the confusion matrix


@dataclass(frozen=True, kw_only=True)
class AnalysedDetections(DetectionMetrics):
    """COCO's numbers with the detections that they are made of; the rest is computed when asked for.

    threshold      the score with the best F1 over the detections of all classes, at an IoU of 0.5; 0 without
                   a true positive
    """

    overlaps: Sequence[Overlap] = field(repr=False)
    index: np.ndarray = field(repr=False)  # (N,) number of each image in its source

    @property
    def classes(self) -> int:
        return len(self.objects)

    @cached_property
    def threshold(self) -> float:
        return self.best_score[0]

    @cached_property
    def best_score(self) -> tuple[float, float]:
        """The score threshold with the best F1 over all classes, and this F1; zeros without any."""
        matching = match(self.overlaps, self.classes)
        right = matching.state[:, ALL, 0] == TAKEN
        rows = np.flatnonzero(right | (matching.state[:, ALL, 0] == FREE))
        rows = rows[np.argsort(-matching.scores[rows], kind="stable")]
        scores, true = matching.scores[rows], right[rows].cumsum()
        last = np.append(scores[1:] != scores[:-1], True)[: len(rows)]  # the last of equal scores
        objects = max(1, int(np.count_nonzero(~matching.crowd)))
        f1 = (2 * true / (np.arange(1, len(rows) + 1) + objects))[last]
        if not f1.any():
            return 0.0, 0.0
        best = int(f1.argmax())
        return float(scores[last][best]), float(f1[best])

    @cached_property
    def confusion(self) -> np.ndarray:
        """(K + 1, K + 1) of the detections from `threshold` on; the last ones are the background."""
        return detection_confusion(self.overlaps, self.classes, self.threshold)

    @cached_property
    def errors(self) -> DetectionErrors:
        return detection_errors(self.overlaps, self.classes)

    @cached_property
    def by_image(self) -> np.ndarray:
        """(N, 3): objects that are detected, false detections, and missed objects, from `threshold` on."""
        matching, images = match(self.overlaps, self.classes), len(self.overlaps)
        state, sure = matching.state[:, ALL, 0], matching.scores >= self.threshold
        right = np.bincount(matching.images[sure & (state == TAKEN)], minlength=images)
        false = np.bincount(matching.images[sure & (state == FREE)], minlength=images)
        objects = np.bincount(matching.object_images[~matching.crowd], minlength=images)
        return np.stack([right, false, objects - right], axis=1)

    @property
    def ignored(self) -> int:
        """Objects that do not count: crowds, or marked as difficult."""
        return int(sum(np.count_nonzero(image.crowd) for image in self.overlaps))

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """Also the confusion at a threshold and the kinds of errors, if the classes are named."""
        facts = super().to_json(classes)
        if not classes:
            return facts
        threshold, f1 = self.best_score
        written = len(classes) <= MOST_CLASSES
        return facts | {
            "threshold": threshold, "f1": f1, "ignored": self.ignored, "errors": self.errors.to_json(),
            "confusion": self.confusion.tolist() if written else None,
        }  # fmt: skip


def analysed_detections(
    overlaps: Sequence[Overlap], classes: int, loss: float = nan, index: np.ndarray | None = None
) -> AnalysedDetections:
    """The metrics of all images, in the order of the data set; index: their numbers in their source."""
    metrics = detection_metrics(overlaps, classes, loss)
    places = np.arange(len(overlaps)) if index is None else index
    return AnalysedDetections(**vars(metrics), overlaps=overlaps, index=places)


def envelope(curve: Curve) -> list[tuple[float, float]]:
    """(recall, precision) at 101 recalls as far as they are reached: the highest at this recall or beyond."""
    if not len(curve.recall) or not curve.recall[-1]:
        return []
    highest = np.maximum.accumulate(curve.precision[::-1])[::-1]
    places = np.searchsorted(curve.recall, RECALLS)
    reached = places < len(curve.recall)
    return [(round(float(r), 4), round(float(highest[p]), 4))
            for r, p in zip(RECALLS[reached], places[reached], strict=True)]  # fmt: skip


def outcomes(detections: Detections, objects: Objects, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Of one image: which detections are right (N,), in their order, and which objects are detected (M,).

    A crowd counts as detected, and a detection on it as right.
    """
    ranked = np.argsort(-np.asarray(detections.scores, np.float64), kind="stable")
    image = overlap(detections, objects)
    matching = match([image], classes)
    right, seen = np.zeros(len(ranked), bool), np.array(objects.crowd, bool)
    kept = ranked[class_ranks(np.asarray(detections.classes, np.int64)[ranked]) < MOST]
    right[kept] = matching.state[:, ALL, 0] != FREE
    taken = matching.state[:, ALL, 0] == TAKEN
    seen[matching.partner[taken]] = True
    return right, seen
