"""Frozen values by the names of their fields: out of texts and JSON tables, each checked by its type."""

import types
import typing
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any

from vitkit.errors import Error

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
    near = get_close_matches(name, [*known, *others], 1) or get_close_matches(first, known, 1)
    if near and near[0] != name:
        return Error(f"no field {shown(name)}; did you mean {near[0]}?", code="recipe.unknown-field")
    return Error(f"no field {shown(name)}; there are {', '.join(sorted(known))}", code="recipe.unknown-field")


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
