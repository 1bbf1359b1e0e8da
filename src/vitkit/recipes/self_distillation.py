"""Recipes of self-distillation without labels: DINO as published and for one machine, and iBOT."""

from collections.abc import Callable
from dataclasses import replace

from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions, TaskOptions
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

RATE = 5e-4  # at a batch of 256; other batches have it in proportion
IMAGENET = 1_281_167  # images
# of the official ViT: GELU by erf, drop path divided by its share, positions resized with an offset of 0.1
OFFICIAL = ModelOptions(gelu="erf", stochastic_depth_rescale=True, position_resize="dinov2")


def dino() -> Recipe:
    """What `vitkit pretrain --recipe dino` starts from: DINO's numbers at a batch for one machine."""
    return Recipe(
        name="dino",
        about="DINO: Adam, batch 256, rate 0.0005, weight decay 0.04 to 0.4, 2 large and 8 small crops",
        model_options=OFFICIAL,
        image_size=(224, 224),
        interpolation="bicubic",
        evaluation_crop="centre",
        batch=256,
        length=Duration(epochs=100),
        schedule=Schedule(rate=RATE, warmup=500, decay="cosine", floor=1e-6),
        optimizer=OptimizerConfig(kind="adam", betas=(0.9, 0.999), clip=0.0),
        objective="dino",
        stochastic_depth=0.1,
        val=0.02,
        test=0.02,
    )


def dino_imagenet() -> Recipe:
    """The official code's defaults, of its run on 8 GPUs: ViT-S/16 has 69.3 % by k-NN, 74.0 % by a probe."""
    batch = 512  # 8 times 64
    return replace(
        dino(),
        name="dino-imagenet",
        about="DINO's ViT-S/16 of 100 epochs on ImageNet: batch 512, rate 0.001, 65,536 outputs",
        model="ViT-S/16",
        batch=batch,
        schedule=Schedule(
            rate=RATE * batch / 256, warmup=round(10 * IMAGENET / batch), decay="cosine", floor=1e-6
        ),
        task_options=TaskOptions({"dino.prototypes": 65_536}),
        val=0.01,
        test=0.01,
    )


def ibot() -> Recipe:
    """iBOT's numbers of its ViT-S/16 at a batch for one machine: 800 epochs there, k-NN 75.2 %, probe 77.9 %.

    Its temperatures are warmed up over 30 epochs, here over 30 % of the run.
    """
    return replace(
        dino(),
        name="ibot",
        about="iBOT: DINO with masked patches, 10 small crops, teacher's temperatures 0.04 to 0.07",
        objective="ibot",
        task_options=TaskOptions(
            {
                "ibot.norm_last_layer": False,
                "ibot.local_crops": 10,
                "ibot.global_scale": (0.25, 1.0),
                "ibot.local_scale": (0.05, 0.25),
                "ibot.teacher_temperature": 0.07,
            }
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"dino": dino, "dino-imagenet": dino_imagenet, "ibot": ibot}
