"""Recipes: experiments as frozen values that convert to JSON and back."""

from collections.abc import Callable
from difflib import get_close_matches

from vitkit.errors import Error
from vitkit.recipes import finetune, pretrain
from vitkit.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = finetune.RECIPES | pretrain.RECIPES


def recipe(name: str) -> Recipe:
    """A recipe by name; `vitkit list recipes` shows them all."""
    if name not in RECIPES:
        near = [known for known in RECIPES if name.lower() in known.lower()]
        near = near or get_close_matches(name, RECIPES, 3)
        hint = f"did you mean {' or '.join(near[:8])}? " if near else ""
        raise Error(f"no recipe {name!r}; {hint}vitkit list recipes shows them all", code="recipe.unknown")
    return RECIPES[name]()
