"""The losses of segmentation against definitions that are written out, PyTorch, SciPy and transformers."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.models.dense import pixel_loss as pixels
from vitkit.models.dense.mask_criterion import (
    MaskCriterion,
    binary_loss,
    class_loss,
    dice_loss,
    objects_of_classes,
    pairwise_costs,
    shifted,
)
from vitkit.models.dense.pixel_loss import pixel_loss
from vitkit.ops.points import even_points, sample, sample_each, sample_own, sample_owners


def masks(classes=4, ignored=0.2):
    mask = torch.randint(0, classes, (3, 12, 20)).to(torch.uint8)
    mask[torch.rand(mask.shape) < ignored] = 255
    return mask


# cross-entropy and dice of pixels


def test_pixel_loss_is_the_cross_entropy_at_full_resolution():
    logits, mask = torch.randn(3, 4, 3, 5), masks()
    fine = F.interpolate(logits, scale_factor=4, mode="bilinear")
    expected = [F.cross_entropy(fine[i : i + 1], mask[i : i + 1].long(), ignore_index=255) for i in range(3)]
    assert torch.allclose(pixel_loss(logits, mask, 4.0), torch.stack(expected), atol=1e-6)


def test_weights_count_pixels_more_often():
    logits, mask, weights = torch.randn(3, 4, 3, 5), masks(), torch.tensor([0.5, 1.0, 2.0, 0.0])
    fine = F.interpolate(logits, scale_factor=4, mode="bilinear").log_softmax(1)
    for i in range(3):
        rows, columns = torch.nonzero(mask[i] != 255, as_tuple=True)
        classes = mask[i][rows, columns].long()
        expected = -(weights[classes] * fine[i, classes, rows, columns]).mean()
        assert torch.allclose(pixel_loss(logits, mask, 4.0, weights=weights)[i], expected, atol=1e-5)


def test_dice_is_the_mean_over_the_classes_of_an_image():
    logits, mask = torch.randn(1, 4, 3, 5), masks()[:1]
    mask[mask == 3] = 0
    share = F.interpolate(logits, scale_factor=4, mode="bilinear").softmax(1)[0]
    counted = mask[0] != 255
    values = []
    for k in range(3):
        p, t = share[k][counted], (mask[0] == k)[counted].float()
        values.append(1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))
    expected = pixel_loss(logits, mask, 4.0) + 2 * torch.stack(values).mean()
    assert torch.allclose(pixel_loss(logits, mask, 4.0, dice=2.0), expected, atol=1e-5)


@pytest.mark.parametrize("dice", [0.0, 1.0])
def test_gradients_do_not_depend_on_how_many_images_are_in_memory(monkeypatch, dice):
    logits, mask = torch.randn(3, 4, 3, 5, requires_grad=True), masks()
    (whole,) = torch.autograd.grad((pixel_loss(logits, mask, 4.0, dice=dice) * torch.arange(3)).sum(), logits)
    monkeypatch.setattr(pixels, "LARGEST", 1)
    (parts,) = torch.autograd.grad((pixel_loss(logits, mask, 4.0, dice=dice) * torch.arange(3)).sum(), logits)
    fine = F.interpolate(logits, scale_factor=4, mode="bilinear")
    direct = (pixels.pixel_values(fine, mask, None, dice) * torch.arange(3)).sum()
    assert torch.allclose(whole, parts, atol=1e-7)
    assert torch.allclose(whole, torch.autograd.grad(direct, logits)[0], atol=1e-6)
    assert not whole[0].any() and whole[2].any()


def test_an_image_without_labelled_pixels_has_no_loss():
    logits, mask = torch.randn(2, 4, 3, 5, requires_grad=True), masks()[:2]
    mask[0] = 255
    loss = pixel_loss(logits, mask, 4.0, dice=1.0)
    loss.sum().backward()
    assert loss[0] == 0 and loss[1] > 0
    assert not logits.grad[0].any() and logits.grad.isfinite().all()


# points


def test_points_are_sampled_as_by_grid_sample():
    maps, points = torch.randn(2, 5, 7), torch.rand(2, 40, 2)
    expected = F.grid_sample(maps[:, None], 2 * points[:, None] - 1, align_corners=False)[:, 0, 0]
    assert torch.equal(sample_each(maps, points), expected)
    assert torch.equal(sample(maps[:, None], points)[:, 0], expected)


def test_the_gradient_of_points_is_that_of_grid_sample():
    maps, points = torch.randn(2, 5, 7, requires_grad=True), torch.rand(2, 400, 2)
    weights = torch.randn(2, 400)
    (own,) = torch.autograd.grad((sample_each(maps, points) * weights).sum(), maps)
    grid = F.grid_sample(maps[:, None], 2 * points[:, None] - 1, align_corners=False)[:, 0, 0]
    (expected,) = torch.autograd.grad((grid * weights).sum(), maps)
    assert torch.allclose(own, expected, atol=1e-5)


def test_masks_are_sampled_without_being_there():
    owner, points = torch.randint(-1, 3, (2, 6, 9)), torch.rand(2, 50, 2)
    binary = torch.stack([owner == k for k in range(3)], 1).float()
    expected = sample(binary, points)
    assert torch.allclose(sample_owners(owner, points, 3), expected, atol=1e-6)
    own = torch.rand(2, 3, 50, 2)
    each = sample_each(binary.flatten(0, 1), own.flatten(0, 1)).unflatten(0, (2, 3))
    assert torch.allclose(sample_own(owner, own), each, atol=1e-6)


def test_classes_become_objects():
    mask = masks(6)
    mask[1][mask[1] == 2] = 0
    owner, labels = objects_of_classes(mask, 6, 8)
    assert labels[0].tolist() == [0, 1, 2, 3, 4, 5] and labels[1].tolist() == [0, 1, -1, 3, 4, 5]
    assert torch.equal(owner, torch.where(mask == 255, -1, mask.long()))


def test_of_many_classes_the_largest_become_objects():
    mask = torch.tensor([[[7, 7, 7, 7], [2, 2, 2, 255], [5, 5, 1, 255]]], dtype=torch.uint8)
    owner, labels = objects_of_classes(mask, 9, 2)
    assert labels.tolist() == [[7, 2]]
    assert owner.tolist() == [[[0, 0, 0, 0], [1, 1, 1, -1], [-1, -1, -1, -1]]]


# the set criterion


def predictions(queries=6, classes=4):
    return torch.randn(3, queries, 6, 10), torch.randn(3, queries, classes + 1)


def test_costs_and_losses_as_defined():
    logits, target = torch.randn(3, 6, 30), torch.rand(3, 4, 30).round()
    classes, labels = torch.randn(3, 6, 5), torch.tensor([[0, 1, 2, -1], [3, 3, 1, 0], [2, -1, -1, -1]])
    costs = pairwise_costs(logits, target, classes, labels, weights=(5.0, 3.0, 2.0))
    for b, t, q in ((0, 0, 0), (0, 2, 5), (1, 3, 2), (2, 0, 4)):
        p, y = logits[b, q].sigmoid(), target[b, t]
        binary = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
        dice = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
        expected = 5 * binary + 3 * dice - 2 * classes[b, q].softmax(0)[labels[b, t]]
        assert costs[b, t, q] == pytest.approx(expected.item(), abs=1e-4)
        assert binary_loss(logits[b, q][None], y[None]).item() == pytest.approx(binary.item(), abs=1e-5)
        assert dice_loss(logits[b, q][None], y[None]).item() == pytest.approx(dice.item(), abs=1e-5)


def test_masks_are_matched_in_float32_in_a_step_in_bf16():
    mask, (logits, classes) = masks(), predictions()
    owner, labels = objects_of_classes(mask, 4, 4)
    criterion, shifts = MaskCriterion(points=500), torch.rand(3, 2)
    exact = criterion.costs(logits, classes, owner, labels, shifts)
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.randn(9, 9) @ torch.randn(9, 9)).dtype == torch.bfloat16
        assert torch.equal(criterion.costs(logits, classes, owner, labels, shifts), exact)


def test_class_loss_weighs_queries_without_an_object():
    logits, labels = torch.randn(1, 3, 3), torch.tensor([[1, -1]])
    columns, logs = torch.tensor([[2, 0]]), torch.randn(1, 3, 3)
    logs = logits.log_softmax(-1)[0]
    expected = -(logs[2, 1] + 0.1 * logs[0, 2] + 0.1 * logs[1, 2])
    assert class_loss(logits, labels, columns, 0.1).item() == pytest.approx(expected.item(), abs=1e-6)
    assert MaskCriterion().counts(labels, 3)["class_weight"].item() == pytest.approx(1.2)


def test_perfect_predictions_have_almost_no_loss_and_are_matched_with_their_objects():
    mask = torch.arange(3, dtype=torch.uint8).repeat_interleave(20).expand(3, 40, 60)  # three stripes
    owner, labels = objects_of_classes(mask, 3, 3)
    right = torch.stack([mask == k for k in (2, 0, 1)], 1).float() * 40 - 20  # queries 0, 1, 2
    logits = torch.cat([right, torch.full((3, 2, *mask.shape[1:]), -20.0)], 1)
    classes = torch.full((3, 5, 4), -10.0)
    for query, label in enumerate((2, 0, 1, 3, 3)):
        classes[:, query, label] = 10
    criterion = MaskCriterion(points=200)
    shifts = torch.rand(3, 1, 2)
    assert criterion.matched([(logits, classes)], owner, labels, shifts)[0].tolist() == [[1, 2, 0]] * 3
    good = criterion([(logits, classes)], owner, labels)
    assert good["class_loss"] < 1e-6
    bad = criterion([(-logits, classes)], owner, labels)
    assert bad["mask_loss"] > 10 * good["mask_loss"]


def test_the_criterion_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.eomt.modeling_eomt import EomtLoss

    pytest.importorskip("scipy")
    config = transformers.EomtConfig(num_labels=4, train_num_points=8000)
    mask, (logits, classes) = masks(), predictions()
    owner, labels = objects_of_classes(mask, 4, 4)
    theirs = EomtLoss(config, {})
    theirs.empty_weight = torch.tensor([1.0, 1, 1, 1, 0.1])
    true = [torch.stack([mask[i] == k for k in range(4)]).float() for i in range(3)]
    expected = theirs(logits, classes, true, list(labels))
    own = MaskCriterion(points=8000)([(logits, classes)], owner, labels)
    for name, weight, key in (("mask", 5, "mask"), ("dice", 5, "dice"), ("class", 2, "cross_entropy")):
        assert (own[f"{name}_loss"] / weight).item() == pytest.approx(
            expected[f"loss_{key}"].item(), rel=0.02
        )
    assert own["loss"].item() == pytest.approx(
        sum(own[f"{n}_loss"] for n in ("mask", "dice", "class")).item()
    )


def test_uncertain_points_are_where_logits_are_near_zero():
    maps = torch.linspace(-4, 4, 64).expand(2, 64, 64)  # zero in the middle column
    points = MaskCriterion(points=400, importance=0.75).uncertain_points(maps, torch.rand(2, 2))
    assert points.shape == (2, 400, 2)
    assert (points[:, :300, 0] - 0.5).abs().max() < 0.2 and (points[:, 300:, 0] - 0.5).abs().max() > 0.3


def test_several_predictions_add_up_and_a_seed_decides_the_points():
    mask, pair = masks(), predictions()
    owner, labels = objects_of_classes(mask, 4, 4)
    criterion = MaskCriterion(points=100)
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(criterion([pair, pair], owner, labels)["loss"])
    assert losses[0] == losses[1]
    torch.manual_seed(3)
    one = criterion([pair], owner, labels)
    assert losses[0].item() == pytest.approx(2 * one["loss"].item(), rel=0.2)


def test_points_cover_the_image_evenly_wherever_they_are_shifted():
    points = shifted(even_points(1000, torch.device("cpu")), torch.tensor([[0.0, 0.0], [0.3, 0.9]]))
    assert points.shape == (2, 1000, 2) and points.min() >= 0 and points.max() < 1
    cells = (points * 10).long()
    for image in cells[..., 0] + 10 * cells[..., 1]:
        counts = image.bincount(minlength=100)
        assert counts.min() >= 7 and counts.max() <= 13  # random points would have from about 2 to 20
    moved = (points[1] - points[0]).remainder(1)
    assert torch.allclose(moved, torch.tensor([0.3, 0.9]), atol=1e-6)


def test_losses_are_divided_by_the_counts_that_are_given():
    mask, pair = masks(), predictions()
    owner, labels = objects_of_classes(mask, 4, 4)
    values = []
    for counts in (None, {"masks": torch.tensor(24.0), "class_weight": torch.tensor(25.2)}):
        torch.manual_seed(3)
        losses = MaskCriterion(points=100)([pair], owner, labels, counts)
        values.append([losses[name].item() for name in ("mask_loss", "dice_loss", "class_loss")])
    assert values[0] == pytest.approx([2 * value for value in values[1]])  # of 18 queries, 12 have an object


def test_images_without_objects_have_no_mask_loss():
    logits, classes = (value.requires_grad_() for value in predictions())
    owner, labels = torch.full((3, 12, 20), -1), torch.full((3, 4), -1)
    losses = MaskCriterion(points=50)([(logits, classes)], owner, labels)
    losses["loss"].backward()
    assert losses["mask_loss"] == 0 and losses["class_loss"] > 0 and not logits.grad.any()
