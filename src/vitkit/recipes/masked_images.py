"""Pre-training recipes that reconstruct hidden pixels: MAE and SimMIM, as published and for one machine."""

from collections.abc import Callable
from dataclasses import replace

from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

IMAGENET = 1_281_167  # training images of ImageNet, for warm-ups that are published in epochs


def scaled_rate(base: float, batch: int, per: int) -> float:
    """A rate that is published for `per` images, in proportion to the batch."""
    return float(f"{base * batch / per:.6g}")


def mae() -> Recipe:
    """MAE for one machine: optimizer, rate per image and augmentation as published, a smaller batch.

    400 epochs: between lightly's 800 for 9,469 images and MAE's 800 to 1600 for ImageNet, since the loss
    goes on falling. Fixed positions (sincos2d-mae) and warm-up as a share of the run are those of MAE.
    """
    batch = 512
    return Recipe(
        name="mae",
        about="MAE: AdamW, betas 0.9 and 0.95, weight decay 0.05, rate 1.5e-4 per 256 images, crops of 20 % "
        "of the area or more, 75 % of the patches hidden; batch 512 and 400 epochs, for one machine",
        model_options=ModelOptions(positions="sincos2d-mae"),
        objective="mae",
        image_size=(224, 224),
        crop="resized",
        crop_area=0.2,
        interpolation="bicubic",
        evaluation_crop="centre",
        batch=batch,
        length=Duration(epochs=400),
        schedule=Schedule(rate=scaled_rate(1.5e-4, batch, 256), warmup=1_000, decay="cosine"),
        optimizer=OptimizerConfig(kind="adam", betas=(0.9, 0.95), weight_decay=0.05, clip=0.0),
        val=0.02,
        test=0.02,
    )


def mae_imagenet() -> Recipe:
    """MAE on ImageNet as published: 83.66 % after fine-tuning, from 1600 epochs (--epochs 1600)."""
    batch = 4096
    return replace(
        mae(),
        name="mae-imagenet",
        about="MAE as published for ViT-B/16: batch 4096, 800 epochs, 40 of warm-up, rate 0.0024",
        model="MAE-B/16",
        batch=batch,
        length=Duration(epochs=800),
        schedule=Schedule(
            rate=scaled_rate(1.5e-4, batch, 256), warmup=round(40 * IMAGENET / batch), decay="cosine"
        ),
        val=0.01,
        test=0.01,
    )


def simmim() -> Recipe:
    """SimMIM's optimizer, masks and crops for vitkit's plain ViT, with a batch for one machine.

    Published: 800 epochs, 10 of warm-up, the rate divided by 10 at epoch 700, base rate 1e-4 for 512 images;
    drop path 0.1 with kept branches rescaled.
    """
    return replace(
        mae(),
        name="simmim",
        about="SimMIM: AdamW, weight decay 0.05, rate 1e-4 per 512 images, a tenth of it for the last "
        "eighth of the run, clipping at 5, drop path 0.1, crops of 67 % of the area or more; 60 % hidden",
        model_options=ModelOptions(stochastic_depth_rescale=True),
        objective="simmim",
        crop_area=0.67,
        schedule=Schedule(rate=1e-4, warmup=1_000, decay="stairs", stairs=(700 / 800,)),
        optimizer=OptimizerConfig(kind="adam", betas=(0.9, 0.999), weight_decay=0.05, clip=5.0),
        stochastic_depth=0.1,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"mae": mae, "mae-imagenet": mae_imagenet, "simmim": simmim}
