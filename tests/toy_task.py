"""The smallest task without labels: images and their mirror images should have equal features."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.views import normalise
from vitkit.models.variants import Model
from vitkit.recipes import RECIPES, pretrain
from vitkit.recipes.recipe import Recipe
from vitkit.tasks import task as registry
from vitkit.tasks.shared.self_supervised import SelfSupervised
from vitkit.tasks.task import Batch, Objective, register
from vitkit.training.schedule import Duration


class Predictor(nn.Module):
    """The model and a layer that predicts the features of the mirror image."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.predict = nn.Linear(model.config.width, model.config.width)
        nn.init.eye_(self.predict.weight)  # the same in every run: no random numbers
        nn.init.zeros_(self.predict.bias)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.model.features(torch.cat([images, images.flip(3)])).float()
        return self.predict(x), x


@dataclass(frozen=True, kw_only=True)
class Toy(SelfSupervised):
    """Features of an image predict those of its mirror image (cosine similarity)."""

    name: ClassVar[str] = "toy"
    about: ClassVar[str] = "without labels"

    def build(self, model: Model) -> nn.Module:
        return Predictor(model)

    def extract(self, module: nn.Module) -> Model:
        return module.model if isinstance(module, Predictor) else module

    def objective(self, model: Model) -> Objective:
        def loss(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return {"loss": self.losses(module, batch, model)[0].mean()}

        return loss

    def losses(self, module: nn.Module, batch: Batch, model: Model) -> tuple[Tensor, Tensor]:
        p = model.preprocessing
        predicted, features = module(normalise(batch["image"], p.mean, p.std))
        left, right = features.detach().chunk(2)
        return -F.cosine_similarity(predicted, torch.cat([right, left])).view(2, -1).mean(0), left

    def each(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.losses(module, batch, self.extract(module))

    def pictures(self, module: nn.Module, images: Tensor) -> list[tuple[str, Tensor]]:
        return [("mirrored", image.flip(2)) for image in images]


def toy_recipe() -> Recipe:
    base = pretrain.masked("imagenet")
    schedule = replace(base.schedule, rate=1e-3, warmup=40)
    return replace(
        base,
        name="toy",
        objective="toy",
        batch=256,
        length=Duration(epochs=200),
        schedule=schedule,
        dropout=0.0,
    )


@contextmanager
def registered_toy() -> Iterator[Any]:
    """The task and its recipe, by their name."""
    register(Toy)
    RECIPES["toy"] = toy_recipe
    try:
        yield Toy
    finally:
        del registry.REGISTERED["toy"], RECIPES["toy"]


def one_of_many(*args: Any) -> Any:
    """A process of a run of several, in which the task has to be registered too."""
    from together import go

    with registered_toy():
        return go(*args)
