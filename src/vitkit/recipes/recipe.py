"""A Recipe: one experiment as a frozen value, with overrides by name and a JSON round trip."""

import json
import types
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from vitkit.options import BATCH, EPOCHS, MOST_PIXELS, RATE, SEEDS, SHARE, SHOTS, STEPS, Range, part_of
from vitkit.training.masked import MaskedConfig
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

COUNT = Range(0, STEPS.largest)
RANGES = {  # of every number in a recipe, by the name that --set takes
    "image_size": Range(1, MOST_PIXELS),
    "resize": Range(0, 2 * MOST_PIXELS),
    "randaugment": Range(0, 100),
    "mixup": Range(0, 1000),
    "batch": BATCH,
    "micro_batch": Range(0, BATCH.largest),
    "length.steps": COUNT,
    "length.epochs": Range(0, EPOCHS.largest),
    "schedule.rate": RATE,
    "schedule.warmup": COUNT,
    "schedule.floor": RATE,
    "schedule.stairs": SHARE,
    "rates": RATE,
    "convolution_rates": RATE,
    "optimizer.momentum": SHARE,
    "optimizer.betas": SHARE,
    "optimizer.eps": SHARE,
    "optimizer.weight_decay": Range(0, 1e6),
    "optimizer.clip": Range(0, 1e9),
    "optimizer.layer_decay": SHARE,
    "optimizer.average": SHARE,
    "masked.rate": SHARE,
    "masked.shares": SHARE,
    "masked.bits": Range(1, 5),
    "label_smoothing": SHARE,
    "head_bias": Range(-1000, 1000),
    "dropout": SHARE,
    "stochastic_depth": SHARE,
    "val": SHARE,
    "test": SHARE,
    "evaluations": Range(0, 1_000_000),
    "shots": SHOTS,
    "draws": SEEDS,
    "patience": Range(0, 1_000_000),
    "seed": Range(-(2**63), 2**63 - 1),
}


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
    schedule: Schedule = Schedule(rate=0.03, warmup=500)
    rates: tuple[float, ...] = ()  # those that the paper's protocol tries
    convolution_rates: tuple[float, ...] = ()  # and these too for ResNets and hybrids
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: str = "classify"  # or masked: to say what was in corrupted patches; labels are not looked at
    masked: MaskedConfig = MaskedConfig()  # how, in that case
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
    seed: int = 0

    def __post_init__(self):
        check_ranges(self)
        if len(self.randaugment) not in (0, 2):
            raise ValueError(f"randaugment={self.randaugment}: give layers,magnitude, as in 2,15, or nothing")
        if self.label_smoothing == 1:
            raise ValueError("label_smoothing=1 leaves nothing of the labels; give less")
        choices = {"train_on": ("train", "train+val"), "report_on": ("test", "val"),
                   "objective": ("classify", "masked"),
                   "fewshot_when": ("evaluations", "end")}  # fmt: skip
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise ValueError(f"{field} must be {' or '.join(known)}, not {getattr(self, field)!r}")
        if self.train_on == "train+val" and (self.report_on == "val" or self.patience):
            raise ValueError("with train_on=train+val no val is left to stop early or to report on")
        if self.objective == "masked":
            check_masked(self)
        part_of(self.subset)


def check_ranges(value: Any, prefix: str = "") -> None:
    """Refuse a number outside its range, also in the parts of a recipe, by its name and value."""
    for name, content in vars(value).items():
        if is_dataclass(content):
            check_ranges(content, f"{prefix}{name}.")
        elif allowed := RANGES.get(prefix + name):
            for number in content if isinstance(content, tuple) else (content,):
                if isinstance(number, int | float) and number not in allowed:
                    expected = allowed.expected(whole=isinstance(number, int))
                    raise ValueError(f"{prefix}{name}={number}: expected {expected}")


def check_masked(r: Recipe) -> None:
    """Refuse what has no meaning without labels, or for a model that is all new."""
    for field, without in (("mixup", r.mixup), ("label_smoothing", r.label_smoothing),
                           ("patience", r.patience), ("optimizer.layer_decay", r.optimizer.layer_decay != 1),
                           ("optimizer.frozen", r.optimizer.frozen != "nothing")):  # fmt: skip
        if without:
            raise ValueError(f"objective=masked has no use for {field}; leave it out, or set it to nothing")


def only(recipe: Recipe, named: Iterable[str]) -> Recipe:
    """A recipe with these fields of another, and no others: equal for all that are alike in them."""
    return replace(Recipe(name="part"), **{name: getattr(recipe, name) for name in named})


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
            raise ValueError(f"no field {name!r}; {type(value).__name__} has {', '.join(sorted(known))}")
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
        raise ValueError(
            f"{name}: {text!r} is not a value of type {getattr(hint, '__name__', hint)}"
        ) from None


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names: those that --set takes."""
    rows: dict[str, Any] = {}
    for name, value in table.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return rows


def to_json(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe), indent=2)


def from_json(text: str) -> Recipe:
    return build(Recipe, json.loads(text))


def build(kind: Any, told: dict[str, Any]) -> Any:
    """A frozen value out of a JSON table; an unknown field is an error."""
    hints = typing.get_type_hints(kind)
    strange = set(told) - set(hints)
    if strange:
        raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(strange))}")
    made = {}
    for name, content in told.items():
        if is_dataclass(hints[name]) and isinstance(content, dict):
            content = build(hints[name], content)
        made[name] = tuple(content) if isinstance(content, list) else content
    return kind(**made)
