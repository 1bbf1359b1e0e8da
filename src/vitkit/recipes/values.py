"""Frozen dataclasses from texts and JSON: every field is checked by its type."""

import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

from vitkit.errors import Error, did_you_mean
from vitkit.flat_recipe import flat, setting
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.vit import ViTConfig
from vitkit.tasks.task import option_names, task_class, task_names

KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list"}
EXPECTED = {  # by the type of a field: what its text must be
    int: "a whole number", float: "a number", bool: "true or false", tuple: "values with commas between them",
}  # fmt: skip
SYNONYMS = {  # fields by the names that other tools use
    "lr": "schedule.rate", "learning_rate": "schedule.rate", "optimizer.lr": "schedule.rate",
    "lr_scheduler": "schedule.decay", "scheduler": "schedule.decay", "warmup_steps": "schedule.warmup",
    "wd": "optimizer.weight_decay", "clip_grad": "optimizer.clip", "grad_clip": "optimizer.clip",
    "opt": "optimizer.kind", "ema": "optimizer.average", "ema_decay": "optimizer.average",
    "batch_size": "batch", "bs": "batch", "img_size": "image_size", "resolution": "image_size",
    "imgsz": "image_size", "drop_path": "stochastic_depth", "drop_path_rate": "stochastic_depth",
    "smoothing": "label_smoothing", "random_erasing": "erasing", "reprob": "erasing", "aa": "randaugment",
    "auto_augment": "randaugment", "early_stopping": "patience", "pretrained": "weights",
}  # fmt: skip
TRUTH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def override(value: Any, changes: Iterable[str]) -> Any:
    """A frozen value with fields changed by 'name=text' or 'part.name=text', each checked by its type.

    All changes are applied at once, so that only the result must be valid.
    """
    known = {f.name for f in fields(value)}
    values: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    for change in changes:
        name, text = name_and_text(change)
        first, _, rest = name.partition(".")
        if first not in known or (rest and not has_parts(getattr(value, first))):
            raise unknown(name, known)
        if rest:
            parts.setdefault(first, []).append(f"{rest}={text}")
        else:
            values[first] = parse(text, typing.get_type_hints(type(value))[first], name)
    for name, inner in parts.items():
        whole = values.get(name, getattr(value, name))
        values[name] = override(whole, inner) if is_dataclass(whole) else whole.override(inner)
    return checked(replace, value, **values)


def name_and_text(change: str, example: str = "optimizer.weight_decay=0.1") -> tuple[str, str]:
    """'batch = 8' -> ('batch', '8')."""
    name, equals, text = (part.strip() for part in change.partition("="))
    if not equals:
        raise Error(f"{shown(change)}: give field=value, as in {example}", code="recipe.value")
    return name, text


def has_parts(value: Any) -> bool:
    return is_dataclass(value) or hasattr(value, "override")


def unknown(name: str, known: Collection[str], others: Collection[str] = ()) -> Error:
    """The error for an unknown field, with the most similar name or else all of `known`.

    A part without its group is the most similar one: warmup, of schedule.warmup.
    """
    first = name.partition(".")[0]
    names = [*known, *others]
    parts = [whole for whole in names if whole.rpartition(".")[2] == name or whole == SYNONYMS.get(name)]
    hint = ""
    if name not in names:
        hint = did_you_mean(name, names, matches=parts) or did_you_mean(first, known)
    hint = hint or f" there are {', '.join(sorted(known))}"
    return Error(f"no field {shown(name)};{hint}", code="recipe.unknown-field")


def checked(make: Any, /, *args: Any, **values: Any) -> Any:
    """Call `make`; its ValueError becomes an Error about a recipe's value."""
    try:
        return make(*args, **values)
    except Error:
        raise
    except ValueError as error:
        raise Error(str(error), code="recipe.value") from None


def parse(text: str, hint: Any, name: str) -> Any:
    """Convert a text to the type of a field."""
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    if hasattr(hint, "from_text"):
        return hint.from_text(text)
    if isinstance(hint, types.UnionType):
        return None if text.lower() == "none" else parse(text, options[0], name)
    try:
        if hint is bool:
            return TRUTH[text.lower()]
        if typing.get_origin(hint) is tuple:
            return parse_list(text, options)
        if is_dataclass(hint):
            raise ValueError
        return hint(text)
    except (ValueError, KeyError):
        many = f", {len(options)} of them" if options and Ellipsis not in options else ""
        expected = EXPECTED.get(typing.get_origin(hint) or hint, "a single value")
        raise Error(f"{name}: {text!r} is not {expected}{many}", code="recipe.value") from None


def parse_list(text: str, options: list[Any]) -> tuple[Any, ...]:
    """'1,2' as a tuple; '384' or '384x256' as one of two numbers."""
    if options[0] is not str:
        text = text.replace("x", ",")
    parts = [part for part in text.split(",") if part]
    if Ellipsis not in options and len(parts) == 1:
        parts *= len(options)  # one number for both sides
    if Ellipsis not in options and len(parts) != len(options):
        raise ValueError
    return tuple(options[0](part) for part in parts)


def build(kind: Any, table: Any, prefix: str = "") -> Any:
    """A frozen dataclass from JSON; refuses unknown fields and values of the wrong type."""
    if not isinstance(table, dict):
        raise Error(
            f"{prefix.rstrip('.') or kind.__name__} must be a table, not {shown(table)}", code="recipe.format"
        )
    hints = typing.get_type_hints(kind)
    if unknown_names := sorted(set(table) - set(hints)):
        raise unknown(f"{prefix}{unknown_names[0]}", [prefix + name for name in hints])
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in table]:
        raise Error(f"{kind.__name__} needs the field {', '.join(missing)}", code="recipe.format")
    return checked(
        kind, **{name: conform(value, hints[name], prefix + name) for name, value in table.items()}
    )


def conform(content: Any, hint: Any, name: str) -> Any:
    """Convert a JSON value to the type of a field."""
    inner = [h for h in typing.get_args(hint) if h is not type(None)]
    if hasattr(hint, "from_json"):
        return hint.from_json(content)
    if isinstance(hint, types.UnionType):
        return None if content is None else conform(content, inner[0], name)
    if is_dataclass(hint):
        return build(hint, content, f"{name}.")
    kind = typing.get_origin(hint) or hint
    known = {float: (int, float), tuple: (list, tuple)}.get(kind, kind)
    if not isinstance(content, known) or (isinstance(content, bool) and kind is not bool):
        raise Error(f"{name} must be {KINDS[kind]}, not {shown(content)}", code="recipe.value")
    return tuple(conform(part, inner[0], name) for part in content) if kind is tuple else content


def shown(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 80 else f"{text[:80]} ..."


TYPES: dict[str, Any] = typing.get_type_hints(ViTConfig) | typing.get_type_hints(ResNetConfig)
TYPES.pop("text")  # a text tower comes with pretrained weights only
TYPES |= {f"stem.{name}": hint for name, hint in typing.get_type_hints(StemConfig).items()}


class Options(dict[str, Any]):
    """Fields of a configuration that a recipe sets; each value is checked by the type of its field.

    Immutable and hashable. Subclasses say where the fields are.
    """

    field: ClassVar[str]  # of a recipe
    prefix: ClassVar[str]  # of the names in messages
    example: ClassVar[str]

    def __init__(self, options: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **more: Any) -> None:
        pairs = flat(dict(options) | more).items()
        super().__init__(
            {name: conform(v, self.type_of(name, v), f"{self.prefix}{name}") for name, v in pairs}
        )

    @staticmethod
    def type_of(name: str, content: Any) -> Any:
        """The type of a field; raises an error for an unknown one."""
        raise NotImplementedError

    @classmethod
    def of(cls, options: "Options | Mapping[str, Any] | Iterable[str]") -> Self:
        """From a mapping, or from texts such as depth=4, the format of version 0.1."""
        if isinstance(options, Mapping):
            return cls(options)
        return cls().override(options)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """From 'depth=4,blocks=1,2', the format of --set."""
        changes: list[str] = []
        for part in (part for part in text.split(",") if part.strip()):
            if "=" in part or not changes:
                changes.append(part)
            else:
                changes[-1] += f",{part}"
        return cls().override(changes)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """From an object, or from the list of texts of version 0.1."""
        if isinstance(content, list | tuple) and all(isinstance(item, str) for item in content):
            return cls().override(content)
        if not isinstance(content, dict):
            raise Error(f"{cls.field} must be a table, not {shown(content)}", code="recipe.value")
        return cls(content)

    def override(self, changes: Iterable[str]) -> Self:
        """A copy with some fields set by texts such as head=gap."""
        options = dict(self)
        for change in changes:
            name, text = name_and_text(change, self.example)
            options.pop(name, None)  # the last one set comes last
            options[name] = parse(text, self.type_of(name, text), f"{self.prefix}{name}")
        return type(self)(options)

    def having(self, **changes: Any) -> Self:
        """A copy with some fields set."""
        return type(self)({name: value for name, value in self.items() if name not in changes} | changes)

    def without(self, *names: str) -> Self:
        return type(self)({name: value for name, value in self.items() if name not in names})

    def __str__(self) -> str:
        """In the format of --set: head=gap,blocks=1,2."""
        return ",".join(f"{name}={setting(value)}" for name, value in self.items())

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError(f"{self.field} are immutable: make a copy with having() or without()")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = refuse


def model_field_type(name: str, content: Any) -> Any:
    """The type of a field of a model; a whole stem can only be set to none."""
    if name not in TYPES:
        raise unknown(f"model.{name}", [f"model.{known}" for known in TYPES])
    if name == "stem" and content is not None and str(content).lower() != "none":
        raise Error(
            f"model.stem: {shown(content)} is not none; set its parts, as in model.stem.width",
            code="recipe.value",
        )
    return TYPES[name]


class ModelOptions(Options):
    """Fields of ViTConfig or ResNetConfig that a recipe sets, as in {"head": "gap"}.

    Fields of a hybrid's stem are written as in {"stem.width": 32}. Whether a model has a field is checked
    when its configuration is made (`models.variants.with_options`).
    """

    field, prefix, example = "model_options", "model.", "model_options=head=gap,depth=4"
    type_of = staticmethod(model_field_type)


def task_field_type(name: str, content: Any) -> Any:
    """The type of a field of a task, named as in mae.mask_ratio."""
    task, _, field = name.partition(".")
    if task not in task_names():
        raise unknown(name, [f"{known}." for known in task_names()])
    known = option_names(task_class(task))
    if field not in known:
        raise unknown(name, [f"{task}.{option}" for option in known])
    return typing.get_type_hints(task_class(task))[field]


class TaskOptions(Options):
    """Fields of a task that a recipe sets, as in {"masked.rate": 0.15}, without defaults."""

    field, prefix, example = "task_options", "", "task_options=masked.rate=0.15"
    type_of = staticmethod(task_field_type)

    def __init__(self, options: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **more: Any) -> None:
        super().__init__(options, **more)
        for name, value in list(self.items()):
            task, _, field = name.partition(".")
            if value == task_class(task).__dataclass_fields__[field].default:
                dict.pop(self, name)


GROUPED = {  # grouped name -> own name; schedule.* and optimizer.* are own names already
    "model.name": "model",
    "model.weights": "weights",
    "model.keep_representation": "keep_representation",
    "model.pooling": "pooling",
    "model.head_bias": "head_bias",
    "model.head_init": "head_init",
    **{f"model.{name}": f"model_options.{name}" for name in TYPES},
    "data.source": "data",
    "data.corrections": "corrections",
    "data.against": "against",
    "data.subset": "subset",
    "data.label_noise": "label_noise",
    "data.split_of": "split_of",
    "data.train_on": "train_on",
    "data.fold": "fold",
    "data.image_size": "image_size",
    "data.patch_sizes": "patch_sizes",
    "data.batch": "batch",
    "data.micro_batch": "micro_batch",
    "data.sampling": "sampling",
    "augment.crop": "crop",
    "augment.crop_area": "crop_area",
    "augment.resize": "resize",
    "augment.interpolation": "interpolation",
    "augment.flip": "flip",
    "augment.three_augment": "three_augment",
    "augment.color_jitter": "color_jitter",
    "augment.randaugment": "randaugment",
    "augment.erasing": "erasing",
    "augment.mixup": "mixup",
    "augment.cutmix": "cutmix",
    "schedule.steps": "length.steps",
    "schedule.epochs": "length.epochs",
    "schedule.more_steps": "more_steps",
    "schedule.rates": "rates",
    "schedule.convolution_rates": "convolution_rates",
    "evaluation.val": "val",
    "evaluation.val_images": "val_images",
    "evaluation.test": "test",
    "evaluation.crop": "evaluation_crop",
    "evaluation.count": "evaluations",
    "evaluation.report_on": "report_on",
    "evaluation.fewshot": "fewshot",
    "evaluation.shots": "shots",
    "evaluation.draws": "draws",
    "evaluation.fewshot_when": "fewshot_when",
    "evaluation.patience": "patience",
    "evaluation.keep": "keep",
    "evaluation.keep_margin": "keep_margin",
    "evaluation.calibrate": "calibrate",
}
GROUPS = {name.partition(".")[0] for name in GROUPED} - {"schedule"}  # a field with that name


def own_name(name: str) -> str:
    """The own name of a field: data.batch -> batch, model.head -> model_options.head."""
    first, _, rest = name.partition(".")
    if rest and first in GROUPS and name not in GROUPED:
        raise unknown(name, [known for known in GROUPED if known.startswith(f"{first}.")])
    if rest and first in task_names():
        return f"task_options.{name}"
    return GROUPED.get(name, name)


def field_of(change: str) -> str:
    """The field of a recipe that 'name=text' sets."""
    return own_name(change.partition("=")[0].strip()).partition(".")[0]


def ungrouped(table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's JSON object with own names in place of grouped ones."""
    result: dict[str, Any] = {}
    for name, content in flat(dict(table)).items():
        *parents, last = own_name(name).split(".")
        target = result
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise Error(f"{parent} is given twice, once as a whole", code="recipe.format")
        if last in target:
            raise Error(f"{name} is given twice", code="recipe.format")
        target[last] = content
    return result
