"""How EoMT trains, for segmentation and for instances: its losses, random numbers and masked attention."""

# B batch; H, W pixels of the images; T objects of an image, Q queries

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.views import normalise
from vitkit.models.dense.eomt import Eomt, EomtConfig, mask_probabilities
from vitkit.models.dense.mask_criterion import MaskCriterion
from vitkit.tasks.task import Batch, SummedObjective

Objects = Callable[[Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class MaskObjective(SummedObjective):
    """The losses of EoMT's masks and classes."""

    criterion: MaskCriterion
    config: EomtConfig
    objects: Objects  # of a batch: the object of each pixel (B, H, W), or -1, and the classes (B, T), or -1
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return self.criterion.counts(self.objects(batch)[1], self.config.queries)

    def __call__(
        self, module: nn.Module, batch: Batch, counts: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        images = normalise(batch["image"], self.mean, self.std)
        outputs = module(images, train=True, drawn=batch.get("drawn"))
        predictions = list(zip(outputs["masks"], outputs["classes"], strict=True))
        return self.criterion(predictions, *self.objects(batch), counts, batch.get("shifts"))


def with_draws(order: Order, config: EomtConfig, most: int, step: int, batch: Batch) -> Batch:
    """Add the random numbers of EoMT's training, a pure function of (seed, step, place).

    They are where masks are compared, and which queries drop their masked attention. They come from places
    below -1, as those of other tasks. most: objects of an image
    """
    shapes = {"shifts": (config.joint + 1, most + 1, 2), "drawn": (config.joint, config.queries)}
    drawn = {name: np.empty((len(batch["place"]), *shape), np.float32) for name, shape in shapes.items()}
    places = [(step, -2 - place) for place in batch["place"].tolist()]
    for row, rng in enumerate(order.rngs(places)):
        for values in drawn.values():
            rng.random(out=values[row], dtype=np.float32)
    return batch | {name: torch.from_numpy(values) for name, values in drawn.items()}


def count_steps(model: Eomt) -> Eomt:
    """The model with a count of its steps, by which masked attention is annealed."""
    model.register_buffer("step", torch.zeros((), dtype=torch.int64))
    return model


def begin(model: Eomt, steps: int) -> None:
    """Prepare the annealing of a run of so many steps."""
    model.steps = steps
    anneal(model)


@torch.no_grad()
def advance(model: Eomt) -> None:
    """Count a step, after its update."""
    model.step.add_(1)
    anneal(model)


@torch.no_grad()
def anneal(model: Eomt) -> None:
    """Set the share of queries with masked attention for the step that comes next; on the device."""
    model.mask_probabilities.copy_(mask_probabilities(model.step, model.steps, model.config.joint))
