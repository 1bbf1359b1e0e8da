"""Panoptic quality beside a literal reading of the rules, and its treatment of void and crowds."""

import json

import numpy as np
import pytest

from vitkit.errors import Error
from vitkit.metrics.panoptic import Segments, panoptic_counts, panoptic_metrics

CLASSES = 5
THINGS = (True, True, False, False, True)


def literal_counts(predicted: Segments, annotated: Segments) -> np.ndarray:
    """Pixel sets and loops over all pairs."""
    counts = np.zeros((4, CLASSES))
    void = annotated.map == -1
    matched, matched_predictions = set(), set()
    real = [g for g in range(len(annotated.classes)) if (annotated.map == g).any()]
    proposed = [p for p in range(len(predicted.classes)) if (predicted.map == p).any()]
    for g in real:
        for p in proposed:
            if annotated.crowd[g] or annotated.classes[g] != predicted.classes[p]:
                continue
            mask, other = annotated.map == g, predicted.map == p
            iou = (mask & other).sum() / (mask | (other & ~void)).sum()
            if iou > 0.5:
                counts[0, annotated.classes[g]] += iou
                counts[1, annotated.classes[g]] += 1
                matched.add(g)
                matched_predictions.add(p)
    for g in real:
        counts[3, annotated.classes[g]] += not annotated.crowd[g] and g not in matched
    for p in proposed:
        crowds = [g for g in real if annotated.crowd[g] and annotated.classes[g] == predicted.classes[p]]
        excused = void | (annotated.map == crowds[-1]) if crowds else void
        other = predicted.map == p
        if p not in matched_predictions and not (excused & other).sum() / other.sum() > 0.5:
            counts[2, predicted.classes[p]] += 1
    return counts


def random_image(rng) -> tuple[Segments, Segments]:
    """Blobs, and a copy with shifted edges, changed classes, and other parts void."""
    number = int(rng.integers(1, 9))
    cells = rng.integers(-1, number, (4, 5)).repeat(6, 0).repeat(6, 1)
    classes = rng.integers(0, CLASSES, number)
    annotated = Segments(cells, classes, rng.random(number) < 0.3)
    moved = np.roll(cells, tuple(rng.integers(-2, 3, 2)), (0, 1))
    moved[rng.random(cells.shape) < 0.1] = -1
    extra = rng.integers(0, number, (4, 5)).repeat(6, 0).repeat(6, 1)
    moved = np.where((rng.random((4, 5)) < 0.2).repeat(6, 0).repeat(6, 1), extra, moved)
    changed = np.where(rng.random(number) < 0.2, rng.integers(0, CLASSES, number), classes)
    return Segments(moved, changed), annotated


def test_counts_equal_the_literal_rules():
    rng = np.random.default_rng(0)
    total = np.zeros((4, CLASSES))
    for _ in range(300):
        image = random_image(rng)
        counts = panoptic_counts(*image, CLASSES)
        np.testing.assert_allclose(counts, literal_counts(*image), atol=1e-12)
        total += counts
    assert (total.sum(1) > 50).all(), "matches, false positives and false negatives all occur"


def row(*numbers: int) -> np.ndarray:
    return np.array([numbers])


def test_a_small_example_by_hand():
    annotated = Segments(row(0, 0, 0, 0, 1, 1, 2, 2, -1, -1), np.array([0, 2, 3]), np.zeros(3, bool))
    predicted = Segments(row(0, 0, 0, 1, 2, 2, 3, 3, 0, 0), np.array([0, 0, 2, 2]))
    metrics = panoptic_metrics([panoptic_counts(predicted, annotated, CLASSES)], THINGS, loss=1.0)
    # class 0: IoU 3 / 4 (the void pixels do not count), one false positive; class 2: one match, one false
    # positive; class 3: missed
    assert metrics.counts.tolist() == [
        [0.75, 0, 1, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0],
    ]  # fmt: skip
    assert metrics.pq == pytest.approx((0.75 / 1.5 + 1 / 1.5 + 0) / 3)
    things, stuff = metrics.quality(metrics.things), metrics.quality(~metrics.things)
    assert (things.pq, things.sq, things.rq, things.classes) == pytest.approx((0.5, 0.75, 1 / 1.5, 1))
    assert (stuff.sq, stuff.rq, stuff.classes) == pytest.approx((0.5, 1 / 3, 2))
    json_ = metrics.to_json(("person", "car", "road", "sky", "dog"))
    json.dumps(json_, allow_nan=False)
    assert json_["pq"] == metrics.pq and json_["things"]["pq"] == 0.5
    assert json_["per_class"]["dog"]["pq"] is None and json_["per_class"]["sky"]["sq"] == 0


@pytest.mark.parametrize(("annotated", "false"), [
    (row(-1, -1, -1, 0), 0), (row(-1, -1, 0, 0), 1),  # more than half is void; exactly half is not enough
    (row(1, 1, 1, 0), 0), (row(1, 1, 0, 0), 1), (row(1, -1, -1, 0), 0),  # the same with a crowd
    (row(2, 2, 2, 0), 1),  # the crowd of another class excuses nothing
])  # fmt: skip
def test_what_excuses_a_false_positive(annotated, false):
    segments = Segments(annotated, np.array([3, 1, 2]), np.array([False, True, True]))
    counts = panoptic_counts(Segments(row(0, 0, 0, 0), np.array([1])), segments, CLASSES)
    assert counts[:, 1].tolist() == [0, 0, false, 0] and counts[3, 2] == 0


def test_half_is_no_match_and_nothing_at_all_is_none():
    annotated = Segments(row(0, 0, -1, -1), np.array([1]))
    assert panoptic_counts(Segments(row(0, -1, -1, -1), np.array([1])), annotated, 5)[:, 1].tolist() == [
        0,
        0,
        1,
        1,
    ]
    empty = Segments(row(-1, -1), np.zeros(0, int))
    metrics = panoptic_metrics([panoptic_counts(empty, empty, CLASSES)], THINGS)
    assert metrics.pq is None and metrics.to_json(tuple("abcde"))["classes"] == 0


@pytest.mark.parametrize(("predicted", "annotated", "code"), [
    (Segments(row(0, 1), np.array([0])), Segments(row(0, 0), np.array([0])), "evaluation.classes"),
    (Segments(row(0, 0), np.array([5])), Segments(row(0, 0), np.array([0])), "evaluation.classes"),
    (Segments(row(0, 0), np.array([0])), Segments(row(0, -2), np.array([0])), "data.labels"),
    (Segments(row(0, 0, 0), np.array([0])), Segments(row(0, 0), np.array([0])), "evaluation.unsupported"),
])  # fmt: skip
def test_refusals(predicted, annotated, code):
    with pytest.raises(Error) as refusal:
        panoptic_counts(predicted, annotated, CLASSES)
    assert refusal.value.code == code
    with pytest.raises(Error) as refusal:
        panoptic_metrics([], THINGS)
    assert refusal.value.code == "data.empty"
