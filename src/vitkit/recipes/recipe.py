"""A Recipe: one experiment as a frozen value, with overrides by name and a JSON round trip."""

import json
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitkit.data.views import CROPS
from vitkit.errors import Error
from vitkit.models.card import short_repr
from vitkit.objectives.classify import LOSSES
from vitkit.objectives.masked import Masked
from vitkit.objectives.task import Task, make_task, task_names
from vitkit.options import flat as flat
from vitkit.options import part_of
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.ranges import check_ranges
from vitkit.training.schedule import Duration, Schedule, Stage, parse_stages, stages

LARGEST = 2**20  # bytes of a recipe file
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list"}

EXPECTED = {  # what a text for a field must be, by the field's type
    int: "a whole number", float: "a number", bool: "true or false", tuple: "values with commas between them",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One fine-tuning or training run, complete: nothing else decides its result."""

    name: str
    about: str = ""  # where its numbers come from

    data: str = ""
    weights: str = ""  # a file or a published name to start from; empty: from scratch
    model: str = ""  # the model to build when there are no weights
    model_options: tuple[str, ...] = ()  # fields of that model, as in depth=4
    keep_representation: bool = False  # replace only the last layer of the head, not the whole of it
    against: tuple[str, ...] = ()  # data sets whose images are taken out of train, and what looks like them
    subset: str = ""  # a part of train: 1000 images, 10%, or 25/class; smaller ones lie within larger ones
    split_of: str = ""  # a run folder: its images stay in the splits that they have there
    train_on: str = "train"  # or train+val
    report_on: str = "test"  # or val

    image_size: tuple[int, int] = (384, 384)
    crop: str = "inception"  # the training view
    resize: int = 0  # of the random and squash-random crops: the side before; 0: 256 / 224 of the size
    flip: bool = True
    randaugment: tuple[int, ...] = ()  # (layers, magnitude)
    mixup: float = 0.0
    evaluation_crop: str = "squash"

    batch: int = 512
    micro_batch: int = 0  # images in memory at a time; 0: the whole batch
    length: Duration = Duration(steps=10_000)
    more_steps: tuple[str, ...] = ()  # how it was trained on, as in 40+20: at step 40, by 20 steps
    schedule: Schedule = Schedule(rate=0.03, warmup=500)
    rates: tuple[float, ...] = ()  # those that the paper's protocol tries
    convolution_rates: tuple[float, ...] = ()  # and these too for ResNets and hybrids
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: str = "classify"  # the name of the task: or masked, to learn without labels, ...
    masked: Masked = Masked()  # how, in that case
    loss: str = "softmax"
    label_smoothing: float = 0.0
    head_bias: float = 0.0  # of a model from scratch; -10 for a sigmoid over many classes
    dropout: float = 0.0
    stochastic_depth: float = 0.0

    val: float = 0.1  # share of train held out where the data has no split
    test: float = 0.1
    evaluations: int = 10  # on val, spread over the run
    fewshot: str = ""  # a data set whose few-shot accuracy is told beside each of them; empty: none
    shots: int = 5  # images of each of its classes
    draws: int = 3  # choices of them, of which the mean is told
    fewshot_when: str = "evaluations"  # and at the end; or end: only then
    patience: int = 0  # evaluations without a better one before the run stops; 0: never
    keep: str = "auto"  # the weights that a run ends with: best on val, or last; auto: best with patience
    seed: int = 0

    def __repr__(self) -> str:
        return short_repr(self, Recipe(name=self.name), ("name",))

    def __post_init__(self):
        check_ranges(self)
        if len(self.image_size) != 2:
            raise ValueError(f"image_size is a height and a width, not {commas(self.image_size)}")
        if len(self.randaugment) not in (0, 2):
            raise ValueError(
                f"randaugment is layers,magnitude as in 2,10, or nothing, not {commas(self.randaugment)}"
            )
        choices = {"train_on": ("train", "train+val"), "report_on": ("test", "val"),
                   "objective": task_names(), "crop": tuple(CROPS), "loss": LOSSES,
                   "evaluation_crop": ("squash", "centre"),
                   "fewshot_when": ("evaluations", "end"), "keep": ("auto", "best", "last")}  # fmt: skip
        for field, known in choices.items():
            if getattr(self, field) not in known:
                listed = f"{', '.join(known[:-1])} or {known[-1]}"
                raise ValueError(f"{field} must be {listed}, not {getattr(self, field)!r}")
        if self.train_on == "train+val" and (self.report_on == "val" or self.patience or self.keeps_best):
            raise ValueError(
                "with train_on=train+val no val is left to stop early, to keep the best weights by or to "
                "report on"
            )
        check_unused(self)
        part_of(self.subset)
        parse_stages(self.more_steps)

    @property
    def task(self) -> Task:
        """What is learned, with its own fields."""
        return make_task(self.objective, vars(self))

    @property
    def keeps_best(self) -> bool:
        """Whether the run ends with the weights that did best on val, and not with the last."""
        return self.keep == "best" or (self.keep == "auto" and self.patience > 0)


def check_unused(r: Recipe) -> None:
    """Refuse fields that mean nothing for the recipe's task, unless they have their default."""
    for name in r.task.unused:
        value, usual = r, type(r).__dataclass_fields__[name.partition(".")[0]].default
        for part in name.split("."):
            value = getattr(value, part)
        for part in name.split(".")[1:]:
            usual = getattr(usual, part)
        if value != usual:
            raise Error(
                f"objective={r.objective} has no use for {name}; leave it out, or set it to {usual}",
                code="recipe.value",
            )


def stages_of(recipe: Recipe, images: int) -> list[Stage]:
    """The stages of its run on so many training images: the first, and those by which it was trained on."""
    return stages(recipe.length.in_steps(images, recipe.batch), recipe.schedule, recipe.more_steps)


def only(recipe: Recipe, named: Iterable[str]) -> Recipe:
    """A recipe with these fields of another, and no others: equal for all that are alike in them."""
    return replace(Recipe(name="part"), **{name: getattr(recipe, name) for name in named})


def commas(values: Iterable[Any]) -> str:
    """Several values as --set takes them."""
    return ",".join(map(str, values))


def override(value: Any, changes: Iterable[str]) -> Any:
    """A frozen value with fields changed by 'name=text' or 'part.name=text', each checked by its type.

    All changes take place at once, so that only the outcome must make sense.
    """
    known = {f.name for f in fields(value)}
    made: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    for change in changes:
        name, equals, text = (part.strip() for part in change.partition("="))
        if not equals:
            raise ValueError(f"{change!r}: give field=value, as in optimizer.weight_decay=0.1")
        first, _, rest = name.partition(".")
        if first not in known or (rest and not is_dataclass(getattr(value, first))):
            near = get_close_matches(first, known, 1)
            meant = f"did you mean {near[0]}? " if near and near[0] != first else ""
            raise ValueError(f"no field {name!r}; {meant}There are {', '.join(sorted(known))}")
        if rest:
            parts.setdefault(first, []).append(f"{rest}={text}")
        else:
            made[first] = parse(text, typing.get_type_hints(type(value))[first], name)
    nested = {name: override(getattr(value, name), inner) for name, inner in parts.items()}
    return replace(value, **made, **nested)


def parse(text: str, hint: Any, name: str) -> Any:
    """Text to a value of a field's type."""
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    if isinstance(hint, types.UnionType):
        return None if text.lower() == "none" else parse(text, options[0], name)
    try:
        if hint is bool:
            return {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}[
                text.lower()
            ]
        if typing.get_origin(hint) is tuple:
            if options[0] is not str:
                text = text.replace("x", ",")  # 384x256
            parts = [part for part in text.split(",") if part]
            if Ellipsis not in options and len(parts) == 1:
                parts *= len(options)  # one number for both sides
            if Ellipsis not in options and len(parts) != len(options):
                raise ValueError
            return tuple(options[0](part) for part in parts)
        if is_dataclass(hint):
            raise ValueError
        return hint(text)
    except (ValueError, KeyError):
        many = f", {len(options)} of them" if options and Ellipsis not in options else ""
        raise ValueError(
            f"{name}: {text!r} is not {EXPECTED.get(typing.get_origin(hint) or hint, 'a single value')}{many}"
        ) from None


def to_json(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe), indent=2)


def from_json(text: str) -> Recipe:
    return build(Recipe, json.loads(text))


def read_recipe(path: Path) -> Recipe:
    """The recipe of a run folder; whatever else is in the file is an error that names it."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes")
        return from_json(content.decode())
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: not a recipe that vitkit wrote: {why}; give another --out") from None


def build(kind: Any, told: Any, prefix: str = "") -> Any:
    """A frozen value out of a JSON table; an unknown field, or one of another type, is an error."""
    if not isinstance(told, dict):
        raise ValueError(f"{prefix.rstrip('.') or kind.__name__} must be a table, not {shown(told)}")
    hints = typing.get_type_hints(kind)
    strange = set(told) - set(hints)
    if strange:
        raise ValueError(f"{kind.__name__} has no field {shown(', '.join(sorted(strange)))}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in told]
    if missing:
        raise ValueError(f"{kind.__name__} needs the field {', '.join(missing)}")
    return kind(**{name: conform(content, hints[name], prefix + name) for name, content in told.items()})


def conform(content: Any, hint: Any, name: str) -> Any:
    """A value out of JSON as a field of this type has it."""
    inner = [h for h in typing.get_args(hint) if h is not type(None)]
    if isinstance(hint, types.UnionType):
        return None if content is None else conform(content, inner[0], name)
    if is_dataclass(hint):
        return build(hint, content, f"{name}.")
    kind = typing.get_origin(hint) or hint
    known = {float: (int, float), tuple: (list, tuple)}.get(kind, kind)
    if not isinstance(content, known) or (isinstance(content, bool) and kind is not bool):
        raise ValueError(f"{name} must be {KINDS[kind]}, not {shown(content)}")
    return tuple(conform(part, inner[0], name) for part in content) if kind is tuple else content


def shown(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 80 else f"{text[:80]} ..."
