"""Why detections are wrong, by kind, and how much AP50 each kind costs (TIDE: Bolya et al., 2020)."""

# N detections and M objects of an image, D and O of all images, K classes

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitkit.metrics.detection import average_precision
from vitkit.metrics.matching import FREE, TAKEN, Matching, match
from vitkit.metrics.overlaps import Overlap

FOREGROUND, BACKGROUND = 0.5, 0.1  # IoU
KINDS = ("class", "location", "both", "duplicate", "background", "missed")
CLASS, LOCATION, BOTH, DUPLICATE, ON_BACKGROUND, MISSED = range(6)
NONE = -1  # of a detection: right, or on a crowd


@dataclass(frozen=True)
class DetectionErrors:
    """Errors of the detections at an IoU of 0.5.

    class        an object of another class is there
    location     an object of this class overlaps by 0.1 to 0.5
    both         an object of another class overlaps by 0.1 to 0.5
    duplicate    the object has a detection with a higher score
    background   no object overlaps by more than 0.1
    missed       an object without a detection, even one of the first two kinds

    `importance` is how much AP50 would rise if only the errors of one kind were corrected; these do not add
    up. The last two figures are the rise without any false positive, and without any missed object.
    """

    ap50: float | None
    counts: dict[str, int]
    importance: dict[str, float]
    false_positives: float
    false_negatives: float
    kinds: np.ndarray  # (D,) number in KINDS of each detection, in the order of the overlaps, or NONE
    missed: np.ndarray  # (O,) bool of the objects

    def to_json(self) -> dict[str, Any]:
        kinds = {k: {"count": self.counts[k], "importance": self.importance[k]} for k in KINDS}
        return {"ap50": self.ap50, "kinds": kinds, "false_positives": self.false_positives,
                "false_negatives": self.false_negatives}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What AP50 is made of."""

    scores: np.ndarray  # (D,)
    classes: np.ndarray  # (D,)
    right: np.ndarray  # (D,) bool
    counted: np.ndarray  # (D,) bool: neither on a crowd nor removed by a correction
    objects: np.ndarray  # (K,) that can be detected
    evaluated: np.ndarray  # (K,) bool: classes that had objects before corrections

    @property
    def ap50(self) -> float:
        """The mean over the classes, without those that a correction has left no object and detection."""
        values = []
        for k in np.flatnonzero(self.evaluated):
            rows = np.flatnonzero((self.classes == k) & self.counted)
            rows = rows[np.argsort(-self.scores[rows], kind="stable")]
            if self.objects[k]:
                hits = self.right[rows][None]
                values.append(float(average_precision(hits, ~hits, self.objects[k])[0]))
            elif len(rows):
                values.append(0.0)
        return float(np.mean(values)) if values else 0.0


def detection_errors(overlaps: Sequence[Overlap], classes: int) -> DetectionErrors:
    """The errors among the detections that AP50 counts: at most 100 of a class in an image."""
    matching = match(overlaps, classes)
    kinds, targets, missed = diagnose(overlaps, matching)
    objects = np.bincount(matching.labels[~matching.crowd], minlength=classes)
    right = matching.state[:, 0, 0] == TAKEN
    base = Outcome(
        scores=matching.scores, classes=matching.classes, right=right, counted=right | (kinds != NONE),
        objects=objects, evaluated=objects > 0,
    )  # fmt: skip
    ap50 = base.ap50
    lost = np.bincount(matching.labels[missed], minlength=classes)
    counts = [*(int((kinds == kind).sum()) for kind in range(MISSED)), int(missed.sum())]
    fixed = [corrected(base, kinds == kind, targets, matching.labels) for kind in range(MISSED)]
    fixed.append(replace(base, objects=objects - lost))
    gains = [max(0.0, outcome.ap50 - ap50) for outcome in fixed]
    reached = np.bincount(matching.classes[right], minlength=classes)
    return DetectionErrors(
        ap50=ap50 if objects.any() else None, counts=dict(zip(KINDS, counts, strict=True)),
        importance=dict(zip(KINDS, gains, strict=True)),
        false_positives=replace(base, counted=right).ap50 - ap50,
        false_negatives=replace(base, objects=reached).ap50 - ap50, kinds=kinds, missed=missed,
    )  # fmt: skip


def corrected(base: Outcome, chosen: np.ndarray, targets: np.ndarray, labels: np.ndarray) -> Outcome:
    """The chosen errors become right if they are the best hope of an object, and vanish otherwise."""
    rescued = chosen & (targets >= 0)
    classes = base.classes.copy()
    classes[rescued] = labels[targets[rescued]]
    counted = base.counted & (~chosen | rescued)
    return replace(base, classes=classes, right=base.right | rescued, counted=counted)


def diagnose(overlaps: Sequence[Overlap], matching: Matching) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kind of each detection, (D,); the object that correcting it would detect, or -1, (D,); and which
    objects are missed, (O,).

    Several errors may point to one object; only that of the highest score is its best hope.
    """
    kinds, targets = np.full(len(matching.scores), NONE), np.full(len(matching.scores), -1)
    matched = np.zeros(len(matching.labels), bool)
    matched[matching.partner[matching.state[:, 0, 0] == TAKEN]] = True
    hopeless = ~matched & ~matching.crowd
    for image, first, first_object in with_starts(overlaps):
        own = slice(first_object, first_object + len(image.labels))
        rows = first + np.flatnonzero(matching.state[first : first + len(image.scores), 0, 0] == FREE)
        for row in rows:  # by falling score
            kind, nearest = kind_of(image, int(row - first), matched[own])
            kinds[row] = kind
            if nearest >= 0 and hopeless[nearest + first_object]:
                targets[row] = nearest + first_object
                hopeless[nearest + first_object] = False
    return kinds, targets, hopeless


def with_starts(overlaps: Sequence[Overlap]) -> Iterator[tuple[Overlap, int, int]]:
    """Each image with the numbers of its first detection and its first object."""
    first = first_object = 0
    for image in overlaps:
        yield image, first, first_object
        first, first_object = first + len(image.scores), first_object + len(image.labels)


def kind_of(image: Overlap, d: int, matched: np.ndarray) -> tuple[int, int]:
    """The first kind that fits, in this order, and the object that it points to, or -1."""
    counts = ~image.crowd
    if not counts.any():
        return ON_BACKGROUND, -1
    iou = image.iou[d] * counts
    same = image.labels == image.classes[d]
    near, other = iou * same, iou * ~same
    if BACKGROUND <= near.max() <= FOREGROUND:
        return LOCATION, int(near.argmax())
    if other.max() >= FOREGROUND:
        return CLASS, int(other.argmax())
    if (near * matched).max() >= FOREGROUND:
        return DUPLICATE, -1
    return (ON_BACKGROUND if iou.max() <= BACKGROUND else BOTH), -1
