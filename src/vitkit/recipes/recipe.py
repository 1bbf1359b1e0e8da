"""A Recipe: one experiment as a frozen value, with overrides by name and a JSON round trip."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitkit.data.folds import parse_fold
from vitkit.data.views import AREA, CROPS, METHODS
from vitkit.errors import Error
from vitkit.flat_recipe import settings_of
from vitkit.models.card import short_repr
from vitkit.models.lora import LoRA
from vitkit.options import parse_train, part_of
from vitkit.recipes import values
from vitkit.recipes.values import (
    GROUPED,
    SYNONYMS,
    ModelOptions,
    TaskOptions,
    build,
    checked,
    name_and_text,
    own_name,
    shown,
    ungrouped,
    unknown,
)
from vitkit.tasks.classify import CLASS_WEIGHTS, LOSSES
from vitkit.tasks.task import Task, make_task, option_names, task_names
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule, Stage, check_ranges, parse_stages, stages

LARGEST = 2**20  # bytes of a recipe file
# of recipe files: 1 (vitkit 0.1) has no version field, and model options as a list of texts; up to 2 a model
# has a class token with every head
VERSION = 3
OTHER_VALUES = {  # values by the names that others use: adam has AdamW's decoupled weight decay
    ("optimizer.kind", "adamw"): "adam",
    ("crop", "center"): "centre", ("evaluation_crop", "center"): "centre",
}  # fmt: skip
AUTO = {  # settings that may be chosen for a machine and its data
    "weights": "published ones for this kind of device, if neither weights nor a model are given",
    "image_size": "by the size of the images",
    "batch": "by the number of images",
    "length": "by the number of images, with the warm-up",
    "keep": "the best weights, if there are validation images",
    "patience": "early stopping, if there are validation images",
    "rules": "batch, rate and length by the data, SGD for a ResNet, a fitted head for a few images",
    "pretraining": "model, image size, batch, rate and length by the images and the device (pretrain --task)",
    "dense": "image size, batch, rate and length by the images and the device (segmentation and detection)",
    "hyperrule": "size, length, schedule and Mixup by BiT's HyperRule",
}
CHOICES = {
    "train_on": ("train", "train+val"), "report_on": ("test", "val"),
    "crop": tuple(CROPS), "loss": LOSSES, "evaluation_crop": ("squash", "fit", "centre"),
    "fewshot_when": ("evaluations", "end"), "keep": ("auto", "best", "last"),
    "interpolation": METHODS, "sampling": ("shuffled", "balanced"), "class_weights": CLASS_WEIGHTS,
    "head_init": ("zero", "least-squares"), "pooling": ("model", "mean"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete description of one fine-tuning or training run: nothing else decides its result."""

    name: str  # of the recipe
    about: str = ""  # a description, with the source of its values
    auto: tuple[str, ...] = field(default=(), compare=False)  # settings that may be chosen: names of AUTO

    data: str = ""  # the training data
    corrections: str = ""  # a table of images to leave out or relabel, as vitkit doctor --model writes it
    weights: str = ""  # pretrained weights: a file or a published name; empty: from scratch
    model: str = ""  # the model to train from scratch
    model_options: ModelOptions = ModelOptions()  # fields of that model
    keep_representation: bool = False  # replace only the last layer of the head
    pooling: str = "model"  # of pretrained weights: as they have it; mean: of the patches, before a new norm
    against: tuple[str, ...] = ()  # data sets whose images and near-duplicates are removed from train
    subset: str = ""  # of train: 1000 (images), 10%, 25/class or imbalanced=100; larger contain smaller ones
    label_noise: float = 0.0  # share of training labels to replace by a random other class, for experiments
    split_of: str = ""  # a run folder whose splits are used
    train_on: str = "train"  # or train+val
    fold: str = ""  # 2/5: val is the second of five folds of train and val; empty: no cross-validation
    report_on: str = "test"  # or val

    image_size: tuple[int, int] = (384, 384)  # height and width in pixels
    patch_sizes: tuple[int, ...] = ()  # each step draws one of them (FlexiViT); empty: the model's own
    crop: str = "inception"  # how training images are cropped
    crop_area: float = AREA  # smallest share of the area of inception and resized crops
    resize: int = 0  # size before random and squash-random crops; 0: 256 / 224 of image_size
    interpolation: str = "bilinear"  # in training and in evaluation
    flip: bool = True  # random horizontal flips
    three_augment: bool = False  # 3-Augment of DeiT III: grayscale, solarization or blur
    color_jitter: float = 0.0  # strength of random brightness, contrast and saturation; 0: none
    randaugment: tuple[int, ...] = ()  # (layers, magnitude)
    erasing: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # alpha of Mixup; 0: none
    cutmix: float = 0.0  # alpha of CutMix; 0: none. With both, each batch uses one of them
    evaluation_crop: str = "squash"  # how validation and test images are resized

    batch: int = 512  # global batch size
    micro_batch: int = 0  # images in memory at a time; 0: the whole batch
    length: Duration = Duration(steps=10_000)
    more_steps: tuple[str, ...] = ()  # continued training: 40+20 is 20 more steps after step 40
    schedule: Schedule = Schedule(rate=0.03, warmup=500)
    rates: tuple[float, ...] = ()  # learning rates that --protocol compares
    convolution_rates: tuple[float, ...] = ()  # further learning rates for ResNets and hybrids
    optimizer: OptimizerConfig = OptimizerConfig()
    train: str = "all"  # or head, last-N (the last N blocks, final norm and head), lora (adapters and head)
    lora: LoRA = LoRA()  # settings of train=lora
    objective: str = "classify"  # the task, as --task names it
    task_options: TaskOptions = TaskOptions()  # settings of the task, as in masked.rate=0.15
    loss: str = "softmax"
    label_smoothing: float = 0.0  # 0: none
    sampling: str = "shuffled"  # balanced: every class equally often
    class_weights: str = "none"  # weights in the loss; balanced: inverse to the number of images of a class
    head_init: str = "zero"  # least-squares: start from a ridge classifier on the frozen features
    head_bias: float = 0.0  # initial bias of a new head; -10 for a sigmoid over many classes
    dropout: float = 0.0  # rate; 0: none
    stochastic_depth: float = 0.0  # rate of the last layer; 0: none

    val: float = 0.1  # share of train for validation, if the data has no val split
    val_images: tuple[int, ...] = ()  # fewest and most images of val; fewer, or than classes: none
    test: float = 0.1  # share of train for testing, if the data has no test split
    evaluations: int = 10  # number of validations, at regular intervals
    fewshot: str = ""  # data for few-shot accuracy at each evaluation; empty: none, or own labels; none: off
    shots: int = 5  # images per class for few-shot accuracy
    draws: int = 3  # random draws of these images; the mean is reported
    fewshot_when: str = "evaluations"  # measure at every evaluation and at the end, or only at the end
    patience: int = 0  # early stopping after this many evaluations without improvement; 0: never
    keep: str = "auto"  # best weights on val, or last; auto: best if patience is set
    keep_margin: float = 0.0  # standard errors on val by which the best must exceed the last to be kept
    calibrate: bool = False  # temperature scaling on val at the end, stored in the head
    seed: int = 0  # random seed

    def __repr__(self) -> str:
        return short_repr(self, Recipe(name=self.name), ("name",))

    def __post_init__(self):
        if not isinstance(self.model_options, ModelOptions):
            object.__setattr__(self, "model_options", ModelOptions.of(self.model_options))
        if not isinstance(self.task_options, TaskOptions):
            object.__setattr__(self, "task_options", TaskOptions.of(self.task_options))
        checked(check_ranges, self)
        check_choices(self)
        if len(self.image_size) != 2:
            raise refusal(f"image_size must be a height and a width, not {commas(self.image_size)}")
        if self.patch_sizes and max(self.patch_sizes) > min(self.image_size):
            raise refusal(
                f"patch_sizes must not exceed image_size {commas(self.image_size)}: "
                f"{commas(self.patch_sizes)}"
            )
        if self.val_images and (len(self.val_images) != 2 or self.val_images[0] > self.val_images[1]):
            raise refusal(
                "val_images must be the fewest and the most images as in 20,500, or empty, not "
                f"{commas(self.val_images)}"
            )
        if len(self.randaugment) not in (0, 2):
            raise refusal(
                f"randaugment must be layers,magnitude as in 2,10, or empty, not {commas(self.randaugment)}"
            )
        if self.train_on == "train+val" and (self.report_on == "val" or self.patience or self.keeps_best):
            raise refusal(
                "with train_on=train+val there is no val for early stopping, the best weights or a report"
            )
        check_form(parse_train, self.train)
        if self.train != "lora" and self.lora != LoRA():
            raise refusal(f"train={self.train} does not use lora; leave it out, or set train=lora")
        check_pooling(self)
        if self.fold:
            checked(parse_fold, self.fold)
        check_unused(self)
        check_form(part_of, self.subset)
        checked(parse_stages, self.more_steps)

    @property
    def task(self) -> Task:
        """The task, with its own settings."""
        own = {name.partition(".")[2]: value for name, value in self.task_options.items()}
        return make_task(self.objective, vars(self) | own)

    @property
    def keeps_best(self) -> bool:
        """Whether the run keeps the best weights on val instead of the last ones."""
        return self.keep == "best" or (self.keep == "auto" and self.patience > 0)


def refusal(message: str) -> Error:
    return Error(message, code="recipe.value")


def check_form(parse: Callable[[str], Any], text: str) -> None:
    """Refuse a text that the parser of the flag refuses."""
    try:
        parse(text)
    except ValueError as error:
        raise refusal(str(error)) from None


def check_choices(r: Recipe) -> None:
    """Refuse values outside a field's choices."""
    for name, known in ({"objective": task_names()} | CHOICES).items():
        if getattr(r, name) not in known:
            listed = f"{', '.join(known[:-1])} or {known[-1]}"
            raise refusal(f"{name} must be {listed}, not {getattr(r, name)!r}")
    if others := [name for name in r.task_options if not name.startswith(f"{r.objective}.")]:
        raise refusal(f"objective={r.objective} does not use {others[0]}; leave it out")
    if unknown_names := [name for name in r.auto if name not in AUTO]:
        raise refusal(f"auto takes {', '.join(AUTO)}, not {shown(unknown_names[0])}")


def check_pooling(r: Recipe) -> None:
    """Refuse a new pooling where the head or the pooling of the weights stays."""
    if r.pooling == "mean" and (r.train == "lora" or r.keep_representation or not r.task.labelled):
        raise refusal(
            "pooling=mean is for a new head that is trained with labels and with the whole model, not for "
            "train=lora or keep_representation; leave it out"
        )


def check_unused(r: Recipe) -> None:
    """Refuse fields that the task does not use, unless they have their default."""
    for name in r.task.unused_fields:
        value, usual = r, type(r).__dataclass_fields__[name.partition(".")[0]].default
        for part in name.split("."):
            value = getattr(value, part)
        for part in name.split(".")[1:]:
            usual = getattr(usual, part)
        if value != usual:
            raise refusal(f"objective={r.objective} does not use {name}; leave it out, or set it to {usual}")


def stages_of(recipe: Recipe, images: int) -> list[Stage]:
    """The stages of a run on a number of training images: the first, and one for each --more-steps."""
    return stages(recipe.length.in_steps(images, recipe.batch), recipe.schedule, recipe.more_steps)


def with_teacher(recipe: Recipe, teacher: str) -> Recipe:
    """The recipe with this teacher for its task; empty: as it is."""
    if not teacher:
        return recipe
    if "teacher" not in option_names(type(recipe.task)):
        raise Error(
            f"--teacher {teacher}: {recipe.task.name} has no teacher of its own; use --task distill",
            code="request.conflict",
        )
    return replace(
        recipe, task_options=recipe.task_options.having(**{f"{recipe.task.name}.teacher": teacher})
    )


def only(recipe: Recipe, named: Iterable[str]) -> Recipe:
    """A recipe with only these fields of another, as a key for all recipes that agree in them."""
    return replace(Recipe(name="part"), **{name: getattr(recipe, name) for name in named})


def commas(values: Iterable[Any]) -> str:
    """Several values as --set takes them."""
    return ",".join(map(str, values))


def override(value: Any, changes: Iterable[str]) -> Any:
    """A frozen value with fields changed by 'name=text' or 'part.name=text', each checked by its type.

    A recipe also takes grouped names: data.batch=64, model.head=gap. All changes are applied at once, so that
    only the result must be valid.
    """
    return values.override(value, map(ungroup, changes) if isinstance(value, Recipe) else changes)


def ungroup(change: str) -> str:
    """'data.batch=64' with the field's own name: 'batch=64'."""
    name, text = name_and_text(change)
    own, known = own_name(name), [f.name for f in fields(Recipe)]
    text = OTHER_VALUES.get((own, text.lower()), text)
    if own.partition(".")[0] not in known or name in SYNONYMS:
        raise unknown(name, known, [*GROUPED, *settings(Recipe(name="any"))])
    return f"{own}={text}"


def settings(recipe: Recipe) -> dict[str, Any]:
    """Every field that decides a run, by its name for --set; model options as texts."""
    rows, task = settings_of(asdict(recipe)), recipe.task
    values = {f"{task.name}.{name}": getattr(task, name) for name in option_names(type(task))}
    return rows | values | {"model_options": tuple(rows["model_options"])}


def to_table(recipe: Recipe, version: int = VERSION) -> dict[str, Any]:
    """The content of recipe.json. version: the one that the run started with, which decides its meaning."""
    return {"version": max(2, version)} | asdict(recipe)


def to_json(recipe: Recipe, version: int = VERSION) -> str:
    return json.dumps(to_table(recipe, version), indent=2)


def from_json(text: str) -> Recipe:
    return from_table(json.loads(text))


def from_table(table: Any) -> Recipe:
    """A recipe from JSON of this version or an earlier one, with grouped or own names."""
    if not isinstance(table, dict):
        raise Error(f"a recipe must be a table, not {shown(table)}", code="recipe.format")
    version = table.get("version", 1)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Error(
            f"recipe version {shown(version)}: this vitkit reads 1 to {VERSION}; update vitkit to read it",
            code="recipe.format",
        )
    table = {name: value for name, value in table.items() if name != "version"}
    recipe: Recipe = build(Recipe, renamed(ungrouped(table)))
    return as_meant(recipe, version)


def renamed(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe's JSON object with today's names: train=head was optimizer.frozen=backbone."""
    optimizer = table.get("optimizer")
    if not isinstance(optimizer, dict) or optimizer.get("frozen") not in ("nothing", "backbone"):
        return table
    train = {"train": "head"} if optimizer["frozen"] == "backbone" else {}
    return table | train | {"optimizer": {k: v for k, v in optimizer.items() if k != "frozen"}}


def as_meant(recipe: Recipe, version: int) -> Recipe:
    """A recipe of an earlier version, as this version writes the same settings.

    Up to version 2 `head` alone did not remove the class token; Axial-ViTs never had one.
    """
    options = recipe.model_options
    if version > 2 or "class_token" in options or options.get("head", "token") == "token":
        return recipe
    if recipe.model.startswith("Axial-"):
        return recipe
    return replace(recipe, model_options=options.having(class_token=True))


def read_version(path: Path) -> int:
    """The version of a valid recipe file."""
    version: int = json.loads(path.read_text(encoding="utf-8")).get("version", 1)
    return version


def read_recipe(path: Path) -> Recipe:
    """Read recipe.json; the error names the file."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes")
        return from_json(content.decode())
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:300]
        raise Error(
            f"{path}: not a recipe that vitkit wrote: {why}; give another --out", code="recipe.format"
        ) from None
