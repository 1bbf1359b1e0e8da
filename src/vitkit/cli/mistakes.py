"""One-line errors for mistyped verbs and flags, and output streams that are closed or cannot be written."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from vitkit.cli.arguments import Argument, Verbs, arguments_of, subcommands
from vitkit.errors import Error, did_you_mean
from vitkit.listing import recipe_fields


def open_closed_streams() -> None:
    """Redirect standard output and error to /dev/null if the caller has closed them (>&-).

    Otherwise the next opened file would get their descriptor, and a library that prints would write into it.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            discard(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", closefd=False))


@contextlib.contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output here, so that a failed write is reported before the interpreter exits."""
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
    """Whether buffered output cannot be written; it is discarded, or Python would retry the flush at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        return True
    return False


def discard(descriptor: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


SYNONYMS = {  # names that other tools use
    "train": "finetune", "fit": "finetune", "eval": "evaluate", "test": "evaluate", "classify": "predict",
    "infer": "predict", "info": "show", "server": "serve", "check": "doctor",
    "--learning-rate": "--lr", "--iterations": "--steps", "--resolution": "--image-size",
    "--img-size": "--image-size", "--pretrained": "--weights", "--checkpoint": "--weights",
    "--conf": "--reject", "--score-threshold": "--reject", "--visualize": "--draw", "--save-masks": "--masks",
    "--save-json": "--coco", "--bs": "--batch", "--imgsz": "--image-size", "--num-workers": "--workers",
    "--amp": "--precision", "--output-dir": "--out",
    "--optimizer": "--set optimizer.kind", "--opt": "--set optimizer.kind",
    "--scheduler": "--set schedule.decay", "--sched": "--set schedule.decay",
    "--drop-path": "--set stochastic_depth", "--smoothing": "--set label_smoothing",
}  # fmt: skip
FLAG = re.compile("--[a-zA-Z]|-[a-zA-Z]$")  # -inf and -1 are values
FRAME = re.compile("\x1b\\[[0-9;]*m|[╭╮╰╯│─]|-{3,}")  # of the parser's error box


def parsed(words: Sequence[str], verbs: Verbs, parse: Callable[[], Any]) -> Any:
    """The result of the parser; its multi-line error box becomes a one-line Error."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return parse()
    except SystemExit as stop:
        if stop.code != 2:
            raise
    if error := explain(words, verbs):
        raise error
    raise Error(" ".join(FRAME.sub(" ", box.getvalue()).split()), code="request.value")


def explain(words: Sequence[str], verbs: Verbs) -> Error | None:
    """The error in a command line that the parser rejected; None if it cannot be found."""
    if not words:
        return missing(f"no verb given; expected one of {', '.join(verbs)} (see vitkit --help)")
    name, *rest = words
    if name.startswith("-"):
        return missing(
            f"{name}: a verb must come first, e.g. vitkit finetune DATA; vitkit --help lists all verbs"
        )
    if name not in verbs:
        return unknown(f"unknown verb {name!r};{suggestion(name, verbs)} vitkit --help lists all verbs")
    arguments = list(arguments_of(verbs[name]))
    if inner := dict(subcommands(arguments)):
        if not rest or rest[0] not in inner:
            expected = f"expected one of {', '.join(inner)} (see vitkit {name} --help)"
            if not rest:
                return missing(f"vitkit {name} needs a verb; {expected}")
            hint = suggestion(rest[0], inner)
            return unknown(f"unknown verb {rest[0]!r} of vitkit {name};{hint} {expected}")
        name, arguments = f"{name} {rest[0]}", list(arguments_of(inner[rest.pop(0)]))
    error = first_error(rest, arguments)
    return error and Error(f"{name}: {error} see vitkit {name} --help", code=error.code)


missing = partial(Error, code="request.missing")
unknown = partial(Error, code="request.unknown")
invalid = partial(Error, code="request.value")


def first_error(words: Sequence[str], arguments: Sequence[Argument]) -> Error | None:
    """The first error in the words after the verb."""
    flags = {argument.flag: argument for argument in arguments if not argument.positional}
    known, used, values = [*flags, "--help", "--help-all", "-h"], set(), []
    index = 0
    while index < len(words):
        name, equals, _ = words[index].partition("=")
        flag, index = name.replace("_", "-"), index + 1
        if not FLAG.match(flag):
            values.append(words[index - 1])
            continue
        if flag not in known:
            return unknown(f"unknown flag {name};{suggestion(flag, known)}")
        used.add(flag)
        limit, start = flags[flag].max_values if flag in flags else 0, index
        if equals and not limit:
            return invalid(f"{flag} takes no value;")
        while not equals and index < len(words) and index - start < limit and not FLAG.match(words[index]):
            index += 1
        if limit == 1 and not equals and index == start:
            return missing(f"{flag} needs a value;")
    positionals = [argument for argument in arguments if argument.positional]
    absent = [argument.flag for argument in positionals[len(values) :] if argument.required]
    absent += [flag for flag, argument in flags.items() if argument.required and flag not in used]
    if absent:
        return missing(f"{' and '.join(absent)} missing;")
    if len(values) > sum(argument.max_values for argument in positionals):
        extra = values[len(positionals)]
        return invalid(f"unexpected argument {extra!r} (a name with spaces needs quotes);")
    return None


def suggestion(word: str, known: Iterable[str]) -> str:
    """The did-you-mean hint for an unknown verb or flag, which may be the name that other tools use."""
    names = list(known)
    other = SYNONYMS.get(word) or as_field(word)
    return did_you_mean(word, names, matches=[other] if other and other.split()[0] in names else [])


def as_field(flag: str) -> str:
    """How --set changes the recipe field that an unknown flag names; empty if there is none."""
    name = flag.removeprefix("--").replace("-", "_")
    fields = recipe_fields("finetune")
    return next((f"--set {field}=VALUE" for field in fields if name == field.rpartition(".")[2]), "")


def print_version() -> None:
    """Print the versions that belong in a bug report."""
    import platform
    from importlib.metadata import version

    from vitkit import __version__

    print(f"vitkit {__version__} (Python {platform.python_version()}, torch {version('torch')})")
