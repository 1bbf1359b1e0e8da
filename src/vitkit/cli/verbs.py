"""The command line: words to one call. Imports torch only inside the verbs that need it."""

import errno
import signal
import sys
from collections.abc import Callable
from functools import partial

import tyro

from vitkit.cli import cost, export, frozen, inspect, learn, models, report, serve, study, suite, use
from vitkit.cli.flags import deferred, registry
from vitkit.cli.mistakes import parsed, print_version
from vitkit.cli.streams import discard, flushed_output, open_closed_streams
from vitkit.report.terminal import warn

VERBS: dict[str, Callable[..., None]] = {
    "demo": models.demo,
    "doctor": learn.doctor,
    "shard": learn.shard,
    "finetune": learn.finetune,
    "pretrain": learn.pretrain,
    "suite": suite.suite,
    "study": study.study,
    "evaluate": use.evaluate,
    "fewshot": frozen.fewshot,
    "predict": use.predict,
    "serve": serve.serve,
    "inspect": inspect.inspect,
    "report": report.report,
    "list": models.list_,
    "show": models.show,
    "cost": cost.cost,
    "export": export.export,
    "convert": models.convert,
}
BAD_PATH = {  # a file that the user named is not there, is of another kind, or is not theirs: exit code 2
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
    errno.ELOOP, errno.ENODEV, errno.ENXIO,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0: done; 1: failed; 2: a request that cannot be met. No traceback for a user's mistake."""
    open_closed_streams()
    try:
        with flushed_output():
            command(arguments)()
    except KeyboardInterrupt as stop:  # a run's Interrupted is one: its text says how to go on
        if str(stop):
            warn(f"vitkit: {stop}")
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    except BrokenPipeError:  # the reader of the output has seen enough
        sys.exit(0)
    except OSError as error:  # a server that cannot be reached is one, too
        fail(error, 2 if error.errno in BAD_PATH else 1)
    except ValueError as error:  # Error is one
        fail(error, 2)


def command(arguments: list[str] | None = None) -> Callable[[], None]:
    """What the words of a command line ask for, as a call that first checks every value."""
    words = sys.argv[1:] if arguments is None else arguments
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


def fail(error: Exception, code: int) -> None:
    """One line on standard error; a system's error as its file and its reason."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            text = f"{error.filename}: {error.strerror}"
        elif error.errno in (errno.ENOSPC, errno.EIO):
            text = f"standard output, or a file without a name: {error.strerror}"
    try:
        warn(f"vitkit: {text}")
    except OSError:  # standard error is full, too: the exit code still tells
        discard(sys.stderr.fileno())
    sys.exit(code)
