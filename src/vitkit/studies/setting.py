"""The setting that all trials of a plan share (data, sizes, lengths), and its models and recipes.

Miniatures are small models for small images; at the paper's scale models and recipes are the paper's.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from vitkit.errors import Error
from vitkit.recipes import RECIPES
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.finetune import bit_beside
from vitkit.recipes.pretrain import representation
from vitkit.recipes.recipe import Recipe, override
from vitkit.recipes.values import ModelOptions
from vitkit.runs.protocol import candidates
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

SIZES = ("small", "medium", "large")
LARGEST = "largest"  # a fourth size, whose score a study predicts from the others
VITS = (  # (width, depth, heads, hidden) of miniatures, from small to large
    (64, 3, 2, 128), (96, 4, 3, 192), (128, 6, 4, 256),
    (192, 8, 6, 384), (256, 10, 8, 768), (384, 12, 6, 1536), (512, 12, 8, 2048),
)  # fmt: skip
RESNETS = (  # (blocks, width) of miniatures; deeper ones would not fit 32-pixel images
    ((1, 1), 32), ((1, 1, 1), 32), ((2, 2, 2), 32), ((2, 2, 2), 64), ((3, 4, 3), 64), ((3, 4, 6), 96),
    ((3, 4, 6), 128),
)  # fmt: skip
LEVELS = len(VITS) - len(SIZES)  # values of --size: where the four sizes begin
TABLE_6 = {  # family: models with their JFT epochs
    "ViT": (("ViT-B/32", (7,)), ("ViT-B/16", (7,)), ("ViT-L/32", (7,)), ("ViT-L/16", (7, 14)),
            ("ViT-H/14", (14,))),
    "ResNet": (("BiT-R50x1", (7,)), ("BiT-R101x1", (7,)), ("BiT-R50x2", (7,)), ("BiT-R152x1", (7,)),
               ("BiT-R152x2", (7, 14)), ("BiT-R200x3", (14,))),
    "hybrid": (("R50+ViT-B/32", (7,)), ("R50+ViT-B/16", (7,)), ("R50+ViT-L/32", (7,)),
               ("R50+ViT-L/16", (7, 14))),
}  # fmt: skip
PAPER = {family: tuple(model for model, _ in rows) for family, rows in TABLE_6.items()}
SETS = {"imagenet": 1_281_167, "i21k": 14_197_122, "jft": 303_000_000}  # images in the data sets of Table 3
SIMILAR = {  # for models that lack a row of Table 3: the models nearest in compute
    "ViT-b/32": ("ViT-B/32",), "ViT-H/14": ("ViT-L/16",),
    "Axial-ViT-B/16": ("ViT-B/16",), "Axial-ViT-B/32": ("ViT-B/32",),
    "R50+ViT-B/32": ("ViT-B/32",), "R50+ViT-B/16": ("ViT-B/16",),
    "R50+ViT-L/32": ("ViT-L/32",), "R50+ViT-L/16": ("ViT-L/16",),
    "AxialResNet-50": ("BiT-R50x1", "ViT-B/32"), "BiT-R50x1": ("ViT-B/32",), "BiT-R101x1": ("ViT-B/32",),
    "BiT-R50x2": ("ViT-L/32",), "BiT-R152x1": ("ViT-L/32",), "BiT-R152x2": ("ViT-L/16",),
    "BiT-R200x3": ("BiT-R152x2", "ViT-L/16"),
}  # fmt: skip
RATE, FINETUNING_RATE = 1e-3, 0.01  # learning rates of miniatures
FINETUNING_LENGTH = 0.3  # as a share of the pre-training steps
WARMUP = 0.1  # share of the steps
DRAWS = 10  # few-shot draws: with fewer, the error is about one point, as large as most differences


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The data and sizes that a plan is made for."""

    data: tuple[str, ...]
    downstream: str
    seeds: int = 3
    scale: str = "mini"  # or paper
    pixels: int = 32
    patch: int = 4
    batch: int = 256
    steps: int = 1000  # pre-training steps of a miniature
    level: int = 0  # index of the smallest size in the tables above
    images: int = 0  # training images of the first data set
    sizes: tuple[int, ...] = ()  # training images of each data set; empty: only `images`
    rows: tuple[str, ...] = ()  # the set of Table 3 for each data set; empty: the study chooses
    downstream_images: int = 0  # training images of the downstream data set
    downstream_side: int = 0  # median shorter side of these in pixels
    changes: tuple[str, ...] = ()  # field=value overrides of every recipe
    weights: str = ""  # pretrained ones: to fine-tune in a study of recipes, or a teacher

    @property
    def paper(self) -> bool:
        return self.scale == "paper"


@dataclass(frozen=True)
class Arm:
    """A model variant in a comparison: a model name and the options that override its configuration."""

    model: str
    options: ModelOptions = ModelOptions()

    def having(self, **options: Any) -> "Arm":
        """A copy with some options overridden."""
        return Arm(self.model, self.options.having(**options))


def vit(s: Setting, size: int, patch: int = 0) -> Arm:
    """A ViT; `size` is an index from 0, the smallest."""
    if s.paper:
        return Arm(PAPER["ViT"][size])
    width, depth, heads, hidden = VITS[s.level + size]
    options = {"width": width, "depth": depth, "heads": heads, "hidden": hidden}
    return Arm(f"ViT-Ti/{patch or s.patch}", ModelOptions(options))


def resnet(s: Setting, size: int) -> Arm:
    if s.paper:
        return Arm(PAPER["ResNet"][size])
    blocks, width = RESNETS[s.level + size]
    return Arm("BiT-R50x1", ModelOptions(blocks=blocks, width=width))


def hybrid(s: Setting, size: int) -> Arm:
    """The ViT of that size on the feature map of a small ResNet, with the same number of tokens."""
    if s.paper:
        return Arm(PAPER["hybrid"][size])
    stages = (1,) * (s.patch // 4).bit_length()  # each stage after the first halves the feature map
    stem = {"stem.blocks": stages, "stem.width": 32}
    return Arm("R50+ViT-Ti/16", ModelOptions({**vit(s, size).options, **stem, "patch": 1}))


def members(s: Setting, family: str) -> list[tuple[str, Arm, int]]:
    """(size name, model, epochs) of a family: four miniatures (0 epochs), or the rows of Table 6."""
    if s.paper:
        rows = [(model, epochs) for model, lengths in TABLE_6[family] for epochs in lengths]
        return [(f"{model} {epochs}ep", Arm(model), epochs) for model, epochs in rows]
    make = {"ViT": vit, "ResNet": resnet, "hybrid": hybrid}[family]
    return [(name, make(s, size), 0) for size, name in enumerate((*SIZES, LARGEST))]


def nearest_set(images: int) -> str:
    """The data set of Table 3 that is nearest in size, on a log scale."""
    return min(SETS, key=lambda name: abs(math.log(max(1, images) / SETS[name])))


def row_for(table: str, model: str) -> str:
    """The recipe name for a model and a data set of Table 3: its own row or that of a similar model."""
    for name in (model, *SIMILAR.get(model, ())):
        if f"{table}.{name}" in RECIPES:
            return f"{table}.{name}"
    raise Error(f"Table 3 has no row for {model} or a similar model on {table}", code="study.value")


def pretraining(s: Setting, arm: Arm, seed: int, *, row: str = "", table: str = "", **changes: Any) -> Recipe:
    """The recipe of a pre-training from scratch, with few-shot evaluation at the end.

    At the paper's scale it is the recipe `row`, or the model's row of Table 3 for the set `table` or JFT.
    """
    data: dict[str, Any] = {
        "data": s.data[0], "fewshot": s.downstream or s.data[0], "fewshot_when": "end", "draws": DRAWS,
        "seed": seed
    }  # fmt: skip
    if s.paper:
        published = named_recipe(row or row_for(table or (s.rows[0] if s.rows else "jft"), arm.model))
        options = published.model_options if row else representation(arm.model)
        options = valid_options(Arm(arm.model, options).having(**arm.options))
        dropout = {} if "ViT" in arm.model else {"dropout": 0.0}  # ResNets have no dropout
        fields = dropout | data | changes
        recipe = replace(published, auto=(), model=arm.model, model_options=options, **fields)
        return override(recipe, s.changes)
    base = named_recipe("pretrain")
    recipe = replace(
        base, name="study", about="a miniature: Adam, weight decay 0.1, cosine decay, inception crops",
        auto=(), model=arm.model, model_options=arm.options, image_size=(s.pixels, s.pixels), batch=s.batch,
        length=Duration(steps=s.steps), schedule=schedule(RATE, s.steps),
        optimizer=replace(base.optimizer, moment="fp32"), evaluation_crop="squash",
        randaugment=(), mixup=0.0, evaluations=0, val=0.0, test=0.1,
    )  # fmt: skip
    return override(replace(recipe, **(data | changes)), s.changes)


def valid_options(arm: Arm) -> ModelOptions:
    """The options of a model, without the head's hidden layer for models that average their tokens."""
    pooled = arm.options.get("head") == "gap" or arm.model.startswith("Axial-")
    return arm.options.without("representation") if pooled else arm.options


def finetuning(s: Setting, seed: int, *, pixels: int = 0, **changes: Any) -> Recipe:
    """The recipe of a fine-tuning of another trial's model by Table 4: SGD without weight decay."""
    data: dict[str, Any] = {"data": s.downstream or s.data[0], "seed": seed}
    if s.paper:
        images = s.downstream_images
        row = named_recipe("imagenet" if images >= 500_000 else "cifar10" if images >= 20_000 else "pets")
        size = (pixels, pixels) if pixels else row.image_size
        return override(replace(row, auto=(), image_size=size, **(data | changes)), s.changes)
    side = pixels or s.pixels
    steps = max(1, round(FINETUNING_LENGTH * s.steps))
    recipe = replace(
        named_recipe("table4"), name="study", auto=(), about="a miniature of Table 4",
        image_size=(side, side), batch=s.batch, length=Duration(steps=steps),
        schedule=schedule(FINETUNING_RATE, steps), evaluations=0, val=0.0,
    )  # fmt: skip
    return override(replace(recipe, **(data | changes)), s.changes)


def finetuning_candidates(s: Setting, arm: Arm, recipe: Recipe) -> dict[str, Recipe]:
    """The recipes that the protocol compares at the paper's scale: Table 4's rates and BiT's rule.

    A miniature is fine-tuned once, at one rate, and has no candidates.
    """
    if not s.paper:
        return {}
    resnet = "ViT" not in arm.model
    bit = bit_beside(recipe, s.downstream_images, s.downstream_side**2) if resnet else None
    return candidates(recipe, convolutional=resnet or "+" in arm.model, bit=bit)


def schedule(rate: float, steps: int) -> Schedule:
    return Schedule(rate=rate, warmup=int(WARMUP * steps), decay="cosine")


def scaled_rate(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with its learning rate multiplied by a factor."""
    return replace(recipe, schedule=replace(recipe.schedule, rate=recipe.schedule.rate * factor))


BIT_STAIRS = (10 / 40, 23 / 40, 30 / 40, 37 / 40)  # of 40 epochs, where BiT-L divides its rate by ten


def with_sgd(recipe: Recipe, *, paper: bool = False) -> Recipe:
    """The recipe with SGD as in BiT's pre-training; miniatures keep their own schedule."""
    rate = 0.03 * recipe.batch / 256
    schedule = replace(recipe.schedule, rate=rate, floor=min(recipe.schedule.floor, rate))
    if paper:
        schedule = Schedule(rate=rate, warmup=5000, decay="stairs", stairs=BIT_STAIRS)
    return replace(
        recipe, schedule=schedule,
        optimizer=OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=1e-4, clip=recipe.optimizer.clip),
    )  # fmt: skip
