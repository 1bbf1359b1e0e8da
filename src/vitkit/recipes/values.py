"""Frozen values by the names of their fields: out of texts and JSON tables, each checked by its type."""

import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, NoReturn, Self

from vitkit.errors import Error, did_you_mean
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.vit import ViTConfig
from vitkit.options import flat, setting

KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list"}
EXPECTED = {  # what a text for a field must be, by the field's type
    int: "a whole number", float: "a number", bool: "true or false", tuple: "values with commas between them",
}  # fmt: skip
TRUTH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def override(value: Any, changes: Iterable[str]) -> Any:
    """A frozen value with fields changed by 'name=text' or 'part.name=text', each checked by its type.

    All changes take place at once, so that only the outcome must make sense.
    """
    known = {f.name for f in fields(value)}
    made: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    for change in changes:
        name, text = name_and_text(change)
        first, _, rest = name.partition(".")
        if first not in known or (rest and not has_parts(getattr(value, first))):
            raise unknown(name, known)
        if rest:
            parts.setdefault(first, []).append(f"{rest}={text}")
        else:
            made[first] = parse(text, typing.get_type_hints(type(value))[first], name)
    for name, inner in parts.items():
        whole = made.get(name, getattr(value, name))
        made[name] = override(whole, inner) if is_dataclass(whole) else whole.override(inner)
    return checked(replace, value, **made)


def name_and_text(change: str, example: str = "optimizer.weight_decay=0.1") -> tuple[str, str]:
    """'batch = 8' -> ('batch', '8')."""
    name, equals, text = (part.strip() for part in change.partition("="))
    if not equals:
        raise Error(f"{shown(change)}: give field=value, as in {example}", code="recipe.value")
    return name, text


def has_parts(value: Any) -> bool:
    return is_dataclass(value) or hasattr(value, "override")


def unknown(name: str, known: Collection[str], others: Collection[str] = ()) -> Error:
    """The error for a field that is not there, with the nearest name or, if none is near, all of `known`."""
    first = name.partition(".")[0]
    names = [*known, *others]
    hint = "" if name in names else did_you_mean(name, names) or did_you_mean(first, known)
    hint = hint or f" there are {', '.join(sorted(known))}"
    return Error(f"no field {shown(name)};{hint}", code="recipe.unknown-field")


def checked(make: Any, /, *args: Any, **given: Any) -> Any:
    """What `make` makes of these values; its refusal is one of a recipe's value."""
    try:
        return make(*args, **given)
    except Error:
        raise
    except ValueError as error:
        raise Error(str(error), code="recipe.value") from None


def parse(text: str, hint: Any, name: str) -> Any:
    """Text to a value of a field's type."""
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
    """A frozen value out of a JSON table; an unknown field, or one of another type, is an error."""
    if not isinstance(table, dict):
        raise Error(
            f"{prefix.rstrip('.') or kind.__name__} must be a table, not {shown(table)}", code="recipe.format"
        )
    hints = typing.get_type_hints(kind)
    if strange := sorted(set(table) - set(hints)):
        raise unknown(f"{prefix}{strange[0]}", [prefix + name for name in hints])
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in table]:
        raise Error(f"{kind.__name__} needs the field {', '.join(missing)}", code="recipe.format")
    return checked(kind, **{name: conform(one, hints[name], prefix + name) for name, one in table.items()})


def conform(content: Any, hint: Any, name: str) -> Any:
    """A value out of JSON as a field of this type has it."""
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
