"""What a recipe trains for: the module that learns, the plain model inside it, and the loss."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from vitkit.data.batches import Batch
from vitkit.data.order import Order
from vitkit.models.masked import MaskedViT
from vitkit.models.variants import Model, skeleton
from vitkit.recipes.recipe import Recipe
from vitkit.training.masked import Masked, corrupt
from vitkit.training.objectives import Classify
from vitkit.training.runtime import whole

CARD = ("labels", "multilabel", "preprocessing", "origin")


def learner(recipe: Recipe, model: Model) -> nn.Module:
    """The module to be trained: the model itself, or with a layer that says what was in its patches."""
    if recipe.objective == "classify":
        return model
    outputs = recipe.masked.outputs(model.config.stride, model.config.channels)  # type: ignore[union-attr]
    return MaskedViT(model, outputs, recipe.masked.when)  # type: ignore[arg-type]


def bare(module: nn.Module) -> Model:
    """The model in the module that is trained."""
    return module.vit if isinstance(module, MaskedViT) else module  # type: ignore[return-value]


def plain(module: nn.Module) -> Model:
    """A copy of the model, whole and on the CPU; all processes must ask for it.

    A mask token has no use beyond masked patches: it is left out, as the layer above them is, so that any
    format can hold the model and every parameter of it learns when it is fine-tuned.
    """
    source = bare(module)
    config: Any = source.config
    model = skeleton(replace(config, mask_token=False) if isinstance(module, MaskedViT) else config)
    names = model.state_dict()
    state = {n: whole(t.detach()).cpu() for n, t in source.state_dict().items() if n in names}
    model.load_state_dict(state, assign=True)
    for field in CARD:
        setattr(model, field, getattr(source, field))
    return model


def objective_of(recipe: Recipe, model: Model, classes: int) -> Classify | Masked:
    """From a batch to a loss."""
    p = model.preprocessing
    if recipe.objective == "masked":
        stride: int = model.config.stride  # type: ignore[union-attr]
        return Masked(config=recipe.masked, patch=stride, mean=p.mean, std=p.std)
    return Classify(
        classes=classes, mean=p.mean, std=p.std, loss=recipe.loss, label_smoothing=recipe.label_smoothing
    )


def preparation(recipe: Recipe, model: Model, order: Order) -> Callable[[int, Batch], Batch] | None:
    """What (step, batch) needs before it is cut in pieces: the corruption of its images, if they have one."""
    if recipe.objective == "classify":
        return None
    h, w = model.config.grid  # type: ignore[union-attr]
    return partial(corrupt, recipe.masked, h * w, order)
