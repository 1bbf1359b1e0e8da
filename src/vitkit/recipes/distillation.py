"""Recipes that learn from another network: MoCo v3's averaged one, a teacher's features, DeiT's teacher."""

from collections.abc import Callable
from dataclasses import replace

from vitkit.recipes.pretrain import adam
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions
from vitkit.training.schedule import Duration, Schedule

IMAGENET = 1_281_167  # images


def contrastive() -> Recipe:
    """What `vitkit pretrain` starts from for contrastive learning: MoCo v3, sized for one machine.

    The rate is MoCo v3's, 1.5e-4 for each 256 images of a batch; batch and length are our choice.
    """
    return replace(
        contrastive_imagenet(),
        name="contrastive",
        about="MoCo v3, two views of an image: Adam, batch 1024, cosine decay from 0.0006, weight decay 0.1",
        model="",
        model_options=ModelOptions(),
        batch=1024,
        length=Duration(epochs=100),
        schedule=Schedule(rate=6e-4, warmup=1_000, decay="cosine"),
        val=0.02,
        test=0.02,
    )


def contrastive_imagenet() -> Recipe:
    """MoCo v3's ViT-B/16: 76.7 % on ImageNet by a linear classifier, 83.2 % when fine-tuned (its README).

    AdamW with betas 0.9 and 0.999, 1.5e-4 * 4096 / 256, weight decay on all parameters, no clipping, 40
    epochs of warm-up. The positions are MoCo v3's with their channels in another order, which a random model
    does not notice.
    """
    return Recipe(
        name="contrastive-imagenet",
        about="MoCo v3, ViT-B/16: Adam, batch 4096, 300 epochs, cosine decay from 0.0024, weight decay 0.1",
        model="ViT-B/16",
        model_options=ModelOptions(positions="sincos2d-mae", gelu="erf"),
        image_size=(224, 224),
        crop="resized",
        crop_area=0.08,
        evaluation_crop="centre",
        batch=4096,
        length=Duration(epochs=300),
        schedule=Schedule(rate=2.4e-3, warmup=40 * IMAGENET // 4096, decay="cosine"),
        optimizer=replace(adam(0.1, clip=0.0), decays="all"),
        objective="contrastive",
        val=0.01,
        test=0.01,
    )


def distill() -> Recipe:
    """What `vitkit pretrain` starts from for the features of a teacher, which `distill.teacher` names.

    View, mixed images, rate, weight decay and clipping are LightlyTrain's: a random part of 14 % or more,
    images mixed with a uniform share, 5e-4 * sqrt(batch / 1536), 0.04, 1.0. The loss is our own (see the
    task), as are batch and length.
    """
    return Recipe(
        name="distill",
        about="features of a teacher: Adam, batch 1024, cosine decay from 0.0004, weight decay 0.04, Mixup 1",
        image_size=(224, 224),
        crop="resized",
        crop_area=0.14,
        interpolation="bicubic",
        mixup=1.0,
        evaluation_crop="centre",
        batch=1024,
        length=Duration(epochs=100),
        schedule=Schedule(rate=4e-4, warmup=1_000, decay="cosine"),
        optimizer=adam(0.04, clip=1.0),
        objective="distill",
        val=0.02,
        test=0.02,
    )


def deit_distilled() -> Recipe:
    """DeiT with a distillation token: DeiT-S/16 81.2 % on ImageNet with a RegNetY-16GF as teacher (README).

    5e-4 * 1024 / 512, 5 epochs of warm-up, decay to 1e-5. Not as DeiT: each image occurs once a batch instead
    of three times, Mixup's partner is the previous image, and RandAugment's magnitude has no noise.
    """
    return Recipe(
        name="deit-distilled",
        about="DeiT, hard distillation: Adam, batch 1024, 300 epochs, cosine decay from 0.001, Mixup, CutMix",
        model="DeiT-distilled-S/16",
        model_options=ModelOptions(stochastic_depth_rescale=True),
        image_size=(224, 224),
        crop="resized",
        crop_area=0.08,
        interpolation="bicubic",
        randaugment=(2, 9),
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
        evaluation_crop="centre",
        batch=1024,
        length=Duration(epochs=300),
        schedule=Schedule(rate=1e-3, warmup=5 * IMAGENET // 1024, decay="cosine", floor=1e-5),
        optimizer=adam(0.05, clip=0.0),
        objective="distill_labels",
        label_smoothing=0.1,
        stochastic_depth=0.1,
        val=0.01,
        test=0.01,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "contrastive": contrastive, "contrastive-imagenet": contrastive_imagenet, "distill": distill,
    "deit-distilled": deit_distilled,
}  # fmt: skip
