"""Segmentation on a GPU: which steps are captured in a CUDA graph, and that repetitions change no bit.

VITKIT_TASKS_ON=cpu runs the same functions without a GPU, where a step is never captured.
"""

import os

import pytest
import torch

from vitkit.models.variants import build
from vitkit.runtime.runtime import Runtime, seed_step
from vitkit.tasks.segment import Segment
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Stepper, TrainState

DEVICE = os.environ.get("VITKIT_TASKS_ON", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
STEPS = 8
HEADS = {
    "linear": ({}, 11),
    "linear with dice and batch norm": ({"dice": 1.0, "norm": "batch"}, 11),
    "eomt": ({"head": "eomt", "points": 500, "queries": 20}, 11),
    "eomt of many classes": ({"head": "eomt", "points": 500, "queries": 40}, 30),
}
SHAPE = {"width": 64, "depth": 4, "heads": 2, "hidden": 128, "patch": 16, "image_size": (64, 96)}


def batch(classes, number):
    generator = torch.Generator().manual_seed(number)
    cells = torch.randint(0, classes, (4, 4, 6), generator=generator).to(torch.uint8)
    mask = cells.repeat_interleave(16, 1).repeat_interleave(16, 2)
    images = (mask[:, None].float() * 200 / classes).to(torch.uint8).repeat(1, 3, 1, 1)
    mask[:, :3, :7] = 255
    return {"image": images, "mask": mask}


def trained(name, *, cuda_graph=True):
    """A few steps in bf16: the last numbers, the state, whether there was a graph, and what was logged."""
    options, classes = HEADS[name]
    task = Segment(**options)
    labels = tuple(str(i) for i in range(classes))
    start = build("ViT-Ti/16", seed=0, classes=classes, **SHAPE)
    runtime = Runtime(DEVICE, "bf16", cuda_graph=cuda_graph)
    model = runtime.place(task.build(task.adapt(start, labels, (64, 96), 0)))
    config = OptimizerConfig(kind="adam", weight_decay=0.05, layer_decay=0.75)
    state, logs = TrainState.start(model, config), []
    task.begin(model, STEPS)
    model.train()
    state.optimizer.register_step_post_hook(lambda *_: task.after_update(model))
    stepper = Stepper(state, task.objective(model), config, runtime.wrap(model), runtime, logs.append)
    for step in range(STEPS):
        seed_step(0, step)
        numbers = stepper([runtime.to_device(batch(classes, step))], 1e-3)
        state.step += 1
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return numbers, tensors, stepper.graph.graph is not None, logs


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("name", HEADS)
def test_steps_are_captured_and_are_the_eager_ones(name):
    numbers, tensors, captured, logs = trained(name)
    again = trained(name)
    eager = trained(name, cuda_graph=False)
    assert differing(tensors, again[1]) == [] and differing(tensors, eager[1]) == []
    assert numbers == again[0] == eager[0] and not eager[2]
    if DEVICE == "cuda":
        assert captured and not logs


@pytest.mark.parametrize("name", HEADS)
def test_the_losses_fall(name):
    options, classes = HEADS[name]
    after = trained(name)[0]["loss"]
    task = Segment(**options)
    start = build("ViT-Ti/16", seed=0, classes=classes, **SHAPE)
    model = task.build(task.adapt(start, tuple(map(str, range(classes))), (64, 96), 0)).to(DEVICE).train()
    seed_step(0, 0)
    place = Runtime(DEVICE).to_device
    fresh = task.objective(model)(model, place(batch(classes, STEPS - 1)))["loss"].item()
    assert after < fresh
