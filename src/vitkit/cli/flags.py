"""Flags that several verbs share, and the range of every number: one table, checked first."""

import dataclasses
import json as json_module
import typing
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from vitkit.errors import Error, code_of
from vitkit.options import (
    MOST_PIXELS,
    RANGES,
    RATE,
    SERVICE,
    SHARE,
    SHOTS,
    STEPS,
    Range,
    check_device,
    parse_budget,
    parse_frozen_view,
    parse_l2,
    parse_size,
    parse_view,
    part_of,
    size_in_bytes,
)

Data = Annotated[
    Positional[str],
    arg(metavar="DATA", help="Folder, .csv, .parquet, .zip, .tar, .npz, shards (folder or URL) or 'digits'."),
]
Model = Annotated[
    Positional[str],
    arg(metavar="MODEL", help="A model file, a run folder, a Hugging Face folder or a published name."),
]
Device = Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, ...")]
View = Annotated[
    str,
    arg(
        metavar="NAME",
        help="How an image is brought to the model's size: model (as its card has it), squash, centre "
        "(shorter side to 256/224 of the size, then the central crop) or centre:N (shorter side to N).",
    ),
]
Workers = Annotated[int | None, arg(metavar="N", help="Processes that prepare images.")]
Json = Annotated[
    bool, arg(help="One JSON value on standard output, nothing else; an error as its code and message.")
]


def print_json(content: Any) -> None:
    print(json_module.dumps(content, indent=2))


Verb = Callable[..., None]


class Unread(str):
    """A value that is not of its flag's type, as it was given: a text for a number, or an empty text."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Text with numbers in it: the function that reads it raises an Error with what is expected."""

    read: Callable[[str], Any]


def check_data(place: str) -> None:
    from vitkit.datasets.opening import check_place

    check_place(place)


def check_model(place: str) -> None:
    from vitkit.weights.published import check_obtainable

    check_obtainable(place)


def check_weights(place: str) -> None:
    from vitkit.weights.published import check_known

    check_known(place)


def check_format(name: str) -> None:
    from vitkit import listing

    known = [row["format"] for row in listing.rows("formats")]
    if name not in known:
        raise Error(f"expected one of {', '.join(known)}", code="request.value")


FLAGS: dict[str, Range | Form] = {
    "DATA": Form(check_data),  # wrong paths are refused before torch is imported
    "DATA...": Form(check_data),
    "MODEL": Form(check_model),
    "IN": Form(check_model),
    "--weights": Form(check_weights),  # a plan fetches nothing
    **{f"--{name.replace('_', '-')}": allowed for name, allowed in RANGES.items()},
    "--budget": Form(parse_budget),
    "--cells": Range(1, MOST_PIXELS),
    "--device": Form(check_device),
    "--heads": Range(1, 1024),
    "--image-size": Form(parse_size),
    "--knn": Range(1, 1_000_000),
    "--l2": Form(parse_l2),
    "--layer": Range(-1000, 1000),
    "--processes": Range(1, 256),
    "--rates": RATE,
    "--schedules": STEPS,
    "--shifts": Range(0, MOST_PIXELS),
    "--shots": SHOTS,
    "--size": Range(0, 3),
    "--subset": Form(part_of),
    "--unsure-below": SHARE,
    "--view": Form(parse_view),
    # where a verb differs
    "inspect --images": Range(1, 1_000_000),
    "convert --format": Form(check_format),
    "cost --images": Range(1, 10**12),
    "cost --rate": Range(1e-6, 1e6),
    "cost --seconds": Range(1e-3, 3600),
    "cost --sizes": Range(1, MOST_PIXELS),
    "fewshot --view": Form(parse_frozen_view),
    "doctor --workers": Range(1, 256),
    "study --data": Form(check_data),
    "study --image-size": Range(16, MOST_PIXELS),
    **{f"serve --{name.replace('_', '-')}": allowed for name, allowed in SERVICE.items()},
    "serve --max-bytes": Form(size_in_bytes),
}


def registry() -> ConstructorRegistry:
    """How tyro reads values: what is not of its flag's type stays text, for check() to refuse in one line."""
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        kind: Any = info.type
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            return spec(lambda text: choices[choices.index(text)], f"{{{','.join(choices)}}}")
        if kind in (int, float):
            return spec(kind, kind.__name__.upper())
        if kind in (str, Path):
            return spec(lambda text: kind(text) if text else Unread(), "TEXT" if kind is str else "PATH")
        return None

    return rules


def spec(read: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec:
    def value(words: list[str]) -> Any:
        try:
            return read(words[0])
        except ValueError:
            return Unread(words[0])

    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar, instance_from_str=value, is_instance=lambda given: given is not None,
        str_from_instance=lambda given: [str(given)],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Given:
    """A flag as it was given: its name, the type of a single value, its values."""

    flag: str
    kind: Any
    values: tuple[Any, ...]


def given(hints: dict[str, Any], values: typing.Mapping[str, Any]) -> Iterator[Given]:
    """The flags of a verb, those of its dataclasses too, as far as they have values."""
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            yield from given(typing.get_type_hints(type(value), include_extras=True), vars(value))
        elif value is not None:
            flag, kind = described(name, hints[name])
            yield Given(flag, kind, value if isinstance(value, tuple) else (value,))


def described(name: str, hint: Any) -> tuple[str, Any]:
    """A parameter's flag, or the word for it in --help, and the type of a single value."""
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        notes = tuple(rest)
    words = [note for note in notes if hasattr(note, "metavar")]
    if tyro.conf.Positional in notes:
        flag = next((word.metavar for word in reversed(words) if word.metavar), name.upper())
    else:
        flag = "--" + next((word.name for word in words if word.name), name).replace("_", "-")
    while get_args(hint) and get_origin(hint) is not Literal:  # tuple[X, ...] and X | None
        hint = get_args(hint)[0]
    return flag, hint


def check(verb: str, one: Given) -> None:
    """Refuse a value that its flag does not take, in one line with the flag and the value."""
    allowed = FLAGS.get(f"{verb} {one.flag}", FLAGS.get(one.flag))
    for value in one.values:
        shown = repr(str(value)) if isinstance(value, str | Path) else f"{value}"
        shown = shown if len(shown) < 80 else f"{shown[:76]}..."
        if one.kind in (int, float):
            assert isinstance(allowed, Range), f"{verb} {one.flag} has no range in FLAGS"
            if isinstance(value, Unread) or value not in allowed:
                raise Error(
                    f"{one.flag} {shown}: expected {allowed.expected(whole=one.kind is int)}",
                    code="request.value",
                )
        elif isinstance(value, Unread):
            choices = ", ".join(get_args(one.kind)) if get_origin(one.kind) is Literal else ""
            wanted = f"one of {choices}" if choices else "a name, not an empty text"
            raise Error(f"{one.flag} {shown}: expected {wanted}", code="request.value")
        elif isinstance(allowed, Form) and value:  # a default may be empty
            try:
                allowed.read(value)
            except (ValueError, OSError) as error:
                why = error.strerror if isinstance(error, OSError) else str(error)
                named = not one.flag.startswith("--") or f"{one.flag} " in f"{why}"
                raise error if named else Error(f"{one.flag} {shown}: {why}", code=code_of(error)) from None


def deferred(name: str, verb: Verb) -> Callable[..., Callable[[], None]]:
    """The verb as tyro calls it: its values are checked, and the call is handed back, not yet made."""
    hints = typing.get_type_hints(verb, include_extras=True)

    @wraps(verb)
    def call(**values: Any) -> Callable[[], None]:
        return partial(checked, name, verb, hints, values)

    return call


def checked(name: str, verb: Verb, hints: dict[str, Any], values: dict[str, Any]) -> None:
    """Check every value, then do what the verb does."""
    for one in given(hints, values):
        check(name, one)
    verb(**values)
