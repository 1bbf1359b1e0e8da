"""A recipe's model options, typed, and its fields by the names of their groups, as in data.batch."""

import typing
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

from vitkit.errors import Error
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.vit import ViTConfig
from vitkit.options import flat, setting
from vitkit.recipes.values import conform, name_and_text, parse, shown, unknown

TYPES: dict[str, Any] = typing.get_type_hints(ViTConfig) | typing.get_type_hints(ResNetConfig)
TYPES |= {f"stem.{name}": hint for name, hint in typing.get_type_hints(StemConfig).items()}


class ModelOptions(dict[str, Any]):
    """Fields of ViTConfig or ResNetConfig with the values that a recipe gives them: {"head": "gap"}.

    A value, with a hash, that cannot be changed. A hybrid's stem is reached as in {"stem.width": 32}. Which
    of them a model has is checked where its configuration is made (`models.variants.with_options`).
    """

    def __init__(self, given: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **more: Any) -> None:
        pairs = flat(dict(given) | more).items()
        super().__init__({name: conform(one, type_of(name, one), f"model.{name}") for name, one in pairs})

    @classmethod
    def of(cls, given: "ModelOptions | Mapping[str, Any] | Iterable[str]") -> Self:
        """Out of a table, or of texts such as depth=4, as version 0.1 had them."""
        if isinstance(given, Mapping):
            return cls(given)
        return cls().override(given)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """'depth=4,blocks=1,2' as --set takes it."""
        changes: list[str] = []
        for part in (part for part in text.split(",") if part.strip()):
            if "=" in part or not changes:
                changes.append(part)
            else:
                changes[-1] += f",{part}"
        return cls().override(changes)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Out of a table, or the list of texts of version 0.1."""
        if isinstance(content, list | tuple) and all(isinstance(one, str) for one in content):
            return cls().override(content)
        if not isinstance(content, dict):
            raise Error(f"model_options must be a table, not {shown(content)}", code="recipe.value")
        return cls(content)

    def override(self, changes: Iterable[str]) -> Self:
        """With some fields set by texts such as head=gap, whatever they were before."""
        made = dict(self)
        for change in changes:
            name, text = name_and_text(change, "model_options=head=gap,depth=4")
            made.pop(name, None)  # what is set last stands last
            made[name] = parse(text, type_of(name, text), f"model.{name}")
        return type(self)(made)

    def having(self, **changes: Any) -> Self:
        """With some fields set, whatever they were before."""
        return type(self)({name: one for name, one in self.items() if name not in changes} | changes)

    def without(self, *names: str) -> Self:
        return type(self)({name: one for name, one in self.items() if name not in names})

    def __str__(self) -> str:
        """As --set takes it: head=gap,blocks=1,2."""
        return ",".join(f"{name}={setting(one)}" for name, one in self.items())

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError("model options are a frozen value: make another with having() or without()")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = refuse


def type_of(name: str, content: Any) -> Any:
    """The type of a field; of a stem as a whole only 'none' can be said."""
    if name not in TYPES:
        raise unknown(f"model.{name}", [f"model.{known}" for known in TYPES])
    if name == "stem" and content is not None and str(content).lower() != "none":
        raise Error(
            f"model.stem: {shown(content)} is not none; set its parts, as in model.stem.width",
            code="recipe.value",
        )
    return TYPES[name]


GROUPED = {  # group.name -> the recipe's own name for it; schedule.* and optimizer.* are its own already
    "model.name": "model",
    "model.weights": "weights",
    "model.keep_representation": "keep_representation",
    "model.head_bias": "head_bias",
    **{f"model.{name}": f"model_options.{name}" for name in TYPES},
    "data.source": "data",
    "data.against": "against",
    "data.subset": "subset",
    "data.split_of": "split_of",
    "data.train_on": "train_on",
    "data.image_size": "image_size",
    "data.batch": "batch",
    "data.micro_batch": "micro_batch",
    "augment.crop": "crop",
    "augment.resize": "resize",
    "augment.flip": "flip",
    "augment.randaugment": "randaugment",
    "augment.mixup": "mixup",
    "schedule.steps": "length.steps",
    "schedule.epochs": "length.epochs",
    "schedule.more_steps": "more_steps",
    "schedule.rates": "rates",
    "schedule.convolution_rates": "convolution_rates",
    "evaluation.val": "val",
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
}
GROUPS = {name.partition(".")[0] for name in GROUPED} - {"schedule"}  # no fields with parts of their own


def own_name(name: str) -> str:
    """The recipe's own name of a field: data.batch -> batch, model.head -> model_options.head."""
    first, _, rest = name.partition(".")
    if rest and first in GROUPS and name not in GROUPED:
        raise unknown(name, [known for known in GROUPED if known.startswith(f"{first}.")])
    return GROUPED.get(name, name)


def field_of(change: str) -> str:
    """The field of a recipe that 'name=text' is about."""
    return own_name(change.partition("=")[0].strip()).partition(".")[0]


def ungrouped(table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's table with the recipe's own names, whichever it is written with."""
    made: dict[str, Any] = {}
    for name, content in flat(dict(table)).items():
        *parents, last = own_name(name).split(".")
        inside = made
        for parent in parents:
            inside = inside.setdefault(parent, {})
            if not isinstance(inside, dict):
                raise Error(f"{parent} is given twice, once as a whole", code="recipe.format")
        if last in inside:
            raise Error(f"{name} is given twice", code="recipe.format")
        inside[last] = content
    return made
