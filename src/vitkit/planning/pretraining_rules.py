"""How `vitkit pretrain --task` trains: model, image size, batch and length by the images and the device."""

from dataclasses import replace
from pathlib import Path

from vitkit.models.variants import variant
from vitkit.planning import automatic
from vitkit.planning.automatic import Choice, Circumstances, Rule
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import Recipe
from vitkit.training.schedule import Duration
from vitkit.weights.load import load
from vitkit.weights.published import PUBLISHED

PATCHES = ((64, 4), (128, 8))  # patch size for images of up to so many pixels; at most 256 patches an image
LARGEST = 224  # pixels of the shorter side
STEPS_AN_EPOCH = 8
EPOCHS = 300  # where the recipe states steps of another data set
CPU_IMAGES = 128_000  # on a CPU: seen in total, but at least two epochs
WARMUP = 10  # a tenth of the steps; MAE, DINO and MoCo v3 warm up for 5 to 13 %


def open_to_rules(recipe: Recipe, known: Circumstances, *fields: str) -> bool:
    """Whether the recipe is one of --task, and the user has set none of these fields."""
    return "pretraining" in recipe.auto and not known.has_set(*fields)


def patch_for(pixels: float) -> int:
    return next((patch for most, patch in PATCHES if pixels <= most), 16)


def choose_image_size(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The size of the weights, or that of the images in whole patches, up to 224 pixels."""
    if not open_to_rules(recipe, known, "image_size"):
        return recipe, None
    if recipe.weights:
        size, reason = size_of(recipe.weights), "the resolution of the weights"
    else:
        pixels = min(known.side, LARGEST)
        patch = getattr(variant(recipe.model), "stride", 32) if recipe.model else patch_for(pixels)
        side = max(2, round(pixels) // patch) * patch
        size, reason = (side, side), f"the images' median shorter side is {known.side:.0f} pixels"
    return replace(recipe, image_size=size), Choice(f"resolution {size[0]}", reason)


def size_of(weights: str) -> tuple[int, int]:
    """The image size of weights; of published ones without a download."""
    if weights in PUBLISHED and not Path(weights).exists():
        return PUBLISHED[weights].pixels, PUBLISHED[weights].pixels
    return load(weights).config.image_size


def choose_model(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """A small ViT with patches that leave at most 256 of them, if the user has named nothing."""
    if recipe.weights or recipe.model or not open_to_rules(recipe, known, "model"):
        return recipe, None
    pixels = min(recipe.image_size)
    patch = patch_for(pixels)
    size = "S" if known.gpu and patch == 16 else "Ti"
    reason = f"for images of {pixels} pixels on a {'GPU' if known.gpu else 'CPU'}"
    return replace(recipe, model=f"ViT-{size}/{patch}"), Choice(f"ViT-{size}/{patch} from scratch", reason)


def choose_batch(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    if not open_to_rules(recipe, known, "batch"):
        return recipe, None
    batch = min(recipe.batch, automatic.batch_for(known, STEPS_AN_EPOCH))
    return replace(recipe, batch=batch), Choice(f"batch {batch}", f"for {known.images} images")


def choose_rate(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The recipe's rate for this batch, in the way in which the task's source states it."""
    if not open_to_rules(recipe, known, "schedule.rate"):
        return recipe, None
    published, power = named_recipe(recipe.name), recipe.task.rate_power
    rate = float(f"{published.schedule.rate * (recipe.batch / published.batch) ** power:.3g}")
    if rate == recipe.schedule.rate:
        return recipe, None
    schedule = replace(recipe.schedule, rate=rate, floor=min(recipe.schedule.floor, rate))
    reason = f"the recipe has {published.schedule.rate:g} for batch {published.batch}"
    return replace(recipe, schedule=schedule), Choice(f"learning rate {rate:g}", reason)


def choose_length(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The recipe's epochs, on a CPU fewer of them; a tenth of the steps is warm-up."""
    if not open_to_rules(recipe, known):
        return recipe, None
    choice = None
    if "length" not in known.fixed:
        epochs = recipe.length.epochs or EPOCHS
        seen = epochs * known.images
        if not known.gpu:
            seen = min(seen, max(CPU_IMAGES, 2 * known.images))
        steps = max(1, round(seen / recipe.batch))
        recipe = replace(recipe, length=Duration(steps=steps))
        reason = f"{seen / known.images:.3g} epochs of {known.images} images"
        choice = Choice(f"{steps} steps", reason if known.gpu else f"{reason}, on a CPU")
    if not known.fixed_warmup:
        steps = recipe.length.in_steps(known.images, recipe.batch)
        recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=steps // WARMUP))
    return recipe, choice


RULES: tuple[Rule, ...] = (choose_image_size, choose_model, choose_batch, choose_rate, choose_length)
