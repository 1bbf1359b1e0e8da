"""Evaluation with several labels an image: against scikit-learn, a plain loop, and numbers done by hand."""

import math

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.metrics.classification import accuracy
from vitkit.metrics.multilabel import (
    EXACT,
    MultilabelAccuracy,
    average_precision,
    multi_hot,
    multilabel_accuracy,
)


def slow_precision(scores, there) -> float:
    """The definition, one threshold after the other."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        above = [t for s, t in zip(scores, there, strict=True) if s >= threshold]
        recall, precision = sum(above) / sum(there), sum(above) / len(above)
        total += (recall - before) * precision
        before = recall
    return total


def cases():
    """Scores of all kinds: without ties, with many, all the same; labels rare and common."""
    rng = np.random.default_rng(3)
    for images in (1, 2, 7, 60):
        for share in (0.05, 0.5, 0.95):
            for levels in (1, 4, 10**6):
                there = rng.random(images) < share
                there[0] = True
                yield rng.integers(0, levels, images).astype(np.float32), there


@pytest.mark.parametrize(("scores", "there"), list(cases()))
def test_precision_is_that_of_its_definition(scores, there):
    found = average_precision(torch.from_numpy(scores), torch.from_numpy(there))
    assert found == pytest.approx(slow_precision(scores.tolist(), there.tolist()), abs=1e-12)


def test_precision_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    for scores, there in cases():
        found = average_precision(torch.from_numpy(scores), torch.from_numpy(there))
        assert found == pytest.approx(metrics.average_precision_score(there, scores), abs=1e-12)


def batches(logits, labels, size):
    """The logits stand for the images, so that the model is the identity."""
    for at in range(0, len(logits), size):
        yield {"image": logits[at : at + size], "label": labels[at : at + size]}


def evaluated(logits, labels, size=4) -> MultilabelAccuracy:
    return multilabel_accuracy(lambda images: images, batches(logits, labels, size), logits.shape[1])


def test_numbers_done_by_hand():
    logits = torch.tensor([[2.0, -1, 0], [1, 3, -2], [-1, -2, -3], [-2, 1, -1]])
    labels = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]])
    found = evaluated(logits, labels, size=3)
    assert found.images == 4 and found.top1 == 2 / 4 and found.top5 is None
    assert found.positives.tolist() == [2, 2, 0]
    assert found.precisions[:2].tolist() == pytest.approx([1.0, (1 / 2 + 2 / 4) / 2])
    assert math.isnan(found.precisions[2])  # no image has it: left out of the mean, and counted
    assert found.mean_average_precision == pytest.approx(0.75)
    # said above 0.5: [1 0 0] [1 1 0] [0 0 0] [0 1 0]; a logit of 0 is not above
    assert found.exact_match == 2 / 4 and found.f1 == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    output = found.to_json(("a", "b", "c"))
    assert output["per_class"]["c"] == {"images": 0, "average_precision": None}
    assert output["per_class"]["b"] == {"images": 2, "average_precision": pytest.approx(0.5)}
    assert output["classes_without_images"] == 1 and "confusion" not in output
    assert {"top1", "top5", "images", "per_class", "loss"} <= set(output)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    assert found.loss == pytest.approx(float(loss.sum(1).mean()))


def test_batches_do_not_matter_and_many_classes_have_a_top_5():
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(53, 9, generator=rng)
    labels = (torch.rand(53, 9, generator=rng) < 0.2).float()
    whole = evaluated(logits, labels, 53).to_json(tuple("abcdefghi"))
    small = evaluated(logits, labels, 5).to_json(tuple("abcdefghi"))
    assert small.pop("loss") == pytest.approx(whole.pop("loss")) and small == whole
    fives = [labels[i, logits[i].topk(5).indices].any() for i in range(53)]
    assert whole["top5"] == pytest.approx(np.mean(fives)) and whole["top1"] < whole["top5"]


def test_class_numbers_are_labels_as_rows_are():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    rows = torch.tensor(
        [[1.0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 0]]
    )
    numbers = torch.tensor([[0, 3], [-1, -1], [1, -1], [0, -1], [2, 3], [2, -1]])
    assert torch.equal(multi_hot(numbers, 4), rows) and torch.equal(multi_hot(rows, 4), rows)
    assert evaluated(logits, numbers).to_json(tuple("abcd")) == evaluated(logits, rows).to_json(tuple("abcd"))


def counted(monkeypatch, logits, labels, size, gather=lambda rows: rows) -> MultilabelAccuracy:
    """As of so many images that their scores are not kept."""
    monkeypatch.setattr("vitkit.metrics.multilabel.ExactPrecision", None)
    many = EXACT // (5 * logits.shape[1]) + 1
    return multilabel_accuracy(lambda x: x, batches(logits, labels, size), logits.shape[1], gather, many)


def test_scores_that_would_fill_the_memory_are_counted_by_steps(monkeypatch):
    rng = torch.Generator().manual_seed(7)
    labels = (torch.rand(900, 12, generator=rng) < torch.linspace(0, 0.4, 12)).float()
    logits = torch.randn(900, 12, generator=rng) * 4 - 9 + 3 * labels
    whole, found = evaluated(logits, labels), counted(monkeypatch, logits, labels, 64)
    assert found.precisions[1:].tolist() == pytest.approx(whole.precisions[1:].tolist(), abs=0.005)
    assert math.isnan(found.precisions[0]) and found.positives.tolist() == whole.positives.tolist()
    assert found.loss == pytest.approx(whole.loss)
    same = ("images", "top1", "top5", "exact_match", "f1")
    assert [getattr(found, name) for name in same] == [getattr(whole, name) for name in same]


def test_scores_on_the_steps_are_counted_exactly_whatever_the_parts(monkeypatch):
    rng = torch.Generator().manual_seed(8)
    logits = torch.randint(-44 * 32 + 1, 20 * 32 + 1, (300, 5), generator=rng) / 32
    labels = (torch.rand(300, 5, generator=rng) < 0.2).float()
    whole = evaluated(logits, labels).precisions.tolist()
    monkeypatch.setattr("vitkit.metrics.multilabel.CHUNK", 35)
    for size in (300, 7):
        assert counted(monkeypatch, logits, labels, size).precisions.tolist() == pytest.approx(
            whole, abs=1e-12
        )
    twice = counted(monkeypatch, logits, labels, 9, lambda rows: torch.cat([rows, rows]))  # two processes
    assert twice.images == 600 and twice.precisions.tolist() == pytest.approx(whole, abs=1e-12)
    beyond = counted(monkeypatch, torch.tensor([[1e9], [-1e9]]), torch.tensor([[1.0], [0.0]]), 2)
    assert beyond.precisions.tolist() == [1.0]


def test_without_any_label_nothing_is_made_up():
    found = evaluated(torch.full((3, 2), -1.0), torch.zeros(3, 2))
    assert found.mean_average_precision is None and found.f1 == 0 and found.top1 == 0
    assert found.exact_match == 1  # none was there and none was said


def test_labels_of_the_other_kind_are_an_error():
    one, several = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3)
    with refused("evaluation.unsupported", "one label"):
        evaluated(torch.zeros(2, 3), one)
    with refused("evaluation.unsupported", "multilabel_accuracy"):
        accuracy(lambda images: images, batches(torch.zeros(2, 3), several, 2), 3)
    with refused("data.empty"):
        evaluated(torch.zeros(0, 3), several[:0])
