"""The entry point of the command line. torch is imported only by the verbs that need it."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, get_args

import tyro

from vitkit.cli import bulk, help, models, study, training, use
from vitkit.cli.arguments import arguments_of, verbs_and_parts
from vitkit.cli.completion import Shell, script
from vitkit.cli.flags import deferred, print_json, registry
from vitkit.cli.mistakes import FLAG, discard, flushed_output, open_closed_streams, parsed, print_version
from vitkit.errors import code_of, similar_path
from vitkit.report.terminal import warn


def completion(
    shell: Annotated[tyro.conf.Positional[Shell], tyro.conf.arg(help="bash, zsh or fish.")],
) -> None:
    """Print a script that completes verbs, flags, and the names of models, weights and recipes with TAB.

    For bash, add the first line to ~/.bashrc; for zsh, the second to ~/.zshrc, after compinit.

    $ source <(vitkit completion bash)
    $ source <(vitkit completion zsh)
    $ vitkit completion fish > ~/.config/fish/completions/vitkit.fish
    """
    print(script(shell, VERBS))


VERBS: dict[str, Callable[..., None]] = {
    "demo": models.demo,
    "doctor": training.doctor,
    "shard": training.shard,
    "finetune": training.finetune,
    "pretrain": training.pretrain,
    "suite": training.suite,
    "study": study.study,
    "evaluate": use.evaluate,
    "fewshot": use.fewshot,
    "predict": bulk.predict,
    "embed": bulk.embed,
    "serve": use.serve,
    "inspect": use.inspect,
    "report": use.report,
    "list": models.list_,
    "show": models.show,
    "cost": models.cost,
    "export": models.export,
    "convert": models.convert,
    "push": models.push,
    "completion": completion,
}
RENAMED = {"--spread": "--parallel", "--no-record": "--no-cuda-graph"}  # deprecated flags, still accepted
APPENDED = {*get_args(tyro.conf.UseAppendAction[tuple[str, ...]])[1:]}  # marks flags with one value each time
NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|nan|-?inf", re.IGNORECASE)
MODE = re.compile("no|yes|auto")
OPTIONAL = {  # flags whose value may be left out: what it is then, and what a given value looks like
    "evaluate --reject": ("model", NUMBER),
    "predict --reject": ("model", NUMBER),
    "finetune --compile": ("yes", MODE),
    "pretrain --compile": ("yes", MODE),
}
BAD_PATH = {  # a path from the user is missing, of the wrong type or not accessible: exit code 2
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
    errno.ELOOP, errno.ENODEV, errno.ENXIO,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run a command line. Exit codes: 0 success, 1 failure, 2 invalid request (without traceback)."""
    words = [current_flag(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    open_closed_streams()
    try:
        with flushed_output():
            command(words)()
    except KeyboardInterrupt as stop:  # includes a run's Interrupted, whose message says how to resume
        if str(stop):
            print_error(words, code_of(stop, "training.stopped"), str(stop))
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    except BrokenPipeError:  # the reader closed the pipe, e.g. head
        sys.exit(0)
    except OSError as error:  # before ValueError, since network errors are both
        print_error(words, code_of(error), system_message(error))
        sys.exit(2 if error.errno in BAD_PATH else 1)
    except ValueError as error:  # vitkit.Error is one
        print_error(words, code_of(error), str(error))
        sys.exit(2)


def current_flag(word: str) -> str:
    """The current name of a deprecated flag, also in the form --flag=value; other words are unchanged."""
    flag, equals, value = word.partition("=")
    return RENAMED.get(flag, flag) + equals + value


def with_values(words: Sequence[str]) -> Iterator[str]:
    """The words of a command, where a flag of OPTIONAL without a value has its default one."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        default, given = OPTIONAL.get(f"{words[0]} {word}", ("", None))
        yield f"{word}={default}" if given and not given.fullmatch(following) else word


def joined(words: Sequence[str]) -> list[str]:
    """The words of a command, where a repeated flag of several values (--set) has all of them at its first.

    The parser alone would keep the last occurrence and drop the others.
    """
    names = [word.partition("=")[0].replace("_", "-") for word in words if FLAG.match(word)]
    if len(set(names)) == len(names):
        return list(words)
    parts = dict(verbs_and_parts(VERBS))
    verb = parts.get(" ".join(words[:2])) or parts.get(words[0])
    several = {
        argument.flag
        for argument in (arguments_of(verb) if verb else ())
        if argument.max_values > 1 and not any(marker in APPENDED for marker in get_args(argument.hint)[1:])
    }
    block: list[str] = []  # a flag with the words after it
    blocks: dict[str | int, list[str]] = {-1: block}  # by the flag, or by the place where each counts
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if not FLAG.match(word):
            block.append(word)
        elif flag in several:
            block = blocks.setdefault(flag, [flag])
            block += [value] if equals else []
        else:
            block = blocks[place] = [word]
    return [word for block in blocks.values() for word in block]


def command(words: list[str]) -> Callable[[], None]:
    """Parse a command line into a call that checks all values and then runs the verb."""
    if words == ["--version"]:
        return print_version
    if words[:1] == ["help"]:  # vitkit help finetune
        words = [*words[1:], "--help"]
    if text := help.requested(words, VERBS):
        return partial(help.print_help, text, 0 if words else 2)  # without a verb, nothing was done
    words = [word for word in with_values(words) if word not in help.ASKED]  # help of an unknown verb
    return parsed(words, VERBS, parser(joined(words)))


def parser(words: Sequence[str]) -> Callable[[], Callable[[], None]]:
    """tyro's parser of a command line."""
    return partial(
        tyro.extras.subcommand_cli_from_dict,
        {name: deferred(name, verb) for name, verb in VERBS.items()},
        prog="vitkit",
        args=words,
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=registry(),
    )


def system_message(error: OSError) -> str:
    """The message of an operating-system error: file and reason."""
    if error.strerror and error.filename:
        hint = similar_path(os.fsdecode(error.filename)) if error.errno == errno.ENOENT else ""
        return f"{error.filename}: {error.strerror};{hint}".rstrip(";")
    if error.errno in (errno.ENOSPC, errno.EIO):
        return f"standard output or an unnamed file: {error.strerror}"
    return str(error)


def print_error(words: Sequence[str], code: str, message: str) -> None:
    """Print one line on standard error and, with --json, code and message as JSON on standard output.

    Write failures are ignored: the exit code still reports the error.
    """
    if "--json" in words and os.environ.get("RANK", "0") == "0":  # only the main process prints
        try:
            print_json({"error": {"code": code, "message": message}})
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout.fileno())
    try:
        warn(f"vitkit: {message}")
    except OSError:
        discard(sys.stderr.fileno())
