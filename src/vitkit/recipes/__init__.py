"""Recipes: experiments as frozen values that convert to JSON and back."""

from collections.abc import Callable

from vitkit.errors import Error, did_you_mean
from vitkit.recipes import (
    dense_images,
    distillation,
    finetune,
    masked_images,
    pretrain,
    self_distillation,
)
from vitkit.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {}
for recipes in (finetune, pretrain, masked_images, self_distillation, distillation, dense_images):
    RECIPES |= recipes.RECIPES


def recipe(name: str) -> Recipe:
    """A recipe by name; `vitkit list recipes` shows them all."""
    if name not in RECIPES:
        matches = [known for known in RECIPES if name.lower() in known.lower()]
        hint = did_you_mean(name, RECIPES, matches=matches[:8], count=3)
        raise Error(f"no recipe {name!r};{hint} vitkit list recipes shows them all", code="recipe.unknown")
    return RECIPES[name]()
