"""Mistyped verbs and flags, answered in one line; output that is closed, full or abandoned."""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, get_args, get_origin

from vitkit.cli.flags import described
from vitkit.errors import Error, did_you_mean


def open_closed_streams() -> None:
    """Standard output and error that the caller has closed (>&-) lead nowhere.

    Their numbers are taken too: else the next file to be opened would have one, and a library that prints
    would print into it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            discard(number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="replace", closefd=False))


@contextlib.contextmanager
def flushed_output() -> Iterator[None]:
    """Output that cannot be written is an error here, with its name, and not when Python ends."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is None and unwritable():
            raise OSError(error.errno, error.strerror, "standard output") from None
        raise


def unwritable() -> bool:
    """Whether text waits that cannot be written; it is discarded, for Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        return True
    return False


def discard(number: int) -> None:
    """Let a file number lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


Verbs = Mapping[str, Callable[..., None]]
SYNONYMS = {  # names that other tools use
    "train": "finetune", "fit": "finetune", "eval": "evaluate", "test": "evaluate", "classify": "predict",
    "infer": "predict", "info": "show", "server": "serve", "check": "doctor",
    "--learning-rate": "--lr", "--iterations": "--steps", "--resolution": "--image-size",
    "--img-size": "--image-size", "--pretrained": "--weights", "--checkpoint": "--weights",
}  # fmt: skip
FLAG = re.compile("--[a-zA-Z]|-[a-zA-Z]$")  # -inf and -1 are values
FRAME = re.compile("\x1b\\[[0-9;]*m|[╭╮╰╯│─]|-{3,}")  # of the parser's box


def parsed(words: Sequence[str], verbs: Verbs, parse: Callable[[], Any]) -> Any:
    """What the parser makes of the words; its error, a box of several lines, becomes an Error of one."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return parse()
    except SystemExit as stop:
        if stop.code != 2:
            raise
    if mistake := explained(words, verbs):
        raise mistake
    raise Error(" ".join(FRAME.sub(" ", box.getvalue()).split()), code="request.value")


def explained(words: Sequence[str], verbs: Verbs) -> Error | None:
    """What is wrong with a command line that the parser refused; None where that cannot be found."""
    if not words:
        return missing(f"give a verb: {', '.join(verbs)}; vitkit --help explains them")
    name, *rest = words
    if name.startswith("-"):
        return missing(
            f"{name}: give a verb first, as in vitkit finetune DATA; vitkit --help lists all verbs"
        )
    if name not in verbs:
        return unknown(f"unknown verb {name!r};{suggestion(name, verbs)} vitkit --help lists all verbs")
    arguments = list(arguments_of(verbs[name]))
    if inner := dict(subcommands(arguments)):
        if not rest or rest[0] not in inner:
            has = f"it has {', '.join(inner)}; vitkit {name} --help explains them"
            if not rest:
                return missing(f"give a verb of vitkit {name}; {has}")
            return unknown(f"unknown verb {rest[0]!r} of vitkit {name};{suggestion(rest[0], inner)} {has}")
        name, arguments = f"{name} {rest[0]}", list(arguments_of(inner[rest.pop(0)]))
    wrong = refused(rest, arguments)
    return wrong and Error(f"{name}: {wrong} vitkit {name} --help shows what it takes", code=wrong.code)


missing = partial(Error, code="request.missing")
unknown = partial(Error, code="request.unknown")
unfit = partial(Error, code="request.value")


@dataclasses.dataclass(frozen=True)
class Argument:
    """A flag or a positional word of a verb."""

    flag: str  # or the word that stands for it in --help
    hint: Any
    required: bool

    @property
    def positional(self) -> bool:
        return not self.flag.startswith("--")

    @property
    def most(self) -> float:
        """How many words it takes."""
        kind = unwrapped(self.hint)
        return 0 if kind is bool else float("inf") if get_origin(kind) is tuple else 1


def refused(words: Sequence[str], arguments: Sequence[Argument]) -> Error | None:
    """The first mistake in the words after the verb."""
    flags = {argument.flag: argument for argument in arguments if not argument.positional}
    known, given, free = [*flags, "--help", "-h"], set(), []
    place = 0
    while place < len(words):
        name, equals, _ = words[place].partition("=")
        flag, place = name.replace("_", "-"), place + 1
        if not FLAG.match(flag):
            free.append(words[place - 1])
            continue
        if flag not in known:
            return unknown(f"unknown flag {name};{suggestion(flag, known)}")
        given.add(flag)
        takes, start = flags[flag].most if flag in flags else 0, place
        if equals and not takes:
            return unfit(f"{flag} takes no value;")
        while not equals and place < len(words) and place - start < takes and not FLAG.match(words[place]):
            place += 1
        if takes == 1 and not equals and place == start:
            return missing(f"{flag} needs a value;")
    singles = [argument for argument in arguments if argument.positional]
    absent = [one.flag for one in singles[len(free) :] if one.required]
    absent += [flag for flag, one in flags.items() if one.required and flag not in given]
    if absent:
        return missing(f"{' and '.join(absent)} missing;")
    if len(free) > sum(argument.most for argument in singles):
        return unfit(f"{free[len(singles)]!r} is one word too many (a name with spaces needs quotes);")
    return None


def suggestion(word: str, known: Iterable[str]) -> str:
    """The hint for a mistyped verb or flag, with the name that other tools use in mind; may be empty."""
    names = list(known)
    return did_you_mean(word, names, matches=[name for name in names if name == SYNONYMS.get(word)])


def arguments_of(taker: Callable[..., Any]) -> Iterator[Argument]:
    """The arguments of a verb, those of its dataclasses too."""
    hints = typing.get_type_hints(taker, include_extras=True)
    for name, parameter in inspect.signature(taker).parameters.items():
        kind = unwrapped(hints[name])
        if dataclasses.is_dataclass(kind):
            yield from arguments_of(typing.cast(type, kind))
        else:
            flag, required = described(name, hints[name])[0], parameter.default is inspect.Parameter.empty
            yield Argument(f"--no-{flag[2:]}" if parameter.default is True else flag, hints[name], required)


def subcommands(arguments: Iterable[Argument]) -> Iterator[tuple[str, type]]:
    """The verbs of a verb, each with the dataclass of its words."""
    for argument in arguments:
        for choice in get_args(unwrapped(argument.hint)):
            notes = get_args(choice)[1:] if get_origin(choice) is Annotated else ()
            yield from ((note.name, unwrapped(choice)) for note in notes if hasattr(note, "is_default"))


def unwrapped(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def print_version() -> None:
    """The versions that a report of a fault should name."""
    import platform
    from importlib.metadata import version

    from vitkit import __version__

    print(f"vitkit {__version__} (Python {platform.python_version()}, torch {version('torch')})")
