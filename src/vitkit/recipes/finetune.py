"""Fine-tuning recipes of the paper (Table 4, ImageNet of Table 2), BiT's HyperRule, and a default."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from vitkit.recipes.recipe import Recipe
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

TABLE_4 = (
    "Table 4: SGD, momentum 0.9, batch 512, cosine decay, no weight decay, clipping at norm 1, 384 pixels"
)
RATES = (0.001, 0.003, 0.01, 0.03)


def paper(
    name: str,
    steps: int,
    warmup: int,
    rate: float,
    held_out: float,
    rates: tuple[float, ...] = RATES,
    convolution_rates: tuple[float, ...] = (),
) -> Recipe:
    return Recipe(
        name=name,
        about=TABLE_4,
        auto=("weights",),
        length=Duration(steps=steps),
        schedule=Schedule(rate=rate, warmup=warmup, decay="cosine"),
        rates=rates,
        convolution_rates=convolution_rates,
        optimizer=OptimizerConfig(kind="sgd", momentum=0.9, clip=1.0),
        val=held_out,
    )


def imagenet() -> Recipe:
    """Table 4, ImageNet: 20,000 steps; rates 0.003, 0.01, 0.03 (0.06 too for ResNets and hybrids)."""
    return paper("imagenet", 20_000, 500, 0.03, 0.01, (0.003, 0.01, 0.03), (0.06,))


TABLE_2 = {"ViT-L/16": 512, "ViT-H/14": 518}  # pixels of the ImageNet row


def table2(model: str) -> Recipe:
    """Table 2, ImageNet: Table 4's row at a higher resolution, with Polyak averaging at 0.9999."""
    r, pixels = imagenet(), TABLE_2[model]
    return replace(
        r,
        name=f"table2.{model}",
        about=f"Table 2, ImageNet from {model}: Table 4's row at {pixels} pixels, Polyak averaging 0.9999",
        image_size=(pixels, pixels),
        optimizer=replace(r.optimizer, average=0.9999),
    )


def cifar100() -> Recipe:
    """Table 4, CIFAR-100: 10,000 steps; rates 0.001, 0.003, 0.01, 0.03."""
    return paper("cifar100", 10_000, 500, 0.03, 0.02)


def cifar10() -> Recipe:
    """Table 4, CIFAR-10: 10,000 steps; rates 0.001, 0.003, 0.01, 0.03."""
    return paper("cifar10", 10_000, 500, 0.03, 0.02)


def pets() -> Recipe:
    """Table 4, Oxford-IIIT Pets: 500 steps; rates 0.001, 0.003, 0.01, 0.03."""
    return paper("pets", 500, 100, 0.03, 0.1)


def flowers() -> Recipe:
    """Table 4, Oxford Flowers-102: 500 steps; rates 0.001, 0.003, 0.01, 0.03."""
    return paper("flowers", 500, 100, 0.03, 0.1)


def vtab() -> Recipe:
    """Table 4, VTAB: 2,500 steps at rate 0.01 for all of the 19 tasks."""
    return paper("vtab", 2_500, 200, 0.01, 0.2, (0.01,))


def bit() -> Recipe:
    """BiT's HyperRule; its length, Mixup and size follow from the data (`hyperrule`)."""
    return replace(
        paper("bit", 10_000, 500, 0.003, 0.02, (0.003,)),
        about="BiT HyperRule: SGD, momentum 0.9, batch 512, rate / 10 at 30, 60 and 90 %, MixUp 0.1",
        auto=("weights", "hyperrule"),
        schedule=Schedule(rate=0.003, warmup=500, decay="stairs", stairs=(0.3, 0.6, 0.9)),
        optimizer=OptimizerConfig(kind="sgd", momentum=0.9, clip=0.0),
        crop="squash-random",
        resize=448,
        mixup=0.1,
    )


RULED = ("image_size", "resize", "length", "schedule", "mixup")  # fields that BiT's rule sets
SHARED = (  # fields that two recipes for the same data and model have in common
    "data", "corrections", "weights", "model", "model_options", "keep_representation", "pooling",
    "against", "subset",
    "batch", "micro_batch", "train", "evaluation_crop", "evaluations", "val", "test", "seed",
)  # fmt: skip


def hyperrule(recipe: Recipe, images: int, pixels: int, fixed: Collection[str] = ()) -> Recipe:
    """BiT's rule for a number of training images and their median number of pixels.

    Fields in `fixed` stay as they are; warm-up and resizing scale with a fixed length and size.
    """
    steps = 500 if images < 20_000 else 10_000 if images < 500_000 else 20_000
    side, resize = (128, 160) if pixels < 96 * 96 else (384, 448)
    ruled = replace(recipe, length=Duration(steps=steps), image_size=(side, side), resize=resize)
    if steps == 500:  # the rate falls after 200, 300 and 400
        schedule = replace(recipe.schedule, warmup=100, stairs=(0.4, 0.6, 0.8))
        ruled = replace(ruled, schedule=schedule, mixup=0.0)
    result = replace(ruled, **{field: getattr(recipe, field) for field in RULED if field in fixed})
    if "length" in fixed and "schedule" not in fixed:
        share = result.length.in_steps(images, result.batch) / steps
        warmup = round(ruled.schedule.warmup * share)
        result = replace(result, schedule=replace(result.schedule, warmup=warmup))
    if "image_size" in fixed and "resize" not in fixed:
        result = replace(result, resize=round(max(result.image_size) * resize / side))
    return result


def bit_beside(recipe: Recipe, images: int, pixels: int, fixed: Collection[str] = ()) -> Recipe:
    """BiT's rule for the data, model and dev split of another recipe; the user has set `fixed`."""
    shared = {*SHARED, *fixed} - {
        "schedule",
        "optimizer",
        "rates",
        "convolution_rates",
        "crop",
        "resize",
    }
    start = replace(bit(), **{field: getattr(recipe, field) for field in shared})
    return replace(hyperrule(start, images, pixels, shared), auto=())


def finetune() -> Recipe:
    """What `vitkit finetune` starts from; planning/finetune_rules.py chooses the rest by the data."""
    return replace(
        table4(),
        name="finetune",
        about="AdamW with layer decay, Mixup 0.2, smoothing 0.1, crops of 30 % of the area or more, averaged "
        "weights; batch, rate and length by the data",
        auto=("weights", "image_size", "rules", "keep"),
        schedule=Schedule(rate=5e-4, warmup=50, decay="cosine"),
        rates=(1e-4, 2e-4, 5e-4, 1e-3),
        optimizer=OptimizerConfig(kind="adam", weight_decay=0.05, layer_decay=0.75, clip=1.0),
        crop="resized",
        crop_area=0.3,
        mixup=0.2,
        label_smoothing=0.1,
        val=0.05,
        val_images=(20, 500),
        keep_margin=0.5,
    )


def table4() -> Recipe:
    """Table 4's optimizer with a batch and a length for one machine and its data."""
    return replace(
        paper("table4", 500, 50, 0.01, 0.1),
        about="Table 4's optimizer; batch, resolution and length as this machine and data allow",
        auto=("weights", "image_size", "batch", "length", "keep", "patience"),
        image_size=(224, 224),
        batch=64,
    )


def lora() -> Recipe:
    """What `vitkit finetune --train lora` starts from: adapters need Adam and a higher rate than weights."""
    return replace(
        table4(),
        name="lora",
        about="LoRA of rank 8 on queries and values, alpha 16: Adam, no weight decay, clipping at norm 1",
        train="lora",
        schedule=Schedule(rate=1e-3, warmup=50, decay="cosine"),
        rates=(3e-4, 1e-3, 3e-3, 1e-2),
        optimizer=OptimizerConfig(kind="adam", clip=1.0),
    )


def scratch() -> Recipe:
    """Small data from scratch: Adam with weight decay, as the paper pre-trains, sized for one machine."""
    return replace(
        table4(),
        name="scratch",
        about="Adam, betas 0.9 and 0.999, weight decay 0.1, warm-up, cosine decay, clipping at norm 1",
        auto=("weights", "keep", "patience"),
        length=Duration(epochs=30),
        schedule=Schedule(rate=1e-3, warmup=50, decay="cosine"),
        optimizer=OptimizerConfig(kind="adam", weight_decay=0.1, clip=1.0),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    f.__name__: f
    for f in (finetune, table4, lora, scratch, imagenet, cifar100, cifar10, pets, flowers, vtab, bit)
}
RECIPES |= {f"table2.{model}": partial(table2, model) for model in TABLE_2}
