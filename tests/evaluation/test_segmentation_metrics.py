"""mIoU and its relatives: printed values of small examples, literal loops, and labels that are refused."""

import json

import numpy as np
import pytest
import torch

from vitkit.errors import Error
from vitkit.metrics.segmentation import (
    PixelCounts,
    boundary_width,
    iou,
    miou_interval,
    pixel_counts,
    segmentation_metrics,
)

TRUE = [
    [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 255, 255]],
    [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]],
]
PREDICTED = [
    [[0, 0, 1, 1], [0, 1, 1, 1], [2, 0, 3, 1]],
    [[1, 1, 1, 1], [1, 1, 2, 2], [0, 0, 0, 1]],
]


def example(**options) -> PixelCounts:
    return pixel_counts(torch.tensor(PREDICTED), torch.tensor(TRUE, dtype=torch.uint8), 5, **options)


def test_the_printed_example():
    metrics = segmentation_metrics(example(), loss=0.5)
    assert metrics.confusion.tolist() == [
        [6, 2, 0, 0, 0],
        [0, 10, 2, 0, 0],
        [1, 0, 1, 0, 0],
        [0] * 5,
        [0] * 5,
    ]
    assert metrics.ious[:3].tolist() == pytest.approx([0.666667, 0.714286, 0.25], abs=5e-7)
    assert metrics.ious[3:].isnan().all(), "class 3 is predicted on an ignored pixel only"
    assert metrics.miou == pytest.approx(0.543651, abs=5e-7)
    assert metrics.pixel_accuracy == pytest.approx(17 / 22)
    assert metrics.mean_accuracy == pytest.approx(0.694444, abs=5e-7)
    assert metrics.dices[:3].tolist() == pytest.approx([0.8, 0.833333, 0.4], abs=5e-7)
    assert metrics.weighted_iou == pytest.approx(0.654762, abs=5e-7)
    assert (metrics.images, metrics.class_images.tolist()) == (2, [2, 2, 1, 0, 0])


def test_json_has_the_keys_of_the_others_and_no_nan():
    json_ = segmentation_metrics(example(), loss=0.5).to_json(("sky", "road", "car", "dog", "cat"))
    json.dumps(json_, allow_nan=False)
    assert {"images", "loss", "miou", "pixel_accuracy", "mean_accuracy", "per_class"} <= json_.keys()
    assert json_["per_class"]["car"] == pytest.approx(
        {"iou": 0.25, "accuracy": 0.5, "dice": 0.4, "pixels": 2, "images": 1}
    )
    assert json_["per_class"]["dog"] == {
        "iou": None,
        "accuracy": None,
        "dice": None,
        "pixels": 0,
        "images": 0,
    }


def test_a_class_that_is_only_predicted_counts_as_zero():
    metrics = segmentation_metrics(pixel_counts(torch.tensor([[0, 2]]), torch.tensor([[0, 0]]), 4))
    assert metrics.ious.nan_to_num(-1).tolist() == [0.5, -1, 0, -1]
    assert metrics.miou == 0.25 and metrics.mean_accuracy == 0.5


def test_batches_and_images_one_by_one_give_the_same():
    parts = [pixel_counts(torch.tensor(p), torch.tensor(t), 5, boundary=True)
             for p, t in zip(PREDICTED, TRUE, strict=True)]  # fmt: skip
    total, whole = parts[0] + parts[1], example(boundary=True)
    assert torch.equal(total.confusion, whole.confusion) and total.confusion.dtype == torch.int64
    assert torch.equal(total.images, whole.images) and torch.equal(total.boundary, whole.boundary)
    assert torch.equal(whole.images.sum(0)[0], whole.confusion.diagonal())
    assert torch.equal(whole.images.sum(0)[2], whole.confusion.sum(0))


@pytest.mark.parametrize(("predicted", "label", "code"), [
    (0, 5, "data.labels"), (0, -1, "data.labels"), (0, 254, "data.labels"),
    (5, 0, "evaluation.classes"), (-1, 0, "evaluation.classes"),
])  # fmt: skip
def test_classes_outside_are_refused(predicted, label, code):
    with pytest.raises(Error) as refusal:
        pixel_counts(torch.tensor([[predicted, 0]]), torch.tensor([[label, 0]]), 5)
    assert refusal.value.code == code


def test_other_refusals_and_what_is_predicted_on_ignored_pixels():
    with pytest.raises(Error) as refusal:
        pixel_counts(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64), 5)
    assert refusal.value.code == "evaluation.unsupported"
    counts = pixel_counts(torch.tensor([[99, -7]]), torch.tensor([[255, 255]]), 5)
    with pytest.raises(Error) as refusal:
        segmentation_metrics(counts)
    assert refusal.value.code == "data.empty"


def test_the_interval_is_seeded_and_holds_the_miou():
    rng = np.random.default_rng(3)
    labels = torch.from_numpy(rng.integers(0, 3, (40, 8, 8)))
    share = torch.from_numpy(rng.random((40, 1, 1)))  # images differ in how much of them is wrong
    wrong = torch.from_numpy(rng.random((40, 8, 8))) < share
    metrics = segmentation_metrics(
        pixel_counts(torch.where(wrong, (labels + 1) % 3, labels), labels, 3), seed=5
    )
    counts = pixel_counts(torch.where(wrong, (labels + 1) % 3, labels), labels, 3)
    assert metrics.interval[0] < metrics.miou < metrics.interval[1]
    assert metrics.interval == miou_interval(counts.images, 5) != miou_interval(counts.images, 6)
    mious = [
        float(iou(counts.images[torch.from_numpy(rng.integers(0, 40, 40))].sum(0)).nanmean())
        for _ in range(2000)
    ]
    assert metrics.interval == pytest.approx(np.quantile(mious, [0.025, 0.975]), abs=0.02)


def rectangle(height, width, rows, columns):
    mask = torch.zeros(height, width, dtype=torch.int64)
    mask[slice(*rows), slice(*columns)] = 1
    return mask


@pytest.mark.parametrize(("true", "predicted", "width", "mask_iou", "boundary_iou"), [
    (rectangle(40, 40, (10, 30), (10, 30)), rectangle(40, 40, (10, 30), (12, 32)), 1, 0.818182, 0.310345),
    (rectangle(100, 100, (0, 40), (10, 60)), rectangle(100, 100, (0, 44), (10, 60)), 3, 0.909091, 0.563636),
])  # fmt: skip
def test_the_printed_boundary_ious(true, predicted, width, mask_iou, boundary_iou):
    assert boundary_width(*true.shape) == width
    metrics = segmentation_metrics(pixel_counts(predicted, true, 2, boundary=True))
    assert float(metrics.ious[1]) == pytest.approx(mask_iou, abs=5e-7)
    assert float(metrics.boundary_ious[1]) == pytest.approx(boundary_iou, abs=5e-7)


def eroded_band(mask: np.ndarray, width: int) -> np.ndarray:
    """The literal rule: zeros around the image, `width` erosions by 3x3, the mask without what is left."""
    left = np.pad(mask, 1)
    for _ in range(width):
        around = np.pad(left, 1)
        windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3))
        left = windows.all((2, 3)) & left
    return mask & ~left[1:-1, 1:-1]


def test_the_bands_of_all_classes_equal_the_erosion_of_each():
    rng = np.random.default_rng(0)
    true, predicted = (rng.integers(0, 3, (6, 7)).repeat(10, 0).repeat(10, 1) for _ in range(2))
    counts = pixel_counts(torch.from_numpy(predicted), torch.from_numpy(true), 3, boundary=True)
    width = boundary_width(60, 70)
    for k in range(3):
        first, second = (eroded_band(m == k, width) for m in (true, predicted))
        assert counts.boundary[:, k].tolist() == [(first & second).sum(), first.sum(), second.sum()]


def test_an_ignored_region_is_a_hole_in_both_maps():
    true = rectangle(60, 60, (10, 50), (10, 50))
    true[20:30, 20:30] = 255
    predicted = true.clone()
    predicted[20:30, 20:30] = 0
    metrics = segmentation_metrics(pixel_counts(predicted, true, 2, boundary=True))
    assert metrics.boundary_ious.tolist() == [1, 1] and metrics.boundary_iou == 1
