"""What the trials of a plan share: data, sizes and lengths; and the models and recipes that follow from it.

In miniature a model is a few layers wide enough for small images; at the paper's scale it is the paper's.
"""

from dataclasses import dataclass, replace
from typing import Any

from vitkit.recipes import RECIPES
from vitkit.recipes import recipe as named
from vitkit.recipes.recipe import Recipe, override
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

SIZES = ("small", "medium", "large")
VITS = (  # (width, depth, heads, hidden) of the miniatures, from small to large
    (64, 3, 2, 128), (96, 4, 3, 192), (128, 6, 4, 256),
    (192, 8, 6, 384), (256, 10, 8, 768), (384, 12, 6, 1536),
)  # fmt: skip
RESNETS = (  # (blocks, width); at most as deep as an image of 32 pixels allows
    ((1, 1), 32), ((1, 1, 1), 32), ((2, 2, 2), 32), ((2, 2, 2), 64), ((3, 4, 3), 64), ((3, 4, 6), 96),
)  # fmt: skip
LEVELS = len(VITS) - len(SIZES) + 1  # how far the three sizes may be moved up
PAPER = {  # Table 6, by family
    "ViT": ("ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16", "ViT-H/14"),
    "ResNet": ("BiT-R50x1", "BiT-R101x1", "BiT-R50x2", "BiT-R152x1", "BiT-R152x2", "BiT-R200x3"),
    "hybrid": ("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
}
LIKE = {  # models without a row in Table 3, and the row of the nearest
    "ViT-b/32": "ViT-B/32", "BiT-R200x3": "BiT-R152x2",
    "Axial-ViT-B/16": "ViT-B/16", "Axial-ViT-B/32": "ViT-B/32", "AxialResNet-50": "BiT-R50x1",
}  # fmt: skip
RATE, TUNING_RATE = 1e-3, 0.01  # of the miniatures
TUNING = 0.3  # length of a fine-tuning as a share of the pre-training
WARMUP = 0.1  # share of the steps
DRAWS = 10  # of few-shot images: fewer leave a point of doubt, as much as most differences


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is made for."""

    data: tuple[str, ...]
    downstream: str
    seeds: int = 3
    scale: str = "mini"  # or paper
    pixels: int = 32
    patch: int = 4
    batch: int = 256
    steps: int = 1000  # of a pre-training in miniature
    level: int = 0  # how far the sizes are moved up in the tables above
    images: int = 0  # of the first data set, to train on
    tuned_on: int = 0  # images of the downstream data set
    changes: tuple[str, ...] = ()  # field=value for every recipe

    @property
    def paper(self) -> bool:
        return self.scale == "paper"


@dataclass(frozen=True)
class Arm:
    """A model that takes part: a name, and the fields in which it differs from the model of that name."""

    model: str
    options: tuple[str, ...] = ()

    def having(self, *options: str) -> "Arm":
        """With some fields set, whatever was set before."""
        given = {option.partition("=")[0] for option in options}
        kept = tuple(option for option in self.options if option.partition("=")[0] not in given)
        return Arm(self.model, kept + options)


def vit(s: Setting, size: int, patch: int = 0) -> Arm:
    """A plain ViT; sizes count up from 0."""
    if s.paper:
        return Arm(PAPER["ViT"][size])
    width, depth, heads, hidden = VITS[s.level + size]
    sizes = {"width": width, "depth": depth, "heads": heads, "hidden": hidden}
    return Arm(f"ViT-Ti/{patch or s.patch}", tuple(f"{name}={value}" for name, value in sizes.items()))


def resnet(s: Setting, size: int) -> Arm:
    if s.paper:
        return Arm(PAPER["ResNet"][size])
    blocks, width = RESNETS[s.level + size]
    return Arm("BiT-R50x1", (f"blocks={','.join(map(str, blocks))}", f"width={width}"))


def hybrid(s: Setting, size: int) -> Arm:
    """The ViT of that size on the feature map of a small ResNet, with as many tokens."""
    if s.paper:
        return Arm(PAPER["hybrid"][size])
    stages = ",".join("1" for _ in range((s.patch // 4).bit_length()))  # each but the first halves the map
    plain = vit(s, size)
    return Arm("R50+ViT-Ti/16", (*plain.options, f"stem.blocks={stages}", "stem.width=32", "patch=1"))


def members(s: Setting, family: str) -> list[tuple[str, Arm]]:
    """The models of a family by size: three miniatures, or the paper's."""
    make = {"ViT": vit, "ResNet": resnet, "hybrid": hybrid}[family]
    names = list(SIZES)
    if s.paper:
        others = PAPER[family][1:]
        names = ["small", *others[:-2], "medium", "large"]
    return [(name, make(s, size)) for size, name in enumerate(names)]


def pretraining(s: Setting, arm: Arm, seed: int, *, row: str = "", **changes: Any) -> Recipe:
    """From scratch, few-shot accuracy at the end; at the paper's scale by `row`, or Table 3's for JFT."""
    data: dict[str, Any] = {
        "data": s.data[0], "fewshot": s.downstream or s.data[0], "fewshot_when": "end", "draws": DRAWS,
        "seed": seed
    }  # fmt: skip
    if s.paper:
        near = arm.model if f"jft.{arm.model}" in RECIPES else LIKE.get(arm.model, "")
        published = named(row or f"jft.{near}")
        kept = Arm(arm.model, published.model_options).having(*arm.options)
        made = replace(published, model=arm.model, model_options=fitting(kept), **(data | changes))
        return override(made, s.changes)
    base = named("pretrain")
    made = replace(
        base, name="study", about="a miniature: Adam, weight decay 0.1, cosine decay, inception crops",
        model=arm.model, model_options=arm.options, image_size=(s.pixels, s.pixels), batch=s.batch,
        length=Duration(steps=s.steps), schedule=schedule(RATE, s.steps),
        optimizer=replace(base.optimizer, moment="fp32"), evaluation_crop="squash",
        randaugment=(), mixup=0.0, evaluations=0, val=0.0, test=0.1,
    )  # fmt: skip
    return override(replace(made, **(data | changes)), s.changes)


def fitting(arm: Arm) -> tuple[str, ...]:
    """Without a hidden layer in the head where tokens are averaged: there it is one layer."""
    pooled = "head=gap" in arm.options or arm.model.startswith("Axial-")
    return tuple(o for o in arm.options if not (pooled and o.startswith("representation=")))


def finetuning(s: Setting, seed: int, *, pixels: int = 0, **changes: Any) -> Recipe:
    """From the model of another trial, by Table 4: SGD, no weight decay, at a size of its own."""
    data: dict[str, Any] = {"data": s.downstream or s.data[0], "seed": seed}
    if s.paper:
        images = s.tuned_on
        row = named("imagenet" if images >= 500_000 else "cifar10" if images >= 20_000 else "pets")
        size = (pixels, pixels) if pixels else row.image_size
        return override(replace(row, image_size=size, **(data | changes)), s.changes)
    side = pixels or s.pixels
    steps = max(1, round(TUNING * s.steps))
    made = replace(
        named("finetune"), name="study", about="a miniature of Table 4", image_size=(side, side),
        batch=s.batch, length=Duration(steps=steps), schedule=schedule(TUNING_RATE, steps), evaluations=0,
        val=0.0,
    )  # fmt: skip
    return override(replace(made, **(data | changes)), s.changes)


def schedule(rate: float, steps: int) -> Schedule:
    return Schedule(rate=rate, warmup=int(WARMUP * steps), decay="cosine")


def at_rate(recipe: Recipe, factor: float) -> Recipe:
    """The same with its rate multiplied."""
    return replace(recipe, schedule=replace(recipe.schedule, rate=recipe.schedule.rate * factor))


def stochastic(recipe: Recipe) -> Recipe:
    """By stochastic gradient descent, as BiT pre-trains."""
    rate = 0.03 * recipe.batch / 256
    return replace(
        recipe, schedule=replace(recipe.schedule, rate=rate, floor=min(recipe.schedule.floor, rate)),
        optimizer=OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=1e-4, clip=recipe.optimizer.clip),
    )  # fmt: skip
