"""How long a run may take: its steps, where nobody said how many, by the time that each of them takes."""

from dataclasses import replace

from vitkit.recipes.recipe import Recipe


def shortened(recipe: Recipe, seconds: float, images: int, budget: float) -> Recipe:
    """So many steps as the budget allows, but at least two passes over the data."""
    steps = recipe.length.in_steps(images, recipe.batch)
    allowed = max(int(budget / seconds), -(-2 * images // recipe.batch), 20)
    if steps <= allowed:
        return recipe
    warmup = min(recipe.schedule.warmup, allowed // 10)
    return replace(
        recipe, length=replace(recipe.length, steps=allowed, epochs=None),
        schedule=replace(recipe.schedule, warmup=warmup),
    )  # fmt: skip
