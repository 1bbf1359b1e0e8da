"""How training images are changed at random, in the words of --plan."""

from collections.abc import Sequence

from vitkit.data.sources.source import Source
from vitkit.data.target_views import JitterView
from vitkit.data.views import View
from vitkit.recipes.recipe import Recipe
from vitkit.runs.batches import training_view

CROPS = {
    "inception": "random crops of 5 to 100 % of an image",
    "random": "random crops of the resized image",
    "squash-random": "random crops of the squashed image",
    "centre": "central crops",
    "squash": "whole images, squashed to the size",
    "fit": "whole images, resized to fit and padded",
}


def augmentation(recipe: Recipe, train: Source) -> list[str]:
    """The random changes of training images, in their order."""
    view = recipe.task.target_view(training_view(recipe), train)
    if isinstance(view, JitterView):
        return with_targets(view, recipe.image_size)
    parts = [crop_text(recipe)]
    parts += ["random horizontal flips"] if recipe.flip else []
    parts += colours(first := training_view(recipe))
    parts += [further(views) for _, views in recipe.task.more_views(first)]
    parts += ["3-Augment"] if recipe.three_augment else []
    parts += [f"colour jitter {recipe.color_jitter:g}"] if recipe.color_jitter else []
    if recipe.randaugment:
        parts.append(f"RandAugment ({recipe.randaugment[0]} layers, magnitude {recipe.randaugment[1]})")
    parts += [f"random erasing {recipe.erasing:g}"] if recipe.erasing else []
    parts += [f"Mixup {recipe.mixup:g}"] if recipe.mixup else []
    parts += [f"CutMix {recipe.cutmix:g}"] if recipe.cutmix else []
    parts += [f"label smoothing {recipe.label_smoothing:g}"] if recipe.label_smoothing else []
    return parts


def colours(view: View) -> list[str]:
    """The distortions of DINO, MoCo v3 and distillation, with their probabilities."""
    if (d := view.distortion) is None:
        return []
    chances = {
        "random colours": d.jitter_probability, "grayscale": d.grayscale, "blur": d.blur,
        "solarization": d.solarize,
    }  # fmt: skip
    return [f"{name} ({100 * chance:g} %)" for name, chance in chances.items() if chance]


def further(views: Sequence[View]) -> str:
    """Further views of an image, which are all alike."""
    view, name = views[0], "view" if len(views) == 1 else "views"
    size, area = f"{view.size[0]}x{view.size[1]}", f"{100 * view.area:g} to {100 * view.largest:g} %"
    text = f"{len(views)} more {name} of {size} pixels ({area} of the area)"
    return ": ".join([text, *([" and ".join(changes)] if (changes := colours(view)) else [])])


def with_targets(view: JitterView, image_size: tuple[int, int]) -> list[str]:
    """The changes of images with masks or boxes: scale, crop, flips and colours."""
    larger = max(image_size) / max(view.size)  # a view of windows is scaled relative to the image size
    least, largest = (round(factor / larger, 4) for factor in view.scale)
    scaled = f"scaled by {least:g}" + ("" if least == largest else f" to {largest:g}")
    parts = [f"whole images, {scaled}" if view.scale[1] <= 1 else f"{scaled}, random crops"]
    if view.size != image_size:
        parts.append(f"of {view.size[0]}x{view.size[1]}")
        parts = [" ".join(parts)]
    parts += ["random horizontal flips"] if view.flip else []
    parts += ["random vertical flips"] if view.vertical_flip else []
    parts += [f"colour distortion {view.photometric:g}"] if view.photometric else []
    return parts


def crop_text(recipe: Recipe) -> str:
    view = training_view(recipe)  # whose crop may be the task's
    if view.crop in ("inception", "resized"):
        return f"a random {100 * view.area:g} to {100 * view.largest:g} % of the area, resized"
    return CROPS[view.crop]
