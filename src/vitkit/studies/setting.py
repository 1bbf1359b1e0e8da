"""What the trials of a plan share: data, sizes and lengths; and the models and recipes that follow from it.

In miniature a model is a few layers wide enough for small images; at the paper's scale it is the paper's.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from vitkit.errors import Error
from vitkit.recipes import RECIPES
from vitkit.recipes import recipe as named
from vitkit.recipes.finetune import bit_beside
from vitkit.recipes.pretrain import representation
from vitkit.recipes.recipe import Recipe, override
from vitkit.recipes.values import ModelOptions
from vitkit.runs.protocol import candidates
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
TABLE_6 = {  # by family: models, and for how many epochs of JFT each was trained
    "ViT": (("ViT-B/32", (7,)), ("ViT-B/16", (7,)), ("ViT-L/32", (7,)), ("ViT-L/16", (7, 14)),
            ("ViT-H/14", (14,))),
    "ResNet": (("BiT-R50x1", (7,)), ("BiT-R101x1", (7,)), ("BiT-R50x2", (7,)), ("BiT-R152x1", (7,)),
               ("BiT-R152x2", (7, 14)), ("BiT-R200x3", (14,))),
    "hybrid": (("R50+ViT-B/32", (7,)), ("R50+ViT-B/16", (7,)), ("R50+ViT-L/32", (7,)),
               ("R50+ViT-L/16", (7, 14))),
}  # fmt: skip
PAPER = {family: tuple(model for model, _ in rows) for family, rows in TABLE_6.items()}
SETS = {"imagenet": 1_281_167, "i21k": 14_197_122, "jft": 303_000_000}  # images of the sets of Table 3
LIKE = {  # models without a row in a part of Table 3, and the nearest in compute that has one
    "ViT-b/32": ("ViT-B/32",), "ViT-H/14": ("ViT-L/16",),
    "Axial-ViT-B/16": ("ViT-B/16",), "Axial-ViT-B/32": ("ViT-B/32",),
    "R50+ViT-B/32": ("ViT-B/32",), "R50+ViT-B/16": ("ViT-B/16",),
    "R50+ViT-L/32": ("ViT-L/32",), "R50+ViT-L/16": ("ViT-L/16",),
    "AxialResNet-50": ("BiT-R50x1", "ViT-B/32"), "BiT-R50x1": ("ViT-B/32",), "BiT-R101x1": ("ViT-B/32",),
    "BiT-R50x2": ("ViT-L/32",), "BiT-R152x1": ("ViT-L/32",), "BiT-R152x2": ("ViT-L/16",),
    "BiT-R200x3": ("BiT-R152x2", "ViT-L/16"),
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
    sizes: tuple[int, ...] = ()  # images of every data set; empty: `images`
    rows: tuple[str, ...] = ()  # the part of Table 3 for each of them; empty: as a study chooses
    tuned_on: int = 0  # images of the downstream data set
    tuned_side: int = 0  # the median shorter side of these, in pixels
    changes: tuple[str, ...] = ()  # field=value for every recipe

    @property
    def paper(self) -> bool:
        return self.scale == "paper"


@dataclass(frozen=True)
class Arm:
    """A model that takes part: a name, and the fields in which it differs from the model of that name."""

    model: str
    options: ModelOptions = ModelOptions()

    def having(self, **options: Any) -> "Arm":
        """With some fields set, whatever was set before."""
        return Arm(self.model, self.options.having(**options))


def vit(s: Setting, size: int, patch: int = 0) -> Arm:
    """A plain ViT; sizes count up from 0."""
    if s.paper:
        return Arm(PAPER["ViT"][size])
    width, depth, heads, hidden = VITS[s.level + size]
    sizes = {"width": width, "depth": depth, "heads": heads, "hidden": hidden}
    return Arm(f"ViT-Ti/{patch or s.patch}", ModelOptions(sizes))


def resnet(s: Setting, size: int) -> Arm:
    if s.paper:
        return Arm(PAPER["ResNet"][size])
    blocks, width = RESNETS[s.level + size]
    return Arm("BiT-R50x1", ModelOptions(blocks=blocks, width=width))


def hybrid(s: Setting, size: int) -> Arm:
    """The ViT of that size on the feature map of a small ResNet, with as many tokens."""
    if s.paper:
        return Arm(PAPER["hybrid"][size])
    stages = (1,) * (s.patch // 4).bit_length()  # each but the first halves the map
    stem = {"stem.blocks": stages, "stem.width": 32}
    return Arm("R50+ViT-Ti/16", ModelOptions({**vit(s, size).options, **stem, "patch": 1}))


def members(s: Setting, family: str) -> list[tuple[str, Arm, int]]:
    """The models of a family by size: three miniatures, or the paper's with the epochs of Table 6."""
    if s.paper:
        rows = [(model, epochs) for model, lengths in TABLE_6[family] for epochs in lengths]
        return [(f"{model} {epochs}ep", Arm(model), epochs) for model, epochs in rows]
    make = {"ViT": vit, "ResNet": resnet, "hybrid": hybrid}[family]
    return [(name, make(s, size), 0) for size, name in enumerate(SIZES)]


def nearest_set(images: int) -> str:
    """The set of Table 3 whose number of images is nearest, by the logarithm."""
    return min(SETS, key=lambda name: abs(math.log(max(1, images) / SETS[name])))


def row_for(table: str, model: str) -> str:
    """The recipe of a model for a set of Table 3: its own row, or that of the nearest model that has one."""
    for near in (model, *LIKE.get(model, ())):
        if f"{table}.{near}" in RECIPES:
            return f"{table}.{near}"
    raise Error(f"Table 3 has no row for {model} on {table}, and none near it", code="study.value")


def pretraining(s: Setting, arm: Arm, seed: int, *, row: str = "", table: str = "", **changes: Any) -> Recipe:
    """From scratch, few-shot accuracy at the end.

    At the paper's scale by `row`, or by the row of Table 3 for the set `table`: JFT if nothing is given.
    """
    data: dict[str, Any] = {
        "data": s.data[0], "fewshot": s.downstream or s.data[0], "fewshot_when": "end", "draws": DRAWS,
        "seed": seed
    }  # fmt: skip
    if s.paper:
        published = named(row or row_for(table or (s.rows[0] if s.rows else "jft"), arm.model))
        options = published.model_options if row else representation(arm.model)
        kept = fitting(Arm(arm.model, options).having(**arm.options))
        dropout = {} if "ViT" in arm.model else {"dropout": 0.0}  # a ResNet has none
        made = replace(published, auto=(), model=arm.model, model_options=kept, **(dropout | data | changes))
        return override(made, s.changes)
    base = named("pretrain")
    made = replace(
        base, name="study", about="a miniature: Adam, weight decay 0.1, cosine decay, inception crops",
        auto=(), model=arm.model, model_options=arm.options, image_size=(s.pixels, s.pixels), batch=s.batch,
        length=Duration(steps=s.steps), schedule=schedule(RATE, s.steps),
        optimizer=replace(base.optimizer, moment="fp32"), evaluation_crop="squash",
        randaugment=(), mixup=0.0, evaluations=0, val=0.0, test=0.1,
    )  # fmt: skip
    return override(replace(made, **(data | changes)), s.changes)


def fitting(arm: Arm) -> ModelOptions:
    """Without a hidden layer in the head where tokens are averaged: there it is one layer."""
    pooled = arm.options.get("head") == "gap" or arm.model.startswith("Axial-")
    return arm.options.without("representation") if pooled else arm.options


def finetuning(s: Setting, seed: int, *, pixels: int = 0, **changes: Any) -> Recipe:
    """From the model of another trial, by Table 4: SGD, no weight decay, at a size of its own."""
    data: dict[str, Any] = {"data": s.downstream or s.data[0], "seed": seed}
    if s.paper:
        images = s.tuned_on
        row = named("imagenet" if images >= 500_000 else "cifar10" if images >= 20_000 else "pets")
        size = (pixels, pixels) if pixels else row.image_size
        return override(replace(row, auto=(), image_size=size, **(data | changes)), s.changes)
    side = pixels or s.pixels
    steps = max(1, round(TUNING * s.steps))
    made = replace(
        named("finetune"), name="study", auto=(), about="a miniature of Table 4", image_size=(side, side),
        batch=s.batch, length=Duration(steps=steps), schedule=schedule(TUNING_RATE, steps), evaluations=0,
        val=0.0,
    )  # fmt: skip
    return override(replace(made, **(data | changes)), s.changes)


def compared(s: Setting, arm: Arm, recipe: Recipe) -> dict[str, Recipe]:
    """What the protocol compares for a fine-tuning at the paper's scale: Table 4's rates and BiT's rule.

    A miniature is fine-tuned once, at one rate.
    """
    if not s.paper:
        return {}
    resnet = "ViT" not in arm.model
    bit = bit_beside(recipe, s.tuned_on, s.tuned_side**2) if resnet else None
    return candidates(recipe, convolutional=resnet or "+" in arm.model, bit=bit)


def schedule(rate: float, steps: int) -> Schedule:
    return Schedule(rate=rate, warmup=int(WARMUP * steps), decay="cosine")


def at_rate(recipe: Recipe, factor: float) -> Recipe:
    """The same with its rate multiplied."""
    return replace(recipe, schedule=replace(recipe.schedule, rate=recipe.schedule.rate * factor))


BIT_STAIRS = (10 / 40, 23 / 40, 30 / 40, 37 / 40)  # of BiT-L's 40 epochs, where the rate is divided by ten


def stochastic(recipe: Recipe, *, paper: bool = False) -> Recipe:
    """By stochastic gradient descent, as BiT pre-trains; in miniature with the recipe's own decay."""
    rate = 0.03 * recipe.batch / 256
    changed = replace(recipe.schedule, rate=rate, floor=min(recipe.schedule.floor, rate))
    if paper:
        changed = Schedule(rate=rate, warmup=5000, decay="stairs", stairs=BIT_STAIRS)
    return replace(
        recipe, schedule=changed,
        optimizer=OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=1e-4, clip=recipe.optimizer.clip),
    )  # fmt: skip
