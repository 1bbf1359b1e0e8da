"""Experiments as frozen values: complete, comparable, JSON and back."""

from collections.abc import Callable

from vitkit.recipes import finetune, pretrain
from vitkit.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = finetune.RECIPES | pretrain.RECIPES


def recipe(name: str) -> Recipe:
    """The recipe of a name; `vitkit list recipes` shows them all."""
    if name not in RECIPES:
        near = [known for known in RECIPES if name.lower() in known.lower()]
        raise ValueError(f"no recipe {name!r}; known: {', '.join(near or RECIPES)}")
    return RECIPES[name]()
