"""The arguments of each verb, read from its signature: for help, completion and messages about mistakes."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from vitkit.cli.flags import flag_and_type

Verbs = Mapping[str, Callable[..., None]]


@dataclasses.dataclass(frozen=True)
class Argument:
    """A flag or a positional argument of a verb."""

    flag: str  # or the metavar of a positional argument
    hint: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def positional(self) -> bool:
        return not self.flag.startswith("--")

    @property
    def max_values(self) -> float:
        kind = unwrapped(self.hint)
        return 0 if kind is bool else float("inf") if get_origin(kind) is tuple else 1

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that are accepted; empty if there are others."""
        kind = flag_and_type("", self.hint)[1]
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def metavar(self) -> str:
        """What stands for the value in the help: the name that was given, the choices, or TEXT."""
        if self.positional or not self.max_values:
            return ""
        return self.setting("metavar") or "|".join(self.choices) or "TEXT"

    @property
    def description(self) -> str:
        """The help text, and what happens by default."""
        return " ".join(filter(None, (self.setting("help"), self.by_default)))

    @property
    def by_default(self) -> str:
        """The default in parentheses; empty for a switch, and where the default is no value at all."""
        if hint := self.setting("help_behavior_hint"):
            return hint
        if self.required:
            return "" if self.positional else "(required)"
        if isinstance(self.default, bool) or self.default in (None, "", ()):
            return ""
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"(default: {' '.join(shown)})"

    def setting(self, name: str) -> str:
        """A setting of tyro.conf.arg; the outermost decides."""
        hints = (getattr(marker, name, None) for marker in reversed(get_args(self.hint)[1:]))
        return next((value for value in hints if isinstance(value, str)), "")


def arguments_of(verb: Callable[..., Any]) -> Iterator[Argument]:
    """The arguments of a verb and of its dataclass parameters."""
    hints = typing.get_type_hints(verb, include_extras=True)
    for name, parameter in inspect.signature(verb).parameters.items():
        kind = unwrapped(hints[name])
        if dataclasses.is_dataclass(kind):
            yield from arguments_of(typing.cast(type, kind))
        else:
            flag, default = flag_and_type(name, hints[name])[0], parameter.default
            yield Argument(f"--no-{flag[2:]}" if default is True else flag, hints[name], default)


def subcommands(arguments: Iterable[Argument]) -> Iterator[tuple[str, type]]:
    """The subcommands of a verb, each with the dataclass of its arguments."""
    for argument in arguments:
        for choice in get_args(unwrapped(argument.hint)):
            settings = get_args(choice)[1:] if get_origin(choice) is Annotated else ()
            yield from ((item.name, unwrapped(choice)) for item in settings if hasattr(item, "is_default"))


def verbs_and_parts(verbs: Verbs) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every verb, and after a verb with subcommands each of these: `study`, `study list`, `study run`, ..."""
    for name, verb in verbs.items():
        yield name, verb
        yield from ((f"{name} {part}", run) for part, run in subcommands(arguments_of(verb)))


def unwrapped(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint
