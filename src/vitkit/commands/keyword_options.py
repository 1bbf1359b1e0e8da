"""Options of the Python API as keyword arguments: their types, and their conversion to command-line form."""

import inspect
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from vitkit.commands.results import Place
from vitkit.errors import Error, did_you_mean
from vitkit.options import Precision, Training, check_options

Size = int | tuple[int, int] | str  # 384, (384, 256) or "384x256": height and width


class TrainingOptions(TypedDict, total=False):
    """The options of `vitkit finetune` and `vitkit pretrain`, by the names of their flags."""

    weights: Place
    model: str
    out: Place | None
    recipe: str
    task: str
    teacher: str
    train: str
    image_size: Size | None
    strict_size: bool
    batch: int | None
    steps: int | None
    epochs: float | None
    keep: Literal["best", "last"] | None
    patience: int | None
    lr: float | None
    seed: int | None
    subset: str | int | None
    corrections: Place
    against: Place | Sequence[Place]
    set: Mapping[str, object] | Sequence[str]
    device: str
    precision: Precision
    workers: int | None
    decoded: Place | None
    max_bad: float
    compile: bool | Literal["no", "yes", "auto"]
    recompute: bool
    cuda_graph: bool
    deterministic: bool
    parallel: Literal["auto", "ddp", "fsdp"]
    save_aside: bool
    track: str | Sequence[str]
    price_per_hour: float | None
    accept_changed_data: bool
    more_steps: int | None
    split_of: Place


class EmbedOptions(TypedDict, total=False):
    """Further options of `vitkit embed`, by the names of their flags."""

    pool: Literal["head", "cls", "mean"]
    normalize: bool
    dtype: Literal["float32", "float16"]
    precision: Precision
    workers: int | None
    part_size: int
    restart: bool
    on: Literal["local", "ray"]
    processes: int | None


Trains = TypeVar("Trains", bound=Callable[..., Any])


def with_signature(function: Trains) -> Trains:
    """Decorator that lists every option with its default in the signature, for help() and notebooks."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = typing.get_type_hints(TrainingOptions)
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
        for field in fields(Training)
        if (hint := hints.get(field.name))
    ]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


def training_options(options: Mapping[str, Any], *, plan: bool, **others: int) -> Training:
    """Keyword arguments as training options, checked like command-line flags; `others` are only checked."""
    known = {field.name for field in fields(Training)}
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise Error(
                f"unknown option {name!r};{hint} the options are {', '.join(sorted(known))}",
                code="request.unknown",
            )
    values = {name: as_option(name, value) for name, value in options.items()} | {"plan": plan}
    hints = typing.get_type_hints(Training, include_extras=True)
    check_options(hints | {"seeds": int}, values | others)
    return Training(**values)


def data_path(data: object) -> str:
    if not isinstance(data, str | os.PathLike):
        raise Error(
            f"data={data!r}: expected a path or the name of a data set".replace("\n", " "),
            code="request.value",
        )
    return as_text(data)


def as_option(name: str, value: Any) -> Any:
    """A Python value in command-line form: a size as text, a mapping as field=value."""
    if name == "set" and isinstance(value, Mapping):
        return tuple(f"{field}={as_text(content)}" for field, content in value.items())
    if name in ("set", "against", "track"):
        return as_texts(value)
    if name in ("out", "decoded"):
        return Path(value) if isinstance(value, str | os.PathLike) else value
    if name == "compile" and isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("image_size", "subset"):
        return None if value is None else as_text(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def as_texts(values: Place | Iterable[Place]) -> tuple[str, ...]:
    return tuple(map(as_text, (values,) if isinstance(values, str | os.PathLike) else values))


def as_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, tuple | list):
        return ("x" if all(type(part) is int for part in value) else ",").join(map(str, value))
    return str(value)
