"""Panoptic quality: matched segments and their IoU, for things and stuff."""

# H x W pixels, S segments of an image, K classes

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from vitkit.errors import Error

VOID = -1  # pixels of no segment; annotated ones do not count


@dataclass(frozen=True)
class Segments:
    """The segments of an image, annotated or predicted; segments without pixels do not exist."""

    map: np.ndarray  # (H, W) int: number of the segment of each pixel, from 0, or VOID
    classes: np.ndarray  # (S,)
    crowd: np.ndarray | None = None  # (S,) bool, of annotations: a region of many objects


@dataclass(frozen=True)
class Quality:
    """PQ = SQ x RQ for a single class; over several, each is the mean over the classes that occur."""

    pq: float | None
    sq: float | None
    rq: float | None
    classes: int  # that occur, annotated or predicted

    def to_json(self) -> dict[str, Any]:
        return {"pq": self.pq, "sq": self.sq, "rq": self.rq, "classes": self.classes}


@dataclass(frozen=True)
class PanopticMetrics:
    images: int
    loss: float
    counts: np.ndarray  # (4, K): sum of IoU, true positives, false positives, false negatives
    things: np.ndarray  # (K,) bool

    @property
    def per_class(self) -> np.ndarray:
        """(3, K) PQ, SQ and RQ of each class, NaN for classes that do not occur; SQ without a match is 0."""
        iou, true, false, missed = self.counts
        whole = true + (false + missed) / 2
        with np.errstate(invalid="ignore"):
            sq = np.where(whole > 0, iou / np.maximum(true, 1), np.nan)
            return np.stack([iou / whole, sq, true / whole])

    def quality(self, chosen: np.ndarray) -> Quality:
        values = self.per_class[:, chosen & ~np.isnan(self.per_class[0])]
        if not values.size:
            return Quality(None, None, None, 0)
        pq, sq, rq = values.mean(1).tolist()
        return Quality(pq, sq, rq, values.shape[1])

    @property
    def overall(self) -> Quality:
        return self.quality(np.ones_like(self.things))

    @property
    def pq(self) -> float | None:
        return self.overall.pq

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        per_class = {}
        for k, name in enumerate(classes):
            qualities = [None if np.isnan(value) else float(value) for value in self.per_class[:, k]]
            _, true, false, missed = self.counts[:, k]
            per_class[name] = dict(zip(("pq", "sq", "rq"), qualities, strict=True)) | {
                "thing": bool(self.things[k]), "true_positives": int(true), "false_positives": int(false),
                "false_negatives": int(missed),
            }  # fmt: skip
        return {
            "images": self.images, "loss": self.loss, **self.overall.to_json(),
            "things": self.quality(self.things).to_json(), "stuff": self.quality(~self.things).to_json(),
            "per_class": per_class,
        }  # fmt: skip


def panoptic_metrics(
    counts: Sequence[np.ndarray], things: Sequence[bool] | np.ndarray, loss: float = nan
) -> PanopticMetrics:
    """From the `panoptic_counts` of each image; `things` says which of the K classes have instances."""
    if not len(counts):
        raise Error("there are no images to evaluate on", code="data.empty")
    return PanopticMetrics(len(counts), loss, np.sum(counts, axis=0), np.asarray(things, bool))


def panoptic_counts(predicted: Segments, annotated: Segments, classes: int) -> np.ndarray:
    """(4, K) of one image: the sum of the IoU of matches, matches, false positives and false negatives.

    Segments of the same class match if their IoU is above 0.5, which makes matches unique. Void pixels are
    taken out of the union. An unmatched prediction is not wrong if most of it is void or on the crowd region
    of its class; of several such regions the last counts, as in COCO's code. A crowd is never missed.
    """
    for segments, code in ((predicted, "evaluation.classes"), (annotated, "data.labels")):
        check_segments(segments, classes, code)
    shape = len(annotated.classes) + 1, len(predicted.classes) + 1  # void is row and column 0
    if annotated.map.shape != predicted.map.shape:
        raise Error(
            f"predicted segments of {predicted.map.shape} pixels do not fit annotated ones of "
            f"{annotated.map.shape}",
            code="evaluation.unsupported",
        )
    pairs = (annotated.map.ravel().astype(np.int64) + 1) * shape[1] + predicted.map.ravel() + 1
    joint = np.bincount(pairs, minlength=shape[0] * shape[1]).reshape(shape)
    areas, true_areas, void = joint.sum(0)[1:], joint.sum(1)[1:], joint[0, 1:]
    both = joint[1:, 1:]
    crowd = np.zeros(len(true_areas), bool) if annotated.crowd is None else np.asarray(annotated.crowd, bool)
    comparable = (annotated.classes[:, None] == predicted.classes) & ~crowd[:, None] & (both > 0)
    union = true_areas[:, None] + areas - both - void
    iou = np.divide(both, union, out=np.zeros(both.shape), where=comparable)
    row, column = np.nonzero(iou > 0.5)
    missed = (true_areas > 0) & ~crowd
    missed[row] = False
    excused = void + crowd_pixels(predicted, annotated, crowd & (true_areas > 0), both)
    wrong = (areas > 0) & (2 * excused <= areas)
    wrong[column] = False
    return np.stack([
        np.bincount(annotated.classes[row], weights=iou[row, column], minlength=classes),
        np.bincount(annotated.classes[row], minlength=classes),
        np.bincount(predicted.classes[wrong], minlength=classes),
        np.bincount(annotated.classes[missed], minlength=classes),
    ])  # fmt: skip


def crowd_pixels(predicted: Segments, annotated: Segments, crowd: np.ndarray, both: np.ndarray) -> np.ndarray:
    """(S,) pixels of each predicted segment on the last crowd region of its class."""
    region = {annotated.classes[row]: row for row in np.flatnonzero(crowd)}
    rows = [region.get(k, -1) for k in predicted.classes]
    return np.array([both[row, s] if row >= 0 else 0 for s, row in enumerate(rows)], np.int64)


def check_segments(segments: Segments, classes: int, code: str) -> None:
    numbers = segments.map
    if numbers.size and (numbers.min() < VOID or numbers.max() >= len(segments.classes)):
        raise Error(
            f"the map of segments has numbers from {numbers.min()} to {numbers.max()}, but the image has "
            f"{len(segments.classes)} segments: numbers start at 0, and -1 is void",
            code=code,
        )
    wrong = segments.classes[(segments.classes < 0) | (segments.classes >= classes)]
    if len(wrong):
        raise Error(
            f"a segment has the class {wrong[0]}, but there are {classes} classes, so it must be one of "
            f"0 to {classes - 1}",
            code=code,
        )
