"""The command line: words to one call. Imports torch only inside the verbs that need it."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

import tyro

from vitkit.cli import models, study, training, use
from vitkit.cli.flags import deferred, print_json, registry
from vitkit.cli.mistakes import discard, flushed_output, open_closed_streams, parsed, print_version
from vitkit.errors import code_of
from vitkit.report.terminal import warn

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
    "predict": use.predict,
    "serve": use.serve,
    "inspect": use.inspect,
    "report": use.report,
    "list": models.list_,
    "show": models.show,
    "cost": models.cost,
    "export": models.export,
    "convert": models.convert,
}
RENAMED = {  # flags of earlier versions, which are still accepted
    "--spread": "--parallel", "--record": "--cuda-graph", "--no-record": "--no-cuda-graph",
}  # fmt: skip
BAD_PATH = {  # a file that the user named is not there, is of another kind, or is not theirs: exit code 2
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
    errno.ELOOP, errno.ENODEV, errno.ENXIO,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0: done; 1: failed; 2: a request that cannot be met. No traceback for a user's mistake."""
    words = [current_flag(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    open_closed_streams()
    try:
        with flushed_output():
            command(words)()
    except KeyboardInterrupt as stop:  # a run's Interrupted is one: its text says how to go on
        if str(stop):
            print_error(words, code_of(stop, "training.stopped"), str(stop))
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    except BrokenPipeError:  # the reader of the output has seen enough
        sys.exit(0)
    except OSError as error:  # before ValueError, since an error of the network is both
        print_error(words, code_of(error), in_words(error))
        sys.exit(2 if error.errno in BAD_PATH else 1)
    except ValueError as error:  # vitkit.Error is one
        print_error(words, code_of(error), str(error))
        sys.exit(2)


def current_flag(word: str) -> str:
    """A flag of an earlier version, `--spread=fsdp` too, under its name of today; other words as they are."""
    flag, equals, value = word.partition("=")
    return RENAMED.get(flag, flag) + equals + value


def command(words: list[str]) -> Callable[[], None]:
    """What the words of a command line ask for, as a call that first checks every value."""
    if words == ["--version"]:
        return print_version
    parse = partial(
        tyro.extras.subcommand_cli_from_dict,
        {name: deferred(name, verb) for name, verb in VERBS.items()},
        prog="vitkit",
        description="The Vision Transformer system. vitkit VERB --help explains a verb, with examples; "
        "vitkit --version says which this is.",
        args=words,
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=registry(),
    )
    return parsed(words, VERBS, parse)


def in_words(error: OSError) -> str:
    """A system's error as its file and its reason."""
    if error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EIO):
        return f"standard output, or a file without a name: {error.strerror}"
    return str(error)


def print_error(words: Sequence[str], code: str, message: str) -> None:
    """One line on standard error; with --json the code and the message as JSON on standard output, too.

    Either stream may be full or closed: the exit code still tells.
    """
    if "--json" in words and os.environ.get("RANK", "0") == "0":  # of many processes the first answers
        try:
            print_json({"error": {"code": code, "message": message}})
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout.fileno())
    try:
        warn(f"vitkit: {message}")
    except OSError:
        discard(sys.stderr.fileno())
