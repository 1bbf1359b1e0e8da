"""The planned memory of a step beside the bytes that its tensors take on a CPU."""

from dataclasses import replace

import pytest

from vitkit.data.sources.digits import digits
from vitkit.data.sources.shapes import shapes
from vitkit.models.variants import fresh, variant
from vitkit.planning.memory import memory_of, peak_bytes
from vitkit.recipes import recipe
from vitkit.recipes.recipe import override
from vitkit.runs.batches import training_view
from vitkit.runtime.runtime import Runtime

SHAPE = {"width": 64, "depth": 3, "heads": 2, "hidden": 128}
SETTINGS = ("image_size=64", "model=ViT-Ti/8", "batch=8", "length.epochs=none", "length.steps=10")
TASKS = {  # the recipe and its options
    "linear": ("segment", ()),
    "dice": ("segment", ("segment.dice=1",)),
    "eomt": ("segment", ("segment.head=eomt", "segment.queries=10", "segment.points=400")),
    "fcos": ("detect", ("detect.channels=32",)),
    "yolos": ("detect", ("detect.head=yolos", "detect.detections=20")),
    "rf-detr": ("detect", ("detect.head=rf-detr",)),
    "instances": ("instances", ("instances.queries=10", "instances.points=400")),
    "masked": ("masked", ()),
    "mae": ("mae", ()),
    "simmim": ("simmim", ()),
    "dino": ("dino", ("dino.prototypes=256", "dino.hidden=64")),
    "ibot": ("ibot", ("ibot.prototypes=256", "ibot.hidden=64")),
    "contrastive": ("contrastive", ()),
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("rf-detr", "contrastive") else name
    for name in TASKS
]


def planned(name):
    """A recipe, its model with values, and the training images."""
    base, options = TASKS[name]
    r = override(recipe(base), [*SETTINGS, *options])
    source = shapes()["train"] if r.task.targets else digits()
    classes = len(r.task.labels(source.classes))
    config = replace(variant("ViT-Ti/8"), image_size=(64, 64), classes=classes, **SHAPE)
    return r, fresh(r.task.configure(config), seed=0), source


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_an_image_is_that_of_the_plan(name):
    r, model, source = planned(name)
    few, more = (memory_of(r, model, Runtime(), images, source).activations for images in (2, 4))
    view = r.task.target_view(training_view(r), source)
    real = [peak_bytes(r, model, images, view, "cpu") for images in (2, 4)]
    assert more - few == pytest.approx(real[1] - real[0], rel=0.15)


@pytest.mark.parametrize("name", ["mae", "dino", "fcos"])
def test_the_weights_of_decoders_and_teachers_are_in_the_plan(name):
    r, model, source = planned(name)
    memory, module = memory_of(r, model, Runtime(), 2, source), r.task.build(model)
    assert memory.parameters == 4 * sum(p.numel() for p in module.parameters())
    assert memory.optimizer == 8 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    alone = 4 * sum(p.numel() for p in model.parameters())
    assert memory.parameters > 1.05 * alone if name != "fcos" else memory.parameters == alone


def test_half_precision_and_recomputed_layers_need_less():
    r, model, source = planned("linear")
    whole, half, again = (
        memory_of(r, model, runtime, 8, source).activations
        for runtime in (Runtime(), Runtime(precision="bf16"), Runtime(recompute=True))
    )
    assert 0.5 * whole < half < 0.8 * whole and again < 0.8 * whole
