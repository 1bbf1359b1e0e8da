"""The configuration that a run starts from, before any weights are read, and the resolution that fits it."""

from dataclasses import replace
from pathlib import Path

from vitkit.errors import Error
from vitkit.io.free_memory import total_memory
from vitkit.metrics.cost import parameters
from vitkit.models.variants import Config, published_variant, skeleton, variant, with_image_size, with_options
from vitkit.models.vit import ViTConfig
from vitkit.planning.automatic import Choice, Circumstances, may_choose
from vitkit.recipes.recipe import Recipe
from vitkit.weights.load import config_of
from vitkit.weights.published import PUBLISHED

NATIVE = 256  # pixels up to which weights above 224 are fine-tuned at their own resolution, and not at 224
MOST_PATCHES = 1024  # of weights below 224 pixels; a ViT-Ti/4 of 32 pixels would have 3,136 at 224


def starting_config(recipe: Recipe) -> Config | None:
    """The configuration of the weights or of the named model; None if the recipe names neither."""
    if recipe.weights:
        weight = None if Path(recipe.weights).exists() else PUBLISHED.get(recipe.weights)
        if weight is None:
            return config_of(recipe.weights)
        return with_image_size(published_variant(weight.model), (weight.pixels, weight.pixels))
    return with_options(variant(recipe.model), recipe.model_options) if recipe.model else None


def check_size(config: Config, name: str) -> None:
    """Refuse a model that this machine cannot hold, before it tries to."""
    count, most = parameters(skeleton(config)), total_memory()
    if 4 * count > most:
        raise Error(
            f"{name} has {count / 1e9:.1f} billion parameters, {4 * count / 1e9:.1f} GB in float32, and this "
            f"machine has {most / 1e9:.1f} GB of memory; use a smaller model or a larger machine",
            code="training.out-of-memory",
        )


def check_rgb(config: Config, name: str) -> None:
    """Refuse a model of other images than RGB, as which every image file is read."""
    if config.channels != 3:
        raise Error(
            f"{name} takes images of {config.channels} channels, but image files are read as RGB, with 3 "
            "channels; use a model with channels=3, or call this one from Python with your own tensors",
            code="model.unsupported",
        )


def fit_resolution(
    recipe: Recipe, known: Circumstances, config: Config | None
) -> tuple[Recipe, Choice | None]:
    """The chosen resolution in whole patches.

    It is that of the weights if it is close, cannot be changed, or is small with small patches.
    """
    if not (isinstance(config, ViTConfig) and recipe.weights and may_choose("image_size", recipe, known)):
        return recipe, None
    pixels, own, stride = recipe.image_size[0], config.image_size, config.stride
    close = own[0] == own[1] and pixels == 224 < own[0] <= NATIVE and config.positions != "none"
    many = max(own) < 224 and (pixels // stride) ** 2 > MOST_PATCHES
    if config.positions == "relative" or close or many:
        size, reason = own, "the resolution of the weights"
    else:
        size = (max(1, round(pixels / stride)) * stride,) * 2
        reason = f"whole patches of {stride} pixels"
    if size == recipe.image_size:
        return recipe, None
    text = str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
    return replace(recipe, image_size=size), Choice(f"resolution {text}", reason)
