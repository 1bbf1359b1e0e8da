"""COCO's assignment of detections to objects, for all images, thresholds and sizes at once."""

# D detections and O objects of all images, K classes, A = 4 size ranges, T = 10 thresholds of the IoU.
# A group is an image's detections and objects of one class: G groups, C candidates and S objects in each

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.errors import Error
from vitkit.metrics.overlaps import Overlap, class_ranks

THRESHOLDS = np.linspace(0.5, 0.95, 10)
SIZES = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])  # all, small, medium, large
CELLS = 2**21  # of the arrays of a chunk of groups
FREE, TAKEN, IGNORED = 0, 1, 2  # of a detection: matched with nothing, an object, one that does not count


@dataclass(frozen=True)
class Matching:
    """All detections and objects, in the order of the images, and within an image by falling score."""

    images: np.ndarray  # (D,)
    classes: np.ndarray  # (D,)
    scores: np.ndarray  # (D,)
    ranks: np.ndarray  # (D,) place among the detections of the class in the image
    outside: np.ndarray  # (D, A) whether its own area is outside of the range
    state: np.ndarray  # (D, A, T) FREE, TAKEN or IGNORED
    partner: np.ndarray  # (D,) its object at the first threshold, all sizes; -1: none
    object_images: np.ndarray  # (O,)
    labels: np.ndarray  # (O,)
    crowd: np.ndarray  # (O,)
    skipped: np.ndarray  # (O, A) whether the object does not count: crowd, or outside of the range

    @property
    def right(self) -> np.ndarray:
        """(D, A, T) true positives."""
        return self.state == TAKEN

    @property
    def wrong(self) -> np.ndarray:
        """(D, A, T) false positives."""
        return (self.state == FREE) & ~self.outside[:, :, None]


@dataclass(frozen=True)
class Pairs:
    """Detections and objects of the same image and class that overlap enough for some threshold: P pairs."""

    detection: np.ndarray  # (P,) sorted
    object: np.ndarray  # (P,) sorted within a detection
    iou: np.ndarray  # (P,)


def match(overlaps: Sequence[Overlap], classes: int) -> Matching:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(image, name) for image in overlaps])

    check_classes(joined("classes"), classes, "detection", "evaluation.classes")
    check_classes(joined("labels"), classes, "annotated object", "data.labels")
    areas, object_areas, crowd = joined("areas"), joined("object_areas"), joined("crowd")
    skipped = crowd[:, None] | outside_of_range(object_areas)
    state = np.zeros((len(areas), len(SIZES), len(THRESHOLDS)), np.uint8)
    partner = np.full(len(areas), -1)
    images = np.repeat(np.arange(len(overlaps)), [len(image.scores) for image in overlaps])
    object_images = np.repeat(np.arange(len(overlaps)), [len(image.labels) for image in overlaps])
    keys = images * classes + joined("classes"), object_images * classes + joined("labels")
    for groups in groups_of(candidate_pairs(overlaps), *keys, crowd, skipped):
        assign(groups, state, partner)
    return Matching(
        images=images, object_images=object_images,
        classes=joined("classes"), scores=joined("scores"), ranks=joined("ranks"),
        outside=outside_of_range(areas), state=state, partner=partner,
        labels=joined("labels"), crowd=crowd, skipped=skipped,
    )  # fmt: skip


def check_classes(values: np.ndarray, classes: int, name: str, code: str) -> None:
    wrong = values[(values < 0) | (values >= classes)]
    if len(wrong):
        raise Error(
            f"the class of a {name} is {wrong[0]}, but there are {classes} classes, so it must be one of "
            f"0 to {classes - 1}",
            code=code,
        )


def outside_of_range(areas: np.ndarray) -> np.ndarray:
    """(n, A); both ends of a range belong to it."""
    return (areas[:, None] < SIZES[:, 0]) | (areas[:, None] > SIZES[:, 1])


def candidate_pairs(overlaps: Sequence[Overlap]) -> Pairs:
    """Most detections of most images overlap no object of their class by half, and drop out here."""
    parts, first, first_object = [], 0, 0
    for image in overlaps:
        detection, object_ = np.nonzero(
            (image.iou >= THRESHOLDS[0]) & (image.classes[:, None] == image.labels)
        )
        parts.append((detection + first, object_ + first_object, image.iou[detection, object_]))
        first, first_object = first + len(image.scores), first_object + len(image.labels)
    return Pairs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Groups:
    """Groups of about equal size, the one with the most candidates first, padded to the largest."""

    candidates: np.ndarray  # (G, C) detections by falling score, then -1
    objects: np.ndarray  # (G, S) in the order of the annotations
    passes: np.ndarray  # (G, C, S) how many thresholds the IoU reaches; 0: no pair
    places: np.ndarray  # (G, C, S) place by rising IoU; of equal ones the later object is higher
    crowd: np.ndarray  # (G, S)
    skipped: np.ndarray  # (G, A, S)


def groups_of(
    pairs: Pairs, keys: np.ndarray, object_keys: np.ndarray, crowd: np.ndarray, skipped: np.ndarray
) -> Iterator[Groups]:
    """The pairs by group: detections and objects of equal keys. Groups of similar sizes come together."""
    candidates, objects = np.unique(pairs.detection), np.unique(pairs.object)
    names, group, counts = np.unique(keys[candidates], return_inverse=True, return_counts=True)
    object_group = np.searchsorted(names, object_keys[objects])
    place, slot = class_ranks(group), class_ranks(object_group)
    sizes = 2 ** np.ceil(np.log2(np.bincount(object_group, minlength=len(names)))).astype(int)
    row = np.searchsorted(candidates, pairs.detection), np.searchsorted(objects, pairs.object)
    pair_group, start = group[row[0]], 0
    order = np.lexsort((-counts, sizes))
    local = np.full(len(names), -1)
    while start < len(order):
        size, most = sizes[order[start]], counts[order[start]]
        end = start + max(1, CELLS // (size * max(most, SIZES.shape[0] * len(THRESHOLDS))))
        chunk = order[start : min(end, np.searchsorted(sizes[order], size, side="right"))]
        local[:] = -1
        local[chunk] = np.arange(len(chunk))
        here, mine, its = local[pair_group] >= 0, local[group] >= 0, local[object_group] >= 0
        padded = np.full((len(chunk), most), -1)
        padded[local[group[mine]], place[mine]] = candidates[mine]
        padded_objects = np.full((len(chunk), size), -1)
        padded_objects[local[object_group[its]], slot[its]] = objects[its]
        iou = np.zeros((len(chunk), most, size))
        iou[local[pair_group[here]], place[row[0][here]], slot[row[1][here]]] = pairs.iou[here]
        yield Groups(
            candidates=padded, objects=padded_objects,
            passes=np.searchsorted(THRESHOLDS, iou, side="right"),
            places=iou.argsort(-1, kind="stable").argsort(-1),
            crowd=crowd[padded_objects], skipped=skipped[padded_objects].swapaxes(1, 2),
        )  # fmt: skip
        start += len(chunk)


def assign(groups: Groups, state: np.ndarray, partner: np.ndarray) -> None:
    """Give each candidate, by falling score, the best object that is left, at every size and threshold.

    An object that counts is preferred to any that does not; a crowd can be taken again and again. Writes the
    rows of the candidates in `state` and `partner`.
    """
    size = groups.objects.shape[1]
    value = np.where(groups.skipped, 1, size + 1)[:, :, None]  # (G, A, 1, S)
    left = np.ones((len(groups.objects), len(SIZES), len(THRESHOLDS), size), bool)
    crowd = groups.crowd[:, None, None]
    for turn, candidates in enumerate(groups.candidates.T):
        g = np.count_nonzero(candidates >= 0)  # groups with fewer candidates are at the end
        reached = groups.passes[:g, turn, None] > np.arange(len(THRESHOLDS))[:, None]  # (g, T, S)
        worth = (groups.places[:g, turn, None, None] + value[:g]) * (reached[:, None] & left[:g])
        best = worth.argmax(-1)[..., None]  # (g, A, T, 1)
        highest = np.take_along_axis(worth, best, -1)[..., 0]
        rows = candidates[:g]
        state[rows] = np.where(highest > size, TAKEN, np.where(highest > 0, IGNORED, FREE))
        taken = (np.arange(size) == best) & (highest > 0)[..., None]
        left[:g] &= ~taken | crowd[:g]
        chosen = groups.objects[np.arange(g), best[:, 0, 0, 0]]
        partner[rows] = np.where(highest[:, 0, 0] > 0, chosen, -1)
