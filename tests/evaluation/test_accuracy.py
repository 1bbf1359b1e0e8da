"""Accuracy, its interval and its calibration, against plain loops and numbers done by hand."""

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.metrics.classification import Accuracy, accuracy, calibration_error, interval


def evaluated(logits, labels, size=4, order=None, **options) -> Accuracy:
    """The logits stand for the images, so that the model is the identity."""
    order = range(len(labels)) if order is None else order
    rows = torch.tensor(list(order))
    batches = (
        {"image": logits[part], "label": labels[part], "index": part}
        for part in rows.split(size)
        if len(part)
    )
    return accuracy(lambda images: images, batches, logits.shape[1], **options)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 9, (61,), generator=generator)
    return 3 * torch.randn(61, 9, generator=generator) + 2 * torch.eye(9)[labels], labels


def test_numbers_are_those_of_plain_loops(case):
    logits, labels = case
    result = evaluated(logits, labels)
    output = result.to_json(tuple("abcdefghi"))
    messages = logits.argmax(1)
    assert (
        output["top1"] == pytest.approx(float((messages == labels).double().mean()))
        and output["images"] == 61
    )
    fives = [labels[i] in logits[i].topk(5).indices for i in range(61)]
    assert output["top5"] == pytest.approx(np.mean(fives))
    assert output["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-6)
    assert output["confusion"][2][3] == sum((labels == 2) & (messages == 3))
    assert output["per_class"]["c"]["images"] == sum(labels == 2)
    chances = logits.softmax(1).amax(1)
    assert torch.allclose(result.confidence.float(), chances)
    slow, right = 0.0, messages == labels
    for q in range(15):
        inside = (chances > q / 15) & (chances <= (q + 1) / 15)
        if inside.any():
            gap = right[inside].double().mean() - chances[inside].double().mean()
            slow += float(inside.double().mean() * gap.abs())
    assert output["calibration_error"] == pytest.approx(slow, abs=1e-7)


def test_neither_batches_nor_the_order_of_rows_matter(case):
    logits, labels = case
    whole = evaluated(logits, labels, 61)
    halves = [*range(0, 61, 2), *range(1, 61, 2)]  # as two processes have them, one after the other
    for other in (evaluated(logits, labels, 7), evaluated(logits, labels, 5, halves)):
        assert other.to_json(tuple("abcdefghi")) == whole.to_json(tuple("abcdefghi"))
        assert torch.equal(other.predicted, whole.predicted) and torch.equal(other.index, torch.arange(61))


def test_several_classes_may_be_right():
    logits = torch.tensor([[4.0, 0, 0, 0, 0, 0, 0], [0, 0, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 5]])
    accepted = torch.zeros(2, 7, dtype=torch.bool)
    accepted[0, [0, 1]] = True
    accepted[1, [6, 2]] = True
    result = evaluated(logits, torch.tensor([0, 0, 1]), accepted=accepted)
    assert result.correct.tolist() == [True, False, True] and result.top1 == pytest.approx(2 / 3)
    assert result.confusion.shape == (2, 7) and result.confusion[0].tolist() == [1, 0, 1, 0, 0, 0, 0]
    together = -logits.softmax(1)[[0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 6, 2]].view(3, 2).sum(1).log()
    assert result.loss == pytest.approx(float(together.mean()), rel=1e-5)
    output = result.to_json(("ab", "gc"))
    assert output["per_class"]["ab"] | {"interval": None} == {"images": 2, "accuracy": 0.5, "interval": None}
    alone = torch.eye(7, dtype=torch.bool)
    labels = torch.tensor([0, 1, 6])
    both = [
        evaluated(logits, labels, **given).to_json(tuple("abcdefg")) for given in ({}, {"accepted": alone})
    ]
    assert both[0].pop("loss") == pytest.approx(both[1].pop("loss")) and both[0] == both[1]


def test_calibration_by_hand():
    confidence = torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    assert calibration_error(confidence, torch.tensor([True, True, True, False])) == 0
    assert calibration_error(confidence, torch.tensor([True, False, False, False])) == pytest.approx(0.5)
    edge = torch.tensor([1 / 15, 1 / 15 + 1e-9, 0.0], dtype=torch.float64)  # the first, the second, the first
    right = torch.tensor([False, True, True])
    assert calibration_error(edge, right) == pytest.approx((1 - 1 / 15 + 14 / 15) / 3, abs=1e-8)


def test_the_interval_is_wilsons():
    right = torch.arange(80) % 5 > 0  # 64 of 80
    low, high = interval(right)
    assert (low, high) == (pytest.approx(0.69954, abs=1e-5), pytest.approx(0.87297, abs=1e-5))  # statsmodels'
    assert interval(right) == interval(right.flip(0))  # the order is nothing to it
    assert interval(torch.ones(5))[0] < 0.6 and interval(torch.ones(5))[1] == 1
    narrow = interval(right, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    with refused("data.empty"):
        interval(torch.zeros(0))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(2)
    for share, images in ((0.7, 200), (0.95, 40)):
        ends = [interval(torch.from_numpy(rng.random(images) < share)) for _ in range(500)]
        covered = np.mean([low <= share <= high for low, high in ends])
        assert 0.92 <= covered <= 0.985, (share, images)


def test_the_temperature_is_the_one_that_scaled_the_logits():
    """Labels drawn from softmax(z), logits given as 2 z: the fitted temperature is 2."""
    torch.manual_seed(0)
    z = 2 * torch.randn(4000, 5)
    labels = torch.multinomial(z.softmax(1), 1)[:, 0]
    batches = [{"image": 2 * z[i : i + 500], "label": labels[i : i + 500]} for i in range(0, 4000, 500)]
    fitted = accuracy(lambda x: x, batches, 5, calibrate=True).calibration
    assert abs(fitted.temperature - 2) < 0.2
    confidence = (2 * z / fitted.temperature).softmax(1).amax(1)
    right = confidence[z.argmax(1) == labels]
    assert float((right >= fitted.threshold).double().mean()) == pytest.approx(0.95, abs=0.002)
    assert accuracy(lambda x: x, batches, 5).calibration is None


@pytest.mark.parametrize("scale", [1 / 16, 16])
def test_logits_may_be_far_too_small_or_too_large(scale):
    """As after a short run with Mixup, whose logits are small."""
    torch.manual_seed(1)
    z = 3 * torch.randn(4000, 5)
    labels = torch.multinomial(z.softmax(1), 1)[:, 0]
    fitted = accuracy(lambda x: x, [{"image": scale * z, "label": labels}], 5, calibrate=True).calibration
    assert fitted.temperature == pytest.approx(scale, rel=0.2)


@pytest.mark.parametrize("images", [4, 20, 400])
def test_a_model_that_is_right_on_a_few_images_does_not_become_certain(images):
    """All N are right: the confidence is (N + 1 / C) / (N + 1), as if one more had a random label."""
    labels = torch.arange(images) % 4
    logits = torch.nn.functional.one_hot(labels, 4).double()
    fitted = accuracy(lambda x: x, [{"image": logits, "label": labels}], 4, calibrate=True).calibration
    confidence = float((logits / fitted.temperature).softmax(1).amax())
    assert 1 - confidence == pytest.approx(0.75 / (images + 1), rel=0.7)  # temperatures are steps of 19 %
    assert fitted.threshold == pytest.approx(confidence)
