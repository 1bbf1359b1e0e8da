"""Write docs/reference/cli.md: every verb with its description, examples, arguments and flags."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from vitkit.cli import VERBS
from vitkit.cli.arguments import arguments_of, subcommands, unwrapped
from vitkit.cli.flags import flag_and_type

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
START = """# Command line

Every verb with its arguments and flags, as `vitkit VERB --help` prints them. Flags may stand anywhere after
the verb; those that take several values (`...`) take them separated by spaces. Every verb has `--help`;
`vitkit --version` prints the versions that belong in a bug report. Exit codes: 0 success, 1 failure, 2 an
invalid request; every error has a [code](errors.md).

This page is written by `python tests/make_cli_page.py`.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """An argument or flag of a verb."""

    flag: str
    metavar: str
    default: str
    help: str

    def markdown(self) -> str:
        value = f" {escaped(self.metavar)}" if self.flag.startswith("-") and self.metavar else ""
        code = (
            f"`{self.flag}`" if "|" not in self.flag else f"<code>{self.flag.replace('|', '&#124;')}</code>"
        )
        return f"| {code}{value} | {escaped(self.default)} | {escaped(self.help)} |"


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command with what declares its arguments; the subcommands of a verb are commands of their own."""
    for name, verb in VERBS.items():
        inner = dict(subcommands(arguments_of(verb)))
        yield from ({f"{name} {sub}": cls for sub, cls in inner.items()} if inner else {name: verb}).items()


def rows(verb: Callable[..., Any]) -> Iterator[Row]:
    """The arguments and flags of a command, those of its dataclass parameters included."""
    hints = typing.get_type_hints(verb, include_extras=True)
    for name, parameter in inspect.signature(verb).parameters.items():
        hint = hints[name]
        if dataclasses.is_dataclass(unwrapped(hint)):
            yield from rows(typing.cast(type, unwrapped(hint)))
            continue
        flag, kind = flag_and_type(name, hint)
        off = parameter.default is True
        settings = [one for one in get_args(hint)[1:] if hasattr(one, "metavar")]
        yield Row(
            f"--no-{flag[2:]}" if off else flag,
            ""
            if kind is bool
            else next((one.metavar for one in settings[::-1] if one.metavar), of_type(kind)),
            default_of(parameter, settings),
            next((one.help for one in settings[::-1] if one.help), ""),
        )


def of_type(kind: Any) -> str:
    """The metavar of a value that declares none."""
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else kind.__name__.upper()


def default_of(parameter: inspect.Parameter, settings: list[Any]) -> str:
    """The default as the help words it; empty if there is none or if it says nothing."""
    if worded := next((one.help_behavior_hint for one in settings if one.help_behavior_hint), None):
        return str(worded).removeprefix("(").removesuffix(")").removeprefix("default: ")
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "required"
    if value in (None, "", (), True, False) and not (value == 0 and type(value) in (int, float)):
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def escaped(text: str) -> str:
    for old, new in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("[", "\\[")):
        text = text.replace(old, new)
    return text


def section(name: str, verb: Callable[..., Any]) -> str:
    """One command: description, examples, arguments."""
    lines = inspect.cleandoc(verb.__doc__ or "").splitlines()
    examples = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    text = "\n".join(escaped(line) for line in lines if not line.startswith("$ ")).strip()
    table = ["| argument | default | meaning |", "|---|---|---|", *(row.markdown() for row in rows(verb))]
    return "\n".join([f"\n## vitkit {name}\n", text, "", "```bash", *examples, "```", "", *table]) + "\n"


def page() -> str:
    return START + "".join(section(name, verb) for name, verb in commands())


if __name__ == "__main__":
    PAGE.write_text(page())
