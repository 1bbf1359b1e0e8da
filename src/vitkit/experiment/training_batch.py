"""Images of the first training batch as the model sees them, kept in the run folder."""

# B images that are shown; H, W pixels; C classes

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitkit.data.batches import Batch, Samples
from vitkit.data.order import Order
from vitkit.data.sources import Source
from vitkit.experiment.evidence import Say, harmless, jpeg, keep, resized
from vitkit.experiment.pages import BATCH
from vitkit.experiment.supply import mixed, training_view
from vitkit.io.atomic import replace_file
from vitkit.objectives.classify import one_hot
from vitkit.recipes.recipe import Recipe

PICTURE = "training-batch.jpg"
SHOWN, ACROSS = 12, 4  # images of the batch, and of a row of the picture
Labels = Sequence[tuple[str, float]]  # with their shares

LABELS = 3  # of one image that are named
LINE = 20  # pixels of a row of words in the picture


def keep_batch(out: Path, recipe: Recipe, source: Source, order: Order, say: Say) -> None:
    """Into the run folder, once. The images are made anew, so that training is not touched by it."""
    if (out / BATCH).exists():
        return
    with harmless(BATCH, say):
        images, labels = first_images(recipe, source, order)
        named = [label_shares(row, source.classes) for row in labels]
        small = [resized(image.permute(1, 2, 0).numpy()) for image in images]
        sheet = contact_sheet([Image.fromarray(pixels) for pixels in small], named)
        replace_file(out / PICTURE, lambda beside: sheet.save(beside, "JPEG", quality=88))
        shown = [{"image": jpeg(pixels), "labels": row} for pixels, row in zip(small, named, strict=True)]
        keep(out / BATCH, {"step": 0, "of": recipe.batch, "how": how_made(recipe), "images": shown})


def first_images(recipe: Recipe, source: Source, order: Order) -> tuple[Tensor, Tensor]:
    """uint8 (B, 3, H, W) and the shares of their labels (B, C), as the first step has them but normalised.

    Every random choice is a function of the seed, the step and the place: these are the same images.
    """
    mine = range(min(SHOWN, recipe.batch))
    places = list(mine)
    if recipe.mixup and len(places) < recipe.batch:
        places.insert(0, recipe.batch - 1)  # the partner of the first one
    made, _ = Samples(source, training_view(recipe), order).made([(0, place) for place in places])
    targets = one_hot(made["label"], len(source.classes))
    batch: Batch = made | {"image": made["image"].float(), "label": targets}
    if recipe.mixup:
        batch = mixed(batch, recipe.mixup, order.rng(0, -1), mine, recipe.batch)
    return batch["image"].round().clamp(0, 255).to(torch.uint8), batch["label"]


def label_shares(row: Tensor, classes: Sequence[str]) -> list[tuple[str, float]]:
    """The labels of one image by their share, the largest first."""
    best = row.argsort(descending=True, stable=True)[:LABELS].tolist()
    return [(classes[i], round(float(row[i]), 4)) for i in best if row[i] >= 0.005]


def how_made(recipe: Recipe) -> str:
    """The augmentation in words."""
    used = {
        "a random part of each": recipe.crop in ("inception", "random", "squash-random"),
        "mirrored at random": recipe.flip,
        "changed by RandAugment": bool(recipe.randaugment),
        "two mixed by Mixup, with their shares": bool(recipe.mixup),
        recipe.task.batch_note: bool(recipe.task.batch_note),
    }
    return ", ".join(words for words, of in used.items() if of) or "the whole of each"


def contact_sheet(pictures: Sequence[Image.Image], labels: Sequence[Labels]) -> Image.Image:
    """One picture of all, each with its labels below it."""
    wide, tall = max(p.width for p in pictures), max(p.height for p in pictures) + LINE + 8
    rows = -(-len(pictures) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * (wide + 8) + 8, rows * tall + 8), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for i, (picture, named) in enumerate(zip(pictures, labels, strict=True)):
        x, y = 8 + i % ACROSS * (wide + 8), 8 + i // ACROSS * tall
        sheet.paste(picture, (x, y))
        words = ", ".join(label + ("" if share >= 0.995 else f" {share:.0%}") for label, share in named)
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        while len(words) > 1 and draw.textlength(words, font) > wide:
            words = f"{words[:-2]}…"
        draw.text((x, y + picture.height + 3), words, "black", font)
    return sheet
