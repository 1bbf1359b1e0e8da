"""Pre-training recipes of the paper (Table 3, masked patches), AugReg, plain ViT, FlexiViT, and a default."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

ROWS = {  # Table 3: data -> (models, passes over the data, rate)
    "jft": (
        (("ViT-B/16", "ViT-B/32"), (7,), 8e-4), (("ViT-L/32",), (7,), 6e-4), (("ViT-L/16",), (7, 14), 4e-4),
        (("ViT-H/14",), (14,), 3e-4), (("BiT-R50x1", "BiT-R50x2"), (7,), 1e-3), (("BiT-R101x1",), (7,), 8e-4),
        (("BiT-R152x1", "BiT-R152x2"), (7,), 6e-4), (("R50+ViT-B/16", "R50+ViT-B/32"), (7,), 8e-4),
        (("R50+ViT-L/32",), (7,), 2e-4), (("R50+ViT-L/16",), (7, 14), 4e-4),
    ),
    "i21k": (
        (("ViT-B/16", "ViT-B/32"), (90,), 1e-3), (("ViT-L/16", "ViT-L/32"), (30, 90), 1e-3),
    ),
    "imagenet": ((("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14"), (300,), 3e-3),),
}  # fmt: skip
WIDTH = {"Ti": 192, "S": 384, "b": 384, "B": 768, "L": 1024, "H": 1280}
AUGREG = {  # its seven levels: (RandAugment layers, magnitude, Mixup)
    "none": (0, 0, 0.0), "light1": (2, 0, 0.0), "light2": (2, 10, 0.2), "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5), "strong1": (2, 20, 0.5), "strong2": (2, 20, 0.8),
}  # fmt: skip
LEVELS = {  # the level of each model in big_vision's configurations
    "i21k": {"ViT-Ti/16": "none", "ViT-S/32": "none", "ViT-S/16": "light1", "ViT-B/32": "light2",
             "ViT-B/16": "light2", "ViT-L/16": "medium2"},
    "i1k": {"ViT-Ti/16": "light1", "ViT-S/32": "medium1", "ViT-S/16": "medium2", "ViT-B/32": "medium2",
            "ViT-B/16": "medium2", "ViT-L/16": "medium2"},
}  # fmt: skip
FLEXIVIT = (5, 6, 8, 10, 12, 15, 16, 20, 24, 30)  # patches per side of an image of 240 pixels
IMAGES = {  # of the data set behind a published recipe's epochs, by the first part of its name
    "jft": 303_000_000, "i21k": 14_200_000, "imagenet": 1_281_167, "augreg-i21k": 14_200_000,
    "augreg-i1k": 1_281_167, "plain": 1_281_167, "flexi": 14_200_000, "mae-imagenet": 1_281_167,
}  # fmt: skip


def images_of(name: str) -> int:
    """The number of images of the data set that a published recipe is for; 0: unknown."""
    return IMAGES.get(name.partition(".")[0], 0)


def adam(weight_decay: float, clip: float, moment: str = "fp32") -> OptimizerConfig:
    return OptimizerConfig(
        kind="adam", betas=(0.9, 0.999), weight_decay=weight_decay, clip=clip, moment=moment
    )


def representation(model: str) -> ModelOptions:
    """The paper's tanh layer for pre-training, as wide as the model; a ResNet has none."""
    if "ViT" not in model:
        return ModelOptions()
    return ModelOptions(representation=WIDTH[model.split("ViT-")[1].split("/")[0]])


def table3(data: str, model: str, epochs: int, rate: float) -> Recipe:
    """One row of Table 3. What the table leaves open is as the official code has it, or plain:

    a sigmoid for each class with the head's bias at -10 and decay to 1e-5 where it is linear; weight decay
    on kernels only; clipping for ImageNet only, since the paper states it there only.
    """
    linear = data != "imagenet"
    decay, dropout = {"jft": (0.1, 0.0), "i21k": (0.03, 0.1), "imagenet": (0.3, 0.1)}[data]
    return Recipe(
        name=f"{data}.{model}" + (f"-{epochs}ep" if epochs in (14, 30) and model != "ViT-H/14" else ""),
        about="Table 3: Adam, betas 0.9 and 0.999, batch 4096, 10,000 steps of warm-up, 224 pixels",
        model=model,
        model_options=representation(model),
        image_size=(224, 224),
        batch=4096,
        length=Duration(epochs=epochs),
        schedule=Schedule(
            rate=rate, warmup=10_000, decay="linear" if linear else "cosine", floor=1e-5 if linear else 0.0
        ),
        optimizer=adam(decay, clip=0.0 if linear else 1.0),
        loss="sigmoid",
        head_bias=-10.0,
        dropout=dropout,
        evaluation_crop="centre",
        val=0.01,
        test=0.01,
    )


def augreg(data: str, model: str, epochs: int) -> Recipe:
    """AugReg: cosine decay from 0.001, clipping at 1; augmentation by model, no dropout."""
    layers, magnitude, share = AUGREG[LEVELS[data][model]]
    pooled = data == "i21k"  # averaged tokens and no hidden layer there, class token and tanh layer for i1k
    return replace(
        table3("imagenet", model, epochs, 1e-3),
        name=f"augreg-{data}.{model}",
        about=f"AugReg, {LEVELS[data][model]}: Adam, batch 4096, cosine decay from 0.001, weight decay 0.1",
        model_options=ModelOptions(head="gap") if pooled else representation(model),
        optimizer=adam(0.1, clip=1.0, moment="bf16"),
        randaugment=(layers, magnitude) if layers else (),
        mixup=share,
        dropout=0.0,
    )


def plain_vit(epochs: int = 90) -> Recipe:
    """ "Better plain ViT baselines": ViT-S/16 on ImageNet, 76.5 % after 90 epochs, 80.0 % after 300."""
    return replace(
        augreg("i1k", "ViT-S/16", epochs),
        name="plain",
        about="Plain ViT: batch 1024, averaged tokens, sincos2d positions, RandAugment (2, 10), Mixup 0.2",
        model_options=ModelOptions(head="gap", positions="sincos2d", **representation("ViT-S/16")),
        batch=1024,
        loss="softmax",
        head_bias=0.0,
        randaugment=(2, 10),
        mixup=0.2,
    )


def flexi() -> Recipe:
    """FlexiViT on ImageNet-21k: one model for patches of 8 to 48 pixels; AugReg's light augmentation."""
    return replace(
        augreg("i21k", "ViT-B/16", 90),
        name="flexi",
        about="FlexiViT: a random patch size of 8 to 48 pixels in each step, 240 pixels; else AugReg light2",
        model="FlexiViT-B/16",
        model_options=ModelOptions(),
        image_size=(240, 240),
        patch_sizes=tuple(240 // side for side in FLEXIVIT),
    )


def pretrain() -> Recipe:
    """What `vitkit pretrain` starts from: AugReg's light augmentation, sized for one machine."""
    return replace(
        augreg("i1k", "ViT-S/16", 90),
        name="pretrain",
        about="Adam, weight decay 0.1, cosine decay from 0.001, RandAugment (2, 10), Mixup 0.2, batch 1024",
        model="",
        model_options=ModelOptions(),
        batch=1024,
        schedule=Schedule(rate=1e-3, warmup=1_000, decay="cosine"),
        loss="softmax",
        head_bias=0.0,
        randaugment=(2, 10),
        mixup=0.2,
        val=0.02,
        test=0.02,
    )


def masked(data: str = "jft") -> Recipe:
    """App. B.1.2: ViT-B/16 says the mean colours of corrupted patches; 79.9 % on ImageNet when fine-tuned.

    Weight decay and dropout, which it does not state, are those of Table 3 for JFT. On ImageNet it takes
    100,000 steps: the gain is similar there, and little is gained beyond that.
    """
    return replace(
        table3("jft", "ViT-B/16", 14, 2e-4),
        name="masked" if data == "jft" else f"masked-{data}",
        about="App. B.1.2: masked patch prediction; Adam, batch 4096, cosine decay from 0.0002, 224 pixels",
        model_options=ModelOptions(),
        length=Duration(steps=1_000_000 if data == "jft" else 100_000),
        schedule=Schedule(rate=2e-4, warmup=10_000, decay="cosine"),
        objective="masked",
        loss="softmax",
        head_bias=0.0,
    )


def rows() -> dict[str, Callable[[], Recipe]]:
    recipes: list[partial[Recipe]] = [
        partial(table3, data, model, epochs, rate)
        for data, groups in ROWS.items()
        for models, lengths, rate in groups
        for model in models
        for epochs in lengths
    ]
    recipes += [partial(augreg, "i21k", model, 300) for model in LEVELS["i21k"]]
    recipes += [partial(augreg, "i1k", model, 300) for model in LEVELS["i1k"]]
    return {make().name: make for make in recipes}


RECIPES: dict[str, Callable[[], Recipe]] = {"pretrain": pretrain, "plain": plain_vit, "flexi": flexi}
RECIPES |= {"masked": masked} | {"masked-imagenet": partial(masked, "imagenet")} | rows()
