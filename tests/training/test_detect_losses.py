"""The losses of detection against literal implementations, and learning a few images by heart."""

import math

import numpy as np
import pytest
import torch

from vitkit.models.dense.fcos_loss import assign, centreness_of, fcos_loss, focal_loss
from vitkit.models.dense.pyramid_detector import fcos_config, locations
from vitkit.models.dense.set_loss import SetLoss
from vitkit.models.initialization import initialize_vit
from vitkit.models.vit import ViTConfig
from vitkit.ops.boxes import box_iou, generalized_iou

LEVELS = (8, 16, 32)
CPU = torch.device("cpu")


def all_locations(height=96, width=128):
    places = [locations(-(-height // s), -(-width // s), s, CPU) for s in LEVELS]
    strides = [torch.full((len(p),), float(s)) for p, s in zip(places, LEVELS, strict=True)]
    return torch.cat(places), torch.cat(strides)


def objects(seed, rows=6, height=96, width=128):
    """Random boxes of all sizes; the last rows of the second image are not used."""
    rng = np.random.default_rng(seed)
    boxes = np.zeros((2, rows, 4), np.float32)
    classes = rng.integers(0, 3, (2, rows))
    for box in boxes.reshape(-1, 4):
        size = np.exp(rng.uniform(math.log(4), np.log([width, height])))
        start = rng.uniform(0, [width, height] - size)
        box[:] = (*start, *(start + size))
    classes[1, rows // 2 :] = -1
    boxes[1, rows // 2 :] = 0
    return torch.from_numpy(boxes), torch.from_numpy(classes)


def literal_assignment(place, stride, boxes, classes):
    """The row of the object that a location learns, step by step as the paper has it; None: background."""
    (x, y), best = place, None
    for row, ((x0, y0, x1, y1), number) in enumerate(zip(boxes, classes, strict=True)):
        sides = (x - x0, y - y0, x1 - x, y1 - y)
        if number < 0 or min(sides) <= 0:
            continue
        if abs(x - (x0 + x1) / 2) >= 1.5 * stride or abs(y - (y0 + y1) / 2) >= 1.5 * stride:
            continue
        low = 0 if stride == LEVELS[0] else 4 * stride
        high = math.inf if stride == LEVELS[-1] else 8 * stride
        if not low < max(sides) <= high:
            continue
        area = (x1 - x0) * (y1 - y0)
        if best is None or area < best[0]:
            best = (area, row)
    return None if best is None else best[1]


@pytest.mark.parametrize("seed", range(3))
def test_locations_learn_the_objects_that_a_literal_implementation_gives_them(seed):
    places, strides = all_locations()
    boxes, classes = objects(seed)
    rows, positive = assign(places, strides, boxes, classes)
    expected = [
        [literal_assignment(p, s, boxes[i].tolist(), classes[i].tolist())
         for p, s in zip(places.tolist(), strides.tolist(), strict=True)]
        for i in range(2)
    ]  # fmt: skip
    found = [[r if p else None for r, p in zip(*one, strict=True)]
             for one in zip(rows.tolist(), positive.tolist(), strict=True)]  # fmt: skip
    assert found == expected
    assert {r for one in expected for r in one} > {None, 0}


def literal_loss(out, places, strides, boxes, classes, count_of_classes):
    """The three losses in loops over images, locations and classes."""
    of_class = of_box = of_centre = positives = 0.0
    for image in range(len(boxes)):
        for n, (place, stride) in enumerate(zip(places.tolist(), strides.tolist(), strict=True)):
            row = literal_assignment(place, stride, boxes[image].tolist(), classes[image].tolist())
            for k in range(count_of_classes):
                chance = 1 / (1 + math.exp(-out["logits"][image, n, k].item()))
                if row is not None and classes[image, row] == k:
                    of_class -= 0.25 * (1 - chance) ** 2 * math.log(chance)
                else:
                    of_class -= 0.75 * chance**2 * math.log(1 - chance)
            if row is None:
                continue
            positives += 1
            sides = [stride * d for d in out["distances"][image, n].tolist()]
            mine = torch.tensor([[place[0] - sides[0], place[1] - sides[1],
                                  place[0] + sides[2], place[1] + sides[3]]])  # fmt: skip
            of_box += 1 - generalized_iou(mine, boxes[image, row][None]).item()
            x0, y0, x1, y1 = boxes[image, row].tolist()
            left, top, right, bottom = place[0] - x0, place[1] - y0, x1 - place[0], y1 - place[1]
            target = math.sqrt(min(left, right) / max(left, right) * min(top, bottom) / max(top, bottom))
            chance = 1 / (1 + math.exp(-out["centreness"][image, n].item()))
            of_centre -= target * math.log(chance) + (1 - target) * math.log(1 - chance)
    return [part / max(positives, 1) for part in (of_class, of_box, of_centre)]


@pytest.mark.parametrize("seed", range(2))
def test_the_losses_are_those_of_a_literal_implementation(seed):
    places, strides = all_locations()
    boxes, classes = objects(seed)
    generator = torch.Generator().manual_seed(seed)
    out = {
        "logits": torch.randn(2, len(places), 3, generator=generator),
        "distances": torch.randn(2, len(places), 4, generator=generator).exp(),
        "centreness": torch.randn(2, len(places), generator=generator),
        "locations": places, "strides": strides,
    }  # fmt: skip
    losses = fcos_loss(out, boxes, classes)
    expected = literal_loss(out, places, strides, boxes, classes, 3)
    found = [losses[name].item() for name in ("class_loss", "box_loss", "centre_loss")]
    assert found == pytest.approx(expected, rel=1e-4)
    assert losses["loss"].item() == pytest.approx(sum(expected), rel=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_images_without_objects_have_a_loss_and_finite_gradients(rows):
    places, strides = all_locations()
    out = {
        "logits": torch.zeros(2, len(places), 3, requires_grad=True),
        "distances": torch.ones(2, len(places), 4, requires_grad=True),
        "centreness": torch.zeros(2, len(places), requires_grad=True),
        "locations": places, "strides": strides,
    }  # fmt: skip
    losses = fcos_loss(out, torch.zeros(2, rows, 4), torch.full((2, rows), -1))
    losses["loss"].backward()
    assert losses["box_loss"] == losses["centre_loss"] == 0 and losses["class_loss"] > 0
    assert out["distances"].grad.eq(0).all() and out["logits"].grad.gt(0).all()


def test_centreness_and_the_focal_loss_have_their_known_values():
    sides = torch.tensor([[5.0, 5, 5, 5], [1, 5, 9, 5], [1, 2, 4, 8]])
    assert centreness_of(sides).tolist() == pytest.approx([1, 1 / 3, 0.25])
    loss = focal_loss(torch.zeros(2), torch.tensor([1.0, 0.0]))
    assert loss.tolist() == pytest.approx([0.0625 * math.log(2), 0.1875 * math.log(2)])


def test_shapes_depend_on_no_value_and_none_is_read_back():
    """On tensors without values it would raise, as it would when a CUDA graph is captured."""
    vit = ViTConfig(width=48, depth=1, heads=3, hidden=96, patch=8, image_size=(64, 64), classes=0)
    with torch.device("meta"):
        model = fcos_config(vit, 2, head_width=32, head_depth=1).build()
        images, boxes, classes = torch.empty(2, 3, 64, 64), torch.empty(2, 5, 4), torch.ones(2, 5).long()
        loss = fcos_loss(model(images, train=True), boxes, classes)["loss"]
        loss.backward()
        assert model.eval()(images).shape == (2, 100, 6)
        outputs = {"logits": torch.empty(2, 9, 4), "boxes": torch.empty(2, 9, 4)}
        of_set = SetLoss()(outputs, boxes, classes)["loss"]
    assert loss.shape == of_set.shape == () and model.head.scales.grad.shape == (4,)


SET = {  # logits of two classes and none, boxes, true boxes and classes; the last row is not used
    "logits": [[2, 0, 0], [0, 1, 0], [0, 0, 3], [1, 1, 0]],
    "boxes": [[0.3, 0.3, 0.2, 0.2], [0.7, 0.7, 0.4, 0.4], [0.5, 0.5, 1, 1], [0.25, 0.3, 0.2, 0.3]],
    "true": [[0.3, 0.3, 0.2, 0.3], [0.6, 0.7, 0.4, 0.4], [0, 0, 0, 0]],
    "classes": [0, 1, -1],
}


def test_set_prediction_has_the_known_costs_and_losses():
    logits, boxes, true = (torch.tensor(SET[name], dtype=torch.float32)[None] for name in list(SET)[:3])
    classes, criterion = torch.tensor(SET["classes"])[None], SetLoss()
    costs = criterion.cost(logits, boxes, true, classes)[0, :, :2]
    expected = [[-1.620319, 6.441112], [6.449963, -1.276117], [9.334721, 7.134721], [-1.372319, 5.925117]]
    torch.testing.assert_close(costs, torch.tensor(expected), atol=2e-6, rtol=0)
    outputs = {"logits": logits, "boxes": boxes}
    assert criterion.match(outputs, true, classes).tolist() == [[0, 1, -1, -1]]
    losses = {name: value.item() for name, value in criterion(outputs, true, classes).items()}
    assert losses == {
        "loss": pytest.approx(1.681825, abs=2e-6), "class_loss": pytest.approx(0.448491, abs=2e-6),
        "distance_loss": pytest.approx(0.1, abs=2e-6), "overlap_loss": pytest.approx(0.366667, abs=2e-6),
    }  # fmt: skip


@pytest.mark.parametrize("rows", [0, 2, 12])
def test_set_prediction_without_objects_and_with_more_objects_than_predictions(rows):
    logits, boxes = torch.zeros(2, 4, 3, requires_grad=True), torch.full((2, 4, 4), 0.5, requires_grad=True)
    true = torch.rand(2, rows, 4) * 0.5 + 0.2
    none = SetLoss()({"logits": logits, "boxes": boxes}, true, torch.full((2, rows), -1))
    assert none["distance_loss"] == none["overlap_loss"] == 0
    assert none["class_loss"].item() == pytest.approx(math.log(3))
    losses = SetLoss()({"logits": logits, "boxes": boxes}, true, torch.ones(2, rows, dtype=torch.int64))
    losses["loss"].backward()
    assert logits.grad.isfinite().all() and boxes.grad.isfinite().all()
    used = (
        SetLoss().match({"logits": logits, "boxes": boxes}, true, torch.ones(2, rows).long())
        if rows
        else None
    )
    assert used is None or (used >= 0).sum(1).tolist() == [min(rows, 4)] * 2


def drawn(images=4, size=64, seed=0):
    """Images of bright rectangles of two colours on a dark ground, with their boxes and classes."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(-1, 0.05, (images, 3, size, size)).astype(np.float32)
    boxes, classes = np.zeros((images, 4, 4), np.float32), np.full((images, 4), -1)
    for i in range(images):
        for j, (left, top) in enumerate(((0, 0), (32, 0), (0, 32))[: 2 + i % 2]):
            w, h = rng.integers(12, 26, 2)
            x, y = left + rng.integers(0, 33 - w), top + rng.integers(0, 33 - h)
            number = rng.integers(2)
            pixels[i, number, y : y + h, x : x + w] = 1
            boxes[i, j], classes[i, j] = (x, y, x + w, y + h), number
    return torch.from_numpy(pixels), torch.from_numpy(boxes), torch.from_numpy(classes)


@pytest.mark.slow
def test_the_detector_learns_four_images_by_heart():
    images, boxes, classes = drawn()
    vit = ViTConfig(width=48, depth=2, heads=3, hidden=96, patch=8, image_size=(64, 64), classes=0)
    model = fcos_config(vit, 2, head_width=32, head_depth=2, levels=3).build()
    generator = torch.Generator().manual_seed(0)
    initialize_vit(model.vit, generator)
    model.initialize_head(generator)
    steps = 100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        fcos_loss(model.train_outputs(images), boxes, classes)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        rows = model.eval()(images)
    for image in range(len(images)):
        real = classes[image] >= 0
        best = rows[image, : int(real.sum())]  # every object is among the first, so AP50 is 1
        matches = (box_iou(best[:, :4] * 64, boxes[image, real]) > 0.75) & (
            best[:, None, 5] == classes[image, real]
        )
        assert matches.any(0).all() and matches.any(1).all()
