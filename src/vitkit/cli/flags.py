"""Flags shared by several verbs, and the table of accepted values, which are checked before a verb runs."""

import dataclasses
import json as json_module
import typing
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from tyro.conf import Positional, UseAppendAction, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from vitkit.errors import Error, code_of
from vitkit.options import (
    MOST_PIXELS,
    PACK_SIZE,
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
    parse_train,
    parse_view,
    part_of,
    size_in_bytes,
)

Data = Annotated[
    Positional[str],
    arg(
        metavar="DATA", help="Folder, .csv, .parquet, .zip, .tar, .npz, shards (folder or URL), or 'digits'."
    ),
]
Model = Annotated[
    Positional[str],
    arg(
        metavar="MODEL", help="Model file or folder, run folder, name of published weights, or hf:owner/name."
    ),
]
Device = Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, ...")]
View = Annotated[
    str,
    arg(
        metavar="NAME",
        help="Resize to the model's input size: model (its own preprocessing), squash (no crop), fit "
        "(aspect ratio kept, padded), centre (shorter side to 256/224 of the size, then centre crop) or "
        "centre:N (shorter side to N).",
    ),
]
Reject = Annotated[
    str | None,
    arg(
        metavar="P",
        help="Reject an image, with the label 'unknown', if the probability of its likeliest label is below "
        "P (0 to 1); without P, below the threshold that a calibrated run stores in the model. For a "
        "detector: the minimum score of a box.",
    ),
]
Tta = Annotated[
    Literal["none", "flip", "crops"],
    arg(
        metavar="none|flip|crops",
        help="Test-time augmentation: mean of the probabilities of the image and its mirror (flip), or of "
        "five crops and their mirrors (crops).",
    ),
]
Labels = Annotated[
    tuple[str, ...],
    arg(
        metavar="TEXT...",
        help="Zero-shot classification with a CLIP or SigLIP model: the labels to choose from, or a .txt "
        "file with one per line.",
    ),
]
Template = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(
        metavar="TEXT",
        help="With --labels: the text around a label, with {} for the label; may be repeated for their mean.",
        help_behavior_hint="(default: 'a photo of a {}.')",
    ),
]
MergeTokens = Annotated[
    int,
    arg(
        metavar="R",
        help="Merge R similar tokens in each layer of a ViT (ToMe): faster, and a little less accurate.",
    ),
]
Workers = Annotated[
    int | None,
    arg(
        metavar="N",
        help="Data loader worker processes.",
        help_behavior_hint="(default: by the number of CPU cores, at most 16)",
    ),
]
Json = Annotated[bool, arg(help="Print one JSON value and nothing else; an error has a code and a message.")]


def print_json(content: Any) -> None:
    print(json_module.dumps(content, indent=2))


Verb = Callable[..., None]


class Unparsed(str):
    """The text of a value that could not be parsed: not a number, not a known choice, or empty."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The parser of a text value, which raises an Error with the expected form."""

    parse: Callable[[str], Any]


def check_data(place: str) -> None:
    from vitkit.datasets.opening import check_place

    check_place(place)


def check_part(place: str) -> None:
    from vitkit.datasets.opening import data_and_part

    check_data(data_and_part(place)[0])


def check_model(place: str) -> None:
    from vitkit.weights.published import check_obtainable

    check_obtainable(place)


def check_weights(place: str) -> None:
    from vitkit.weights.published import check_known

    check_known(place)


def check_repo(name: str) -> None:
    from vitkit.weights import hub

    hub.check_repo(name.removeprefix(hub.PREFIX))


def check_format(name: str) -> None:
    from vitkit import listing

    known = [row["format"] for row in listing.rows("formats")]
    if name not in known:
        raise Error(f"expected one of {', '.join(known)}", code="request.value")


def check_images(place: str) -> None:
    from vitkit.datasets.images import check_place

    check_place(place)


def check_reject(text: str) -> None:
    from vitkit.inference.rejection import parse_reject

    parse_reject(text)


def check_embed_out(name: str) -> None:
    from vitkit.inference.columns import EMBED, format_of

    format_of(name, EMBED)


def check_predict_out(name: str) -> None:
    from vitkit.inference.columns import PREDICT, format_of

    format_of(name, PREDICT)


FLAGS: dict[str, Range | Form] = {
    "DATA": Form(check_data),  # wrong paths are rejected before torch is imported
    "DATA...": Form(check_data),
    "MODEL": Form(check_model),
    "IN": Form(check_model),
    "OWNER/NAME": Form(check_repo),
    "--weights": Form(check_weights),  # no network check: a plan downloads nothing
    **{f"--{name.replace('_', '-')}": allowed for name, allowed in RANGES.items()},
    "--budget": Form(parse_budget),
    "--max-size": Form(lambda text: size_in_bytes(text, "--max-size", PACK_SIZE)),
    "--stop-after": Form(lambda text: parse_budget(text, "--stop-after")),
    "--cells": Range(1, MOST_PIXELS),
    "--device": Form(check_device),
    "--folds": Range(2, 100),
    "--heads": Range(1, 1024),
    "--image-size": Form(parse_size),
    "--knn": Range(1, 1_000_000),
    "--l2": Form(parse_l2),
    "--layer": Range(-1000, 1000),
    "--rates": RATE,
    "--reject": Form(check_reject),
    "--schedules": STEPS,
    "--shifts": Range(0, MOST_PIXELS),
    "--shots": SHOTS,
    "--size": Range(0, 3),
    "--subset": Form(part_of),
    "--train": Form(parse_train),
    "--unsure-below": SHARE,
    "--view": Form(parse_view),
    # overrides for single verbs
    "inspect --images": Range(1, 1_000_000),
    "convert --format": Form(check_format),
    "cost --images": Range(1, 10**12),
    "cost --rate": Range(1e-6, 1e6),
    "cost --seconds": Range(1e-3, 3600),
    "cost --sizes": Range(1, MOST_PIXELS),
    "fewshot --view": Form(parse_frozen_view),
    "doctor --workers": Range(1, 256),
    "embed DATA...": Form(check_images),
    "embed --out": Form(check_embed_out),
    "predict --out": Form(check_predict_out),
    "study --data": Form(check_part),
    "study --image-size": Range(16, MOST_PIXELS),
    **{f"serve --{name.replace('_', '-')}": allowed for name, allowed in SERVICE.items()},
    "serve --max-bytes": Form(size_in_bytes),
}


def registry() -> ConstructorRegistry:
    """Value parsers for tyro: unparsable values stay text, so that check() can reject them in one line."""
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
            return spec(lambda text: kind(text) if text else Unparsed(), "TEXT" if kind is str else "PATH")
        return None

    return rules


def spec(parse: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec:
    def parse_or_keep(words: list[str]) -> Any:
        try:
            return parse(words[0])
        except ValueError:
            return Unparsed(words[0])

    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar, instance_from_str=parse_or_keep,
        is_instance=lambda value: value is not None, str_from_instance=lambda value: [str(value)],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FlagValues:
    """A flag or positional argument with its values and the type of a single value."""

    flag: str
    kind: Any
    values: tuple[Any, ...]


def flag_values(hints: dict[str, Any], values: typing.Mapping[str, Any]) -> Iterator[FlagValues]:
    """The flags of a verb and of its dataclass parameters that have a value."""
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            yield from flag_values(typing.get_type_hints(type(value), include_extras=True), vars(value))
        elif value is not None:
            flag, kind = flag_and_type(name, hints[name])
            yield FlagValues(flag, kind, value if isinstance(value, tuple) else (value,))


def flag_and_type(name: str, hint: Any) -> tuple[str, Any]:
    """The flag of a parameter, or its metavar if it is positional, and the type of a single value."""
    annotations: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        annotations = tuple(rest)
    args = [annotation for annotation in annotations if hasattr(annotation, "metavar")]
    if tyro.conf.Positional in annotations:
        flag = next((arg.metavar for arg in reversed(args) if arg.metavar), name.upper())
    else:
        flag = "--" + next((arg.name for arg in args if arg.name), name).replace("_", "-")
    while get_args(hint) and get_origin(hint) is not Literal:  # tuple[X, ...] and X | None
        hint = get_args(hint)[0]
    return flag, hint


def check(verb: str, argument: FlagValues) -> None:
    """Reject a value that a flag does not accept, in one line with the flag and the value."""
    flag, kind = argument.flag, argument.kind
    allowed = FLAGS.get(f"{verb} {flag}", FLAGS.get(flag))
    for value in argument.values:
        text = repr(str(value)) if isinstance(value, str | Path) else f"{value}"
        text = text if len(text) < 80 else f"{text[:76]}..."
        if kind in (int, float):
            assert isinstance(allowed, Range), f"{verb} {flag} has no range in FLAGS"
            if isinstance(value, Unparsed) or value not in allowed:
                expected = allowed.expected(whole=kind is int)
                raise Error(f"{flag} {text}: expected {expected}", code="request.value")
        elif isinstance(value, Unparsed):
            choices = ", ".join(get_args(kind)) if get_origin(kind) is Literal else ""
            expected = f"one of {choices}" if choices else "a name, not an empty string"
            raise Error(f"{flag} {text}: expected {expected}", code="request.value")
        elif isinstance(allowed, Form) and value:  # a default may be empty
            try:
                allowed.parse(value)
            except (ValueError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                names_flag = not flag.startswith("--") or f"{flag} " in f"{reason}"
                raise (
                    error if names_flag else Error(f"{flag} {text}: {reason}", code=code_of(error))
                ) from None


def deferred(name: str, verb: Verb) -> Callable[..., Callable[[], None]]:
    """The verb as tyro calls it: it returns a call that checks all values and then runs the verb."""
    hints = typing.get_type_hints(verb, include_extras=True)

    @wraps(verb)
    def call(**values: Any) -> Callable[[], None]:
        return partial(check_and_run, name, verb, hints, values)

    return call


def check_and_run(name: str, verb: Verb, hints: dict[str, Any], values: dict[str, Any]) -> None:
    for argument in flag_values(hints, values):
        check(name, argument)
    verb(**values)
