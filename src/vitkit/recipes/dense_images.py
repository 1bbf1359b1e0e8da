"""Recipes for segmentation and detection with a plain ViT; planning/dense_rules.py fits them to the data."""

from collections.abc import Callable
from dataclasses import replace

from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import TaskOptions
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule


def segment() -> Recipe:
    """A class for each pixel: the whole ViT is trained with a linear head on upscaled patches."""
    return Recipe(
        name="segment",
        about="AdamW with layer decay 0.75, weight decay 0.05, crops of images scaled by 0.5 to 2, flips and "
        "color distortion; image size, batch, rate and length by the data",
        auto=("weights", "dense"),
        objective="segment",
        image_size=(512, 512),
        color_jitter=1.0,
        batch=16,
        length=Duration(epochs=100),
        schedule=Schedule(rate=5e-4, warmup=100, decay="cosine"),
        optimizer=OptimizerConfig(kind="adam", weight_decay=0.05, layer_decay=0.75, clip=1.0),
        stochastic_depth=0.1,
        evaluations=5,
        val=0.1,
        val_images=(10, 500),
    )


def detect() -> Recipe:
    """Boxes of objects: the whole ViT is trained with a simple feature pyramid and a dense head (FCOS)."""
    return replace(
        segment(),
        name="detect",
        about="AdamW with layer decay 0.75, weight decay 0.05, images scaled by 0.5 to 2, flips; image size, "
        "batch, rate and length by the data",
        objective="detect",
        image_size=(640, 640),
        color_jitter=0.0,
    )


def rf_detr() -> Recipe:
    """Boxes of objects by RF-DETR, from its weights or those of a ViT, with its published optimizer.

    Published are 1e-4 for the head, 1.5e-4 * 0.7^2 = 0.74e-4 for the encoder, with decay by layer, and 0.7e-4
    for the decoder, which learns as the head here. The images keep their aspect ratio.
    """
    return replace(
        detect(),
        name="rf-detr",
        about="RF-DETR: AdamW with layer decay 0.8, weight decay 1e-4, gradients clipped at 0.1, a constant "
        "rate of 1e-4 for 16 images, weights averaged by 0.993; image size, batch and length by the data",
        task_options=TaskOptions.of({"detect.head": "rf-detr"}),
        schedule=Schedule(rate=1e-4, warmup=100, decay="constant"),
        optimizer=OptimizerConfig(kind="adam", weight_decay=1e-4, layer_decay=0.8, clip=0.1, average=0.993),
        stochastic_depth=0.0,
    )


def instances() -> Recipe:
    """Masks of objects by EoMT, with its published optimizer.

    Published is a rate that falls by a polynomial of power 0.9, which here is linear, with a warm-up of the
    encoder that begins when that of the new layers ends, which here begins with it; and scales from 0.1 to 2,
    for 12 epochs of COCO.
    """
    return replace(
        detect(),
        name="instances",
        about="EoMT: AdamW with layer decay 0.8, weight decay 0.05, gradients clipped at 0.01, rate 1e-4 for "
        "16 images with linear decay, images scaled by 0.5 to 2, flips; image size, batch and length by data",
        objective="instances",
        schedule=Schedule(rate=1e-4, warmup=100, decay="linear"),
        optimizer=OptimizerConfig(kind="adam", weight_decay=0.05, layer_decay=0.8, clip=0.01),
        stochastic_depth=0.0,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "segment": segment, "detect": detect, "rf-detr": rf_detr, "instances": instances,
}  # fmt: skip
