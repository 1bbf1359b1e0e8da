"""A task's hooks run around each update of the weights, once a step, with every optimizer."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import start_training
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import Classify
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import update

OPTIMIZERS = {
    "sgd": OptimizerConfig(kind="sgd", clip=0.0),
    "adam": OptimizerConfig(kind="adam", clip=0.0),
    "adam-bf16": OptimizerConfig(kind="adam", moment="bf16", clip=0.0),
}


@dataclass(frozen=True, kw_only=True)
class Noting(Classify):
    """Classification that writes down the weights and gradients at each of its hooks."""

    name: ClassVar[str] = "noting"
    notes: list[tuple[str, Tensor, Any]] = field(default_factory=list, compare=False)

    def before_update(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weight = module.project.weight
        self.notes.append(("before", weight.detach().clone(), (weight.grad.clone(), optimizer)))

    def after_update(self, module: nn.Module) -> None:
        self.notes.append(("after", module.project.weight.detach().clone(), None))


def images(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return {"image": pixels, "label": torch.arange(count) % 5}


def noted(small, config: OptimizerConfig, pieces: int, steps: int = 3) -> tuple[Noting, Any]:
    """The notes of some steps over a batch of 6 images in so many micro-batches."""
    task = Noting()
    torch.manual_seed(0)  # the same model each time
    state = start_training(Recipe(name="hooks", optimizer=config), task, small().train(), Runtime())
    batch = images(6)
    split = [
        dict(zip(batch, parts, strict=True))
        for parts in zip(*(t.chunk(pieces) for t in batch.values()), strict=True)
    ]
    objective = task.objective(state.model)
    for _ in range(steps):
        update(state, split, objective, 0.1, config, state.model)
    return task, state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_hooks_run_once_a_step_around_the_update(small, name, pieces):
    task, state = noted(small, OPTIMIZERS[name], pieces)
    assert [kind for kind, _, _ in task.notes] == ["before", "after"] * 3
    weights = [weight for _, weight, _ in task.notes]
    for step in range(3):
        assert not torch.equal(weights[2 * step], weights[2 * step + 1])  # updated between the two hooks
        if step:
            assert torch.equal(weights[2 * step], weights[2 * step - 1])  # and nowhere else
    assert torch.equal(weights[-1], state.model.project.weight)
    assert all(note[2][1] is state.optimizer for note in task.notes[::2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gradients_of_all_micro_batches_are_there_before_the_update(small, name):
    whole, parts = (noted(small, OPTIMIZERS[name], pieces, steps=1)[0].notes[0][2][0] for pieces in (1, 3))
    assert whole.any() and torch.allclose(whole, parts, atol=1e-6)


def test_what_a_hook_changes_counts(small):
    """A step whose gradients are cleared before the update leaves the weights as they were."""

    class Clearing(Noting):
        def before_update(self, module, optimizer):
            super().before_update(module, optimizer)
            for p in module.parameters():
                p.grad.zero_()

    config, task = OPTIMIZERS["sgd"], Clearing()
    state = start_training(Recipe(name="hooks", optimizer=config), task, small().train(), Runtime())
    update(state, [images(4)], task.objective(state.model), 0.1, config, state.model)
    (_, before, (gradient, _)), (_, after, _) = task.notes
    assert gradient.any() and torch.equal(before, after)
