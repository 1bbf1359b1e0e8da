"""Losses of segmentation and detection do not depend on how a batch is divided into micro-batches."""

import pytest
import torch

from vitkit.data.order import Order
from vitkit.models.dense.eomt import EomtConfig
from vitkit.models.dense.linear_segmenter import LinearSegmenterConfig
from vitkit.models.dense.pyramid_detector import all_locations, fcos_config
from vitkit.models.dense.rf_detr import rf_detr_on
from vitkit.models.dense.yolos import yolos_config
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig
from vitkit.tasks.detect import Detect
from vitkit.tasks.instances import Instances
from vitkit.tasks.segment import Segment
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Stepper, TrainState, update

IMAGES, CLASSES, SIDE = 8, 3, 48
VIT = ViTConfig(width=32, depth=3, heads=2, hidden=48, patch=8, image_size=(SIDE, SIDE), classes=0)
HEADS = {
    "linear": (Segment(dice=1.0), LinearSegmenterConfig(vit=VIT, classes=CLASSES, upscale=1)),
    "eomt": (Segment(points=100, objects=8), EomtConfig(vit=VIT, classes=CLASSES, queries=6, joint=2)),
    "instances": (
        Instances(points=100, objects=4),
        EomtConfig(vit=VIT, classes=CLASSES, queries=6, joint=2, output="masks"),
    ),
    "fcos": (Detect(), fcos_config(VIT, CLASSES, head_width=16, head_depth=1, levels=3)),
    "yolos": (Detect(), yolos_config(VIT, CLASSES, detections=4)),
    "rf-detr": (Detect(), rf_detr_on(VIT, CLASSES, queries=6, groups=2, decoder_width=32, layers=1)),
}
PIECES = ((4, 4), (2, 2, 2, 2), (1, 7), (5, 0, 3))  # images of each micro-batch


def batch_of(task, model):
    """Images with many objects and with none, and masks that are hardly labelled or not at all."""
    generator = torch.Generator().manual_seed(0)
    objects = torch.tensor([0, 1, 5, 2, 0, 0, 6, 1])
    corner = torch.rand(IMAGES, 6, 2, generator=generator) * 24
    size = torch.rand(IMAGES, 6, 2, generator=generator) * 16 + 8
    classes = torch.randint(0, CLASSES, (IMAGES, 6), generator=generator)
    classes[torch.arange(6) >= objects[:, None]] = -1
    mask = torch.randint(0, CLASSES, (IMAGES, 6, 6), generator=generator).to(torch.uint8)
    mask = mask.repeat_interleave(8, 1).repeat_interleave(8, 2)
    mask[0], mask[3, :, 9:], mask[5, 8:] = 255, 255, 1
    segments = torch.full((IMAGES, SIDE, SIDE), -1, dtype=torch.int16)
    for image, number in zip(*torch.nonzero(classes >= 0, as_tuple=True), strict=True):
        x, y, right, bottom = (int(value) for value in (*corner[image, number], *size[image, number]))
        segments[image, y : y + bottom, x : x + right] = number
    batch = {
        "image": torch.randint(0, 255, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator),
        "boxes": torch.cat([corner, corner + size], -1), "classes": classes, "mask": mask,
        "segments": segments,
        "place": torch.arange(IMAGES),
    }  # fmt: skip
    prepare = task.prepare(model, Order(IMAGES, IMAGES, 3))
    return prepare(5, batch) if prepare else batch


def model_of(task, config):
    model = task.build(fresh(config, seed=0)).train()
    task.begin(model, 100)
    if config.kind == "EoMT":
        model.mask_probabilities.fill_(0.5)  # half of the queries drop their mask, which is drawn
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # matches must not be decided by rounding
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def divided(batch, sizes):
    parts = {name: tensor.split(sizes) for name, tensor in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def gradients(head, sizes):
    """The losses of a step, and the gradients of all parameters in one vector."""
    task, config = HEADS[head]
    model = model_of(task, config)
    state = TrainState.start(model, OptimizerConfig())
    stepper = Stepper(state, task.objective(model), OptimizerConfig(), model)
    losses = stepper.gradients(divided(batch_of(task, model), sizes), IMAGES)
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return {name: value.item() for name, value in losses.items()}, torch.cat(grads)


@pytest.mark.parametrize("head", HEADS)
def test_micro_batches_have_the_losses_and_gradients_of_the_whole_batch(head):
    whole, gradient = gradients(head, (IMAGES,))
    assert gradient.abs().max() > 1e-3
    for sizes in PIECES:
        losses, other = gradients(head, sizes)
        assert losses == pytest.approx(whole, rel=1e-5, abs=1e-6), sizes
        assert (other - gradient).abs().max() < 1e-5 * gradient.abs().max(), sizes


@pytest.mark.parametrize("head", ["eomt", "instances", "fcos", "yolos", "rf-detr"])
def test_losses_divided_by_the_objects_of_each_part_would_differ(head):
    """A control: so different are the parts of this batch."""
    task, config = HEADS[head]
    model = model_of(task, config)
    objective, batch = task.objective(model), batch_of(task, model)
    one, others = (objective(model, part)["loss"].item() for part in divided(batch, (1, 7)))
    assert (one + 7 * others) / 8 != pytest.approx(objective(model, batch)["loss"].item(), rel=1e-3)


@pytest.mark.parametrize("head", HEADS)
def test_weights_after_a_step_in_micro_batches(head):
    task, config = HEADS[head]
    results = []
    for sizes in ((IMAGES,), (3, 3, 2)):
        model = model_of(task, config)
        state, adam = TrainState.start(model, OptimizerConfig()), OptimizerConfig()
        pieces = divided(batch_of(task, model), sizes)
        update(state, pieces, task.objective(model), 1e-2, adam, model)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (results[0] - results[1]).abs().quantile(0.99) < 1e-4  # Adam divides by gradients near 0


@pytest.mark.parametrize("levels, size", [(1, (48, 48)), (4, (40, 72)), (5, (43, 50))])
def test_the_locations_of_fcos_are_those_of_its_maps(levels, size):
    config = fcos_config(VIT, CLASSES, head_width=16, head_depth=0, levels=levels, doublings=1)
    with torch.no_grad():
        outputs = fresh(config, seed=0).train_outputs(torch.zeros(1, 3, *size))
    places, strides = all_locations(config, size, torch.device("cpu"))
    assert outputs["logits"].shape[1] == len(places) == len(strides)
    assert places.shape[1] == 2 and strides.unique().tolist() == [float(s) for s in config.strides]
