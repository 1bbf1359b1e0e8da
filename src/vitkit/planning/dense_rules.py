"""How segmentation and detection train: image size, batch, rate and length by the images and the device."""

from dataclasses import replace
from statistics import median
from typing import Any

from vitkit.data.decode import BadImage, decode
from vitkit.data.sources.source import Source
from vitkit.planning.automatic import Choice, Circumstances, Rule
from vitkit.recipes.dense_images import RECIPES, rf_detr
from vitkit.recipes.recipe import Recipe
from vitkit.training.schedule import Duration
from vitkit.weights.published import PUBLISHED

MULTIPLE = 32  # pixels: image sizes are multiples of this, which patches of 8, 16 and 32 divide
LARGEST = {
    "mask": 512,
    "boxes": 640,
    "instances": 640,
}  # pixels of the longer side on a GPU; larger images are scaled down
LARGEST_CPU = 256
LOOKED_AT = 32  # images whose sizes are read
BATCH, BATCH_CPU = 16, 4
STEPS_AN_EPOCH = 8  # at least, which limits the batch of a small data set
EPOCHS, MOST_STEPS, FEWEST_STEPS = 100, 40_000, 1_000
CPU_STEPS = 300  # at most on a CPU: 1,200 images, minutes for ViT-Ti/16 on two cores
RATE, RATE_BATCH = 5e-4, 16
WARMUP = 10  # a tenth of the steps


def open_to_rules(recipe: Recipe, known: Circumstances, *fields: str) -> bool:
    """Whether the recipe is a default one of a dense task, and the user has set none of these fields."""
    return "dense" in recipe.auto and not known.has_set(*fields)


def choose_image_size(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The median size of the images in multiples of 32, scaled down to the largest side of the device."""
    if not open_to_rules(recipe, known, "image_size"):
        return recipe, None
    sizes = image_sizes(known.splits["train"])
    height, width = (median(side) for side in zip(*sizes, strict=True))
    most = LARGEST[recipe.task.targets] if known.gpu else LARGEST_CPU
    scale = min(1.0, most / max(height, width))
    size = (multiple(height * scale), multiple(width * scale))
    reason = f"the images' median size is {height:.0f}x{width:.0f}" + ("" if known.gpu else ", on a CPU")
    return replace(recipe, image_size=size), Choice(f"resolution {size[0]}x{size[1]}", reason)


def multiple(pixels: float) -> int:
    """The next multiple of 32, so that an image keeps all of its pixels where it is not scaled down."""
    return max(1, -(-round(pixels) // MULTIPLE)) * MULTIPLE


def image_sizes(source: Source) -> list[tuple[int, int]]:
    """Height and width of some images from all parts of the data."""
    sizes = []
    for i in range(0, len(source), max(1, len(source) // LOOKED_AT)):
        try:
            content = source.fetch(i)
            sizes.append((decode(content) if isinstance(content, bytes) else content).shape[:2])
        except BadImage:
            continue
    return [(int(height), int(width)) for height, width in sizes] or [(512, 512)]


def choose_batch(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    if not open_to_rules(recipe, known, "batch"):
        return recipe, None
    whole = max(1, known.images // STEPS_AN_EPOCH)
    batch = max(2, min(BATCH if known.gpu else BATCH_CPU, 2 ** (whole.bit_length() - 1)))
    batch = max(known.world, batch // known.world * known.world)
    return replace(recipe, batch=batch), Choice(f"batch {batch}", f"for {known.images} images")


def choose_length(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The recipe's epochs between two limits; on a CPU a length that ends in minutes. A tenth is warm-up."""
    if not open_to_rules(recipe, known):
        return recipe, None
    choice = None
    if "length" not in known.fixed:
        steps = max(FEWEST_STEPS, min(MOST_STEPS, EPOCHS * known.images // recipe.batch))
        steps = steps if known.gpu else min(steps, CPU_STEPS)
        recipe = replace(recipe, length=Duration(steps=steps))
        where = "a GPU" if known.gpu else "a CPU"
        choice = Choice(f"{steps} steps", f"for {known.images} training images on {where}")
    if not known.fixed_warmup:
        steps = recipe.length.in_steps(known.images, recipe.batch)
        recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=steps // WARMUP))
    return recipe, choice


def is_rf_detr(recipe: Recipe) -> bool:
    """Whether the detector is an RF-DETR: by the recipe, or by the name of its published weights."""
    head, weight = getattr(recipe.task, "head", ""), PUBLISHED.get(recipe.weights)
    from_weights = head == "auto" and weight is not None and weight.model.startswith("RF-DETR")
    return head == "rf-detr" or from_weights


def follow_rf_detr(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The optimizer and the schedule of RF-DETR, where that is the detector."""
    if not is_rf_detr(recipe) or not open_to_rules(recipe, known):
        return recipe, None
    own, changes = rf_detr(), dict[str, Any]()
    for field in ("optimizer", "stochastic_depth"):
        if open_to_rules(recipe, known, field):
            changes[field] = getattr(own, field)
    if open_to_rules(recipe, known, "schedule"):
        changes["schedule"] = replace(own.schedule, warmup=recipe.schedule.warmup)
    if all(getattr(recipe, field) == value for field, value in changes.items()):
        return recipe, None
    return replace(recipe, **changes), Choice("the published optimizer of RF-DETR", "that is the detector")


def choose_rate(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    if not open_to_rules(recipe, known, "schedule.rate"):
        return recipe, None
    name = "rf-detr" if is_rf_detr(recipe) else recipe.name if recipe.weights else ""
    base = RECIPES[name]().schedule.rate if name in RECIPES else RATE  # published for pretrained weights
    rate = float(f"{base * (recipe.batch / RATE_BATCH) ** 0.5:.2g}")
    if rate == recipe.schedule.rate:
        return recipe, None
    schedule = replace(recipe.schedule, rate=rate)
    return replace(recipe, schedule=schedule), Choice(f"learning rate {rate:g}", f"for batch {recipe.batch}")


def train_all_layers(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The same rate in all layers where there are no pretrained weights to keep."""
    if recipe.weights or not recipe.model or not open_to_rules(recipe, known, "optimizer"):
        return recipe, None
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, layer_decay=1.0))
    return recipe, Choice("the same rate in all layers", "they are trained from scratch")


RULES: tuple[Rule, ...] = (
    choose_image_size, choose_batch, choose_length, follow_rf_detr, choose_rate, train_all_layers,
)  # fmt: skip
